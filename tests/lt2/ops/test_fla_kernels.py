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
EXPECTED = {"linear": 10, "delta": 10, "step": 12}

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(900),  # 20 to 40 s of CPU each; generous for a busy machine
    pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in ("triton", "fla")),
        reason="needs triton and flash-linear-attention: install the `interpret` extra",
    ),
]


@pytest.mark.parametrize(
    ("kernels", "selection"),
    [("linear", "linear and not step"), ("delta", "delta and not step"), ("step", "step")],
)
def test_fla_kernels_equal_the_oracles(kernels, selection):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection]
    run = subprocess.run(
        [*command, str(HERE / "interpreted_kernels.py")],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed is not None, report
    assert int(passed.group(1)) == EXPECTED[kernels], report
