"""The CUDA path's Python, on a machine without CUDA (see card.py)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lt2.pretended_card.card import library

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++") or ""

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA"),
    pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs fla: the `interpret` extra"),
]


def test_training_and_decoding(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(library(tmp_path, COMPILER)),
        "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_a_card.py")]
    run = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "59 passed" in run.stdout, run.stdout
