from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from lt2.ops import dispatch


@pytest.fixture(autouse=True)
def _fresh_choices(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_announced", set())


def _pretend(monkeypatch, *, capability, triton, installed=()):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(dispatch, "_triton_version", lambda: triton)
    monkeypatch.setattr(dispatch, "_installed", lambda package: package in installed)


def test_cpu_runs_on_torch_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO, logger="lt2.ops"):
        assert dispatch.backend_for("gated_delta_rule", torch.zeros(1)) == "torch"
        assert dispatch.backend_for("gated_delta_rule", torch.zeros(1)) == "torch"
        assert dispatch.attention_backend("causal_attention", torch.zeros(1)) == "torch"
    assert [r.message for r in caplog.records] == ["gated_delta_rule on cpu: torch", "causal_attention on cpu: torch"]


def test_fla_on_cpu_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="gated_delta_rule: fla has no CPU kernels.*TRITON_INTERPRET=1"):
        dispatch.backend_for("gated_delta_rule", torch.zeros(1), "fla")


def test_the_interpreter_opens_the_fla_path(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_installed", lambda package: True)
    assert dispatch.backend_for("gated_delta_rule", torch.zeros(1)) == "fla"
    assert dispatch.backend_for("gated_delta_rule", torch.zeros(1), "torch") == "torch"
    assert dispatch.backend_for("gated_delta_rule", torch.zeros(1, dtype=torch.float64)) == "torch"
    monkeypatch.setattr(dispatch, "_installed", lambda package: package != "triton")
    assert dispatch.backend_for("gated_delta_rule", torch.zeros(1)) == "torch"


@pytest.mark.parametrize(
    ("capability", "triton", "installed", "broken"),
    [
        ((9, 0), (3, 3, 1), (), False),
        ((9, 0), (3, 4, 0), (), True),
        ((9, 0), (3, 6, 0), (), True),
        ((9, 0), (3, 7, 0), (), True),
        ((9, 0), (3, 7, 1), (), False),
        ((9, 0), (3, 6, 0), ("tilelang",), False),
        ((8, 0), (3, 6, 0), (), False),
    ],
)
def test_miscompiled_backward_on_hopper(monkeypatch, capability, triton, installed, broken):
    _pretend(monkeypatch, capability=capability, triton=triton, installed=installed)
    assert dispatch.scalar_gate_backward_is_broken() is broken


def test_startup_problems_name_their_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert dispatch.startup_problems() == []
    _pretend(monkeypatch, capability=(9, 0), triton=(3, 6, 0), installed=("fla", "triton"))
    compiler, flash = dispatch.startup_problems()
    assert "triton 3.6.0" in compiler
    assert "install triton >= 3.7.1 (or, for GDN, tilelang)" in compiler
    assert flash.startswith("flash-attn is not installed")
    _pretend(monkeypatch, capability=(9, 0), triton=(0, 0, 0), installed=("flash_attn",))
    (missing,) = dispatch.startup_problems()
    assert "install the `fla` extra" in missing


def test_a_choice_does_not_break_a_compiled_graph(caplog):
    def double(x):
        return 2 * x if dispatch.backend_for("gated_delta_rule", x) == "torch" else x

    with caplog.at_level(logging.INFO, logger="lt2.ops"):
        compiled = torch.compile(double, fullgraph=True, backend="eager")
        assert compiled(torch.ones(1)).item() == 2
    assert "gated_delta_rule on cpu: torch" in [r.message for r in caplog.records]


def test_import_stays_light():
    code = "import sys, lt2.ops; print([m for m in ('triton', 'fla', 'torch._dynamo') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
