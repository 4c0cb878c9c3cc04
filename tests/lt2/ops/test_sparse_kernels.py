"""The CUDA paths of sparse attention: on CPU under Triton's interpreter in a subprocess, as test_fla_kernels.py does,
and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lt2.ops.sparse import select_keys, selected_attention

HERE = Path(__file__).parent
INSTALLED = all(importlib.util.find_spec(package) for package in ("triton", "fla"))


@pytest.mark.interpret
@pytest.mark.skipif(not INSTALLED, reason="needs triton and flash-linear-attention: install the `interpret` extra")
def test_kernels_under_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_sparse.py")],
        env={**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report
    assert re.search(r"\b7 passed", report), report


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_gather_equals_pytorch_on_cuda():
    B, G, L, R, E, top = 2, 2, 1024, 4, 64, 256
    generator = torch.Generator("cuda").manual_seed(0)
    random = lambda *shape: torch.randn(shape, device="cuda", generator=generator)  # noqa: E731
    q, k, v = random(B * G, L, R, E), random(B * G, L, 1, E), random(B * G, L, 1, E)
    last = torch.arange(L, device="cuda").expand(B, L)
    keys, found = select_keys(
        random(B, L, 4, 32), random(B, L, 32), random(B, L, 4), torch.zeros_like(last), last, top_k=top
    )
    results = {}
    for backend, dtype in (("torch", torch.float32), ("triton", torch.float32), ("triton", torch.bfloat16)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o, weights = selected_attention(*leaves, keys, found.long(), return_weights=True, backend=backend)
        (o.float() * q.square()).sum().backward()
        results[backend, dtype] = [o.detach().float(), weights, *(x.grad.float() for x in leaves)]
    for (backend, dtype), got in results.items():
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, results["torch", torch.float32])]
        assert max(errors) <= bound, (backend, dtype, errors)
