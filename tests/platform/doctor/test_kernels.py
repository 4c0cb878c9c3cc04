"""Which kernels run here, and that wrong ones are told from right ones."""

import math

import torch
from torch import Tensor

from lt2.mixers.delta import GatedDeltaNet
from lt2_platform.doctor import kernels
from lt2_platform.doctor.kernels import chosen, parity, run

CPU = torch.device("cpu")


def test_what_runs_on_a_cpu():
    found = {finding.name: finding.said for finding in chosen(CPU)}
    assert found["attention"] == "PyTorch (CPU, fp32)"
    assert set(found) == {"recurrences", "attention"}


def test_a_machine_with_slow_kernels_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "startup_problems", lambda: ["fla is not installed"])
    *_, last = chosen(CPU)
    assert (last.state, last.said) == ("note", "fla is not installed")


def test_every_mixer_asked_for_runs():
    found = list(run(CPU, ["window", "gdn"]))
    assert [(finding.name, finding.state) for finding in found] == [("window", "ok"), ("gdn", "ok")]


def test_a_kernel_that_computes_something_else(monkeypatch):
    right = GatedDeltaNet.forward

    def wrong(self, x: Tensor, *args, **kwargs):
        out, losses = right(self, x, *args, **kwargs)
        return out * (1.05 if x.dtype == torch.float32 else 1.0), losses

    monkeypatch.setattr(GatedDeltaNet, "forward", wrong)
    found = parity("gdn", CPU)
    assert found.state == "PROBLEM"
    assert "differs from fp64" in found.said


def test_a_kernel_that_gives_nan_in_one_case(monkeypatch):
    right = kernels.check

    def nan_in_the_last(*args):
        *rows, last = right(*args)
        return [*rows, last | {"error": math.nan, "ok": False}]

    monkeypatch.setattr(kernels, "check", nan_in_the_last)
    found = parity("gdn", CPU)
    assert (found.state, "nan of fp64's norm" in found.said) == ("PROBLEM", True)


def test_a_kernel_that_does_not_run(monkeypatch):
    def broken(*args):
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(kernels, "check", broken)
    found = parity("gdn", CPU)
    assert found.state == "PROBLEM"
    assert "RuntimeError: no kernel image is available for execution" in found.said
