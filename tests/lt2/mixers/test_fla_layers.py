"""Our linear layers on fla's kernels, and equal to fla's own layers, on CPU under Triton's interpreter.

The interpreter patches triton and fla for good, so it lives in a subprocess; interpreted_layers.py holds the tests.
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
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in ("triton", "fla")),
        reason="needs triton and flash-linear-attention: install the `interpret` extra",
    ),
]


def test_layers():
    paths = os.pathsep.join([str(HERE.parent / "ops"), str(HERE)])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_layers.py")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert re.search(r"\b24 passed", report), report
