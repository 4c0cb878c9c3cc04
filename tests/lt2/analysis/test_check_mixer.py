"""check_mixer on a user's file: a sound mixer passes, and each kind of bug fails the check that is about it."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from lt2.analysis.check_mixer import check_mixer
from lt2.analysis.parity import CHECKS, deviation
from lt2.config import ConfigError, ModelConfig
from lt2.model import build

# An exponential moving sum, with a switch for every mistake one can make in a mixer.
SOURCE = """
import torch
from pydantic import Field
from torch import nn
from typing import ClassVar, Literal
from lt2.config import MixerConfig

class MovingSumConfig(MixerConfig):
    module: ClassVar[str] = "MovingSum"
    weights: ClassVar[str] = "moving_sum"
    type: Literal["moving_sum"] = "moving_sum"
    fault: str = ""
    lost: int = Field(0, exclude=True)

    def check(self, dims):
        if self.fault == "refused":
            raise ValueError(f"moving_sum: dim {dims.dim} is refused")

    def cache_spec(self, dims, max_len):
        if self.fault == "no cache spec":
            return super().cache_spec(dims, max_len)
        extra = {"unused": ((3,), "compute")} if self.fault == "unused cache" else {}
        return {"state": ((dims.dim,), "float32"), **extra}

    def sequence_flops(self, dims, seq_len):
        return 0.0 if self.fault == "no flops" else 2.0 * dims.dim

RETURNED = {
    "no loss": lambda x: x,
    "shorter": lambda x: (x[:, 1:], None),
    "loss of tokens": lambda x: (x, x.sum(-1)),
    "loss is a number": lambda x: (x, 0.5),
}

KINDS = {"int": torch.int64, "bool": torch.bool}

class MovingSum(nn.Module):
    def __init__(self, config, dims):
        super().__init__()
        self.v_proj = nn.Linear(dims.dim, dims.dim, bias=False)
        self.decay_proj = nn.Linear(dims.dim, dims.dim, bias=False)
        self.o_proj = nn.Linear(dims.dim, dims.dim, bias=False)
        if config.fault == "parameter":
            self.own = nn.Parameter(torch.ones(dims.dim))
        elif "buffer" in config.fault:
            kind = next((kind for name, kind in KINDS.items() if name in config.fault), torch.float32)
            self.register_buffer("own", torch.ones(dims.dim, dtype=kind), persistent="saved" in config.fault)
        self.init_special = self._set_own if "set by rule" in config.fault else lambda: None
        self.spare_proj = nn.Linear(dims.dim, dims.dim) if config.fault == "unused weights" else None

    def _set_own(self):
        self.own.fill_(1)

    def forward(self, x, spec, seq, cache):
        v, decay = self.v_proj(x), torch.sigmoid(self.decay_proj(x))
        if spec.fault == "batch":
            v = v - v.mean(0, keepdim=True)
        if spec.fault == "future":
            v = v - v.mean(1, keepdim=True)
        state = torch.zeros_like(x[:, 0]) if cache is None or spec.fault == "forgets" else cache["state"].clone()
        outputs = []
        for t in range(x.shape[1]):
            if seq.reset is not None and spec.fault != "documents":
                state = state.masked_fill(seq.reset[:, t, None], 0.0)
            new = decay[:, t] * state + v[:, t]
            if seq.valid is not None and spec.fault != "padding":
                new = torch.where(seq.valid[:, t, None], new, state)
            state = new
            outputs.append(state)
        if cache is not None and spec.fault == "replaces":
            cache["state"] = state
        elif cache is not None:
            cache["state"].copy_(state)
        if spec.fault in RETURNED:
            return RETURNED[spec.fault](x)
        return self.o_proj(torch.stack(outputs, 1)), None
"""

DECODING = {"decode_matches_forward", "chunked_prefill", "padding_leaks_nothing"}
EVERY_CACHE = {*DECODING, "batch_invariance", "cache_accounting"}
FAULTS = {
    "": set(),
    "batch": {"batch_invariance", "padding_leaks_nothing", "documents_leak_nothing"},
    "future": {"causality", "documents_leak_nothing", *DECODING},
    "forgets": DECODING,
    "documents": {"documents_leak_nothing"},
    "padding": {"padding_leaks_nothing"},
    "replaces": {"cache_accounting"},
    "unused cache": {"cache_accounting"},
    "unused weights": {"gradients_flow"},
    "no cache spec": EVERY_CACHE,
    "no flops": {"flops_accounted"},
}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "moving_sum.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("layer", range(3))
def test_a_nan_of_any_layer_is_seen(layer):
    expected, got = torch.zeros(3, 2, 4, 5), torch.zeros(3, 2, 4, 5)
    got[layer, 1, 2, 3] = math.nan
    assert deviation(list(expected), list(got)) == math.inf


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_fails_its_check(source, fault):
    report = check_mixer(f"{source}:MovingSumConfig", fields={"fault": fault})
    assert {check.name for check in report.checks} == set(CHECKS)
    assert {check.name for check in report.checks if not check.passed} == FAULTS[fault], report
    assert report.passed == (fault == "")
    assert str(report).count("FAIL") == len(FAULTS[fault])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("parameter", "blocks.0.mixers.moving_sum.own has no initial value: .* set it in a method init_special"),
        ("saved buffer", "blocks.0.mixers.moving_sum.own has no initial value"),
        ("buffer", "blocks.0.mixers.moving_sum.own is a buffer that no checkpoint holds"),
        ("saved int buffer", "blocks.0.mixers.moving_sum.own has no initial value"),
        ("saved bool buffer", "blocks.0.mixers.moving_sum.own has no initial value"),
        ("bool buffer", "blocks.0.mixers.moving_sum.own is a buffer that no checkpoint holds"),
    ],
)
def test_values_that_only_init_gives_are_refused_by_name(source, fault, reason):
    mixer = {"type": "moving_sum", "source": str(source), "fault": fault}
    sizes = {"vocab_size": 5, "dim": 8, "n_layers": 1, "num_heads": 1, "ffn_hidden": 8}
    config = ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": mixer}})
    with pytest.raises(ConfigError, match=reason):
        build(config)


def test_what_cannot_be_built_is_said_once(source):
    (check,) = check_mixer(f"{source}:MovingSumConfig", fields={"fault": "parameter"}).checks
    assert (check.name, check.passed) == ("build", False)
    assert "own has no initial value" in check.detail


@pytest.mark.parametrize("kind", ["int", "bool"])
def test_a_saved_buffer_that_init_special_sets_is_kept(source, kind):
    mixer = {"type": "moving_sum", "source": str(source), "fault": f"saved {kind} buffer, set by rule"}
    sizes = {"vocab_size": 5, "dim": 8, "n_layers": 1, "num_heads": 1, "ffn_hidden": 8}
    model = build(ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": mixer}}))
    assert model.state_dict()["blocks.0.mixers.moving_sum.own"].tolist() == [1] * 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no loss", "(output (B, L, D), auxiliary loss or None), not a Tensor"),
        ("shorter", "its output is (3, 23, 32) where its input is (3, 24, 32)"),
        ("loss of tokens", "of each row (B,) or one of all, not (3, 24)"),
        ("loss is a number", "of each row (B,) or one of all, not a float"),
    ],
)
def test_what_forward_returns_is_told_against_what_it_must(source, fault, message):
    (causality,) = (
        check
        for check in check_mixer(f"{source}:MovingSumConfig", fields={"fault": fault}).checks
        if check.name == "causality"
    )
    assert "MovingSum.forward must return" in causality.detail
    assert message in causality.detail


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('= "MovingSum"', '= "MovingSun"', r"names 'MovingSun' as its `module`, but .*moving_sum\.py defines no such"),
        ('    module: ClassVar[str] = "MovingSum"\n', "", "MovingSumConfig has no `module`: the name of the class"),
        ('    weights: ClassVar[str] = "moving_sum"\n', "", "mixer MovingSumConfig has no `weights`: the name of its"),
        ('Literal["moving_sum"] = "moving_sum"', 'Literal["ce"] = "ce"', "MovingSumConfig has the type 'ce', the name"),
    ],
)
def test_a_config_that_does_not_say_what_runs_it_is_refused_when_it_is_read(tmp_path, old, new, message):
    assert old in SOURCE
    (tmp_path / "moving_sum.py").write_text(SOURCE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        check_mixer(f"{tmp_path}/moving_sum.py")


def test_a_field_that_is_not_written_fails_the_round_trip(source):
    report = check_mixer(f"{source}:MovingSumConfig", fields={"lost": 1})
    assert [check.name for check in report.checks if not check.passed] == ["config_round_trip"]
    assert "config changed" in str(report)


@pytest.mark.parametrize("name", ["gdn", "full"])
def test_shipped_mixers_are_checked_by_type(name):
    assert check_mixer(name).passed


def test_bad_requests_are_user_errors(source, tmp_path):
    with pytest.raises(ConfigError, match="no mixer 'gnd'; give path.py:MyMixerConfig or one of"):
        check_mixer("gnd")
    with pytest.raises(ConfigError, match="absent.py' does not exist"):
        check_mixer(f"{tmp_path}/absent.py:X")
    with pytest.raises(ConfigError, match="no MixerConfig named 'MovingSum'; it has MovingSumConfig"):
        check_mixer(f"{source}:MovingSum")
    with pytest.raises(ConfigError, match="unknown key 'falt'; did you mean 'fault'"):
        check_mixer(f"{source}:MovingSumConfig", fields={"falt": "x"})
    with pytest.raises(ConfigError, match="moving_sum: dim 32 is refused"):
        check_mixer(f"{source}:MovingSumConfig", fields={"fault": "refused"})
    with pytest.raises(ConfigError, match="seq_len is 8"):
        check_mixer("gdn", seq_len=8)


def test_a_missing_source_is_named(tmp_path):
    mixer = {"type": "moving_sum", "source": str(tmp_path / "gone.py")}
    sizes = {"vocab_size": 5, "dim": 8, "n_layers": 1, "num_heads": 1}
    with pytest.raises((ConfigError, ValidationError), match="gone.py' does not exist"):
        ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": mixer}})


def test_a_file_with_one_mixer_is_enough_to_name_it(source, tmp_path):
    assert check_mixer(str(source)).mixer == "moving_sum"
    (tmp_path / "none.py").write_text("from lt2.config import MixerConfig\n")
    with pytest.raises(ConfigError, match="none.py: it has none; see docs/extending.md"):
        check_mixer(str(tmp_path / "none.py"))
