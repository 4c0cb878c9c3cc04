"""The CUDA path of the recurrent ops, on CPU: fla's real kernels under Triton's interpreter.

The interpreter patches triton and fla for good, so it lives in a subprocess; interpreted_kernels.py holds the tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(2700),  # some 100 s of CPU; generous for a busy machine
    pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in ("triton", "fla")),
        reason="needs triton and flash-linear-attention: install the `interpret` extra",
    ),
]


def test_fla_kernels_equal_the_oracles():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_kernels.py")]
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert re.search(r"\b38 passed", report), report
