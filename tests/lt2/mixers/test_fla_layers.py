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
LAYERS = 8

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(package) for package in ("triton", "fla")),
        reason="needs triton and flash-linear-attention: install the `interpret` extra",
    ),
]


@pytest.mark.parametrize(
    "selection",
    ["our_layer_is_flas_layer", "packed_layer_on_flas_kernels", "prefill_and_decode_on_flas_kernels"],
)
def test_layers(selection):
    paths = os.pathsep.join([str(HERE.parent / "ops"), str(HERE)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection]
    run = subprocess.run(
        [*command, str(HERE / "interpreted_layers.py")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    passed = re.search(r"(\d+) passed", report)
    assert passed is not None, report
    assert int(passed.group(1)) == LAYERS, report
