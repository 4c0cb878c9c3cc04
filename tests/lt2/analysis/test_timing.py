"""The one timing loop that benchmarks and evaluations share."""

from __future__ import annotations

import time

import torch

from lt2.analysis.timing import repeat_seconds


def test_warm_ups_run_and_are_not_counted():
    calls = []

    def work():
        calls.append(None)
        time.sleep(0.05 if len(calls) <= 2 else 0.001)

    times = repeat_seconds(work, torch.device("cpu"), warmups=2, repeats=3)
    assert len(calls) == 5
    assert len(times) == 3
    assert all(seconds >= 0.001 for seconds in times)
