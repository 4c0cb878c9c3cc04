"""Our Triton decode kernels under Triton's interpreter, in a process of its own (see interpreted_decode.py)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: the `interpret` extra"),
]


def test_decode_kernels_equal_the_reference():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_decode.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "23 passed" in run.stdout, run.stdout


def test_decode_kernels_compile_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compiled_decode.py")]
    run = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("compiled") == 19, run.stdout
