"""Who tunes kernels first, and on what."""

import time
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch

from lt2.config import MixerConfig, ModelConfig
from lt2.mixer_configs import GatedDeltaNetConfig
from lt2.model import build
from lt2_platform.train import ranks
from lt2_platform.train.tuning import first_rank_first, run_each_kind
from tests.ranks import run_ranks

HYBRID = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:2"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_every_kind_of_block_runs_once_at_the_micro_batchs_shape(packed, dtype):
    sizes = {"vocab_size": 32, "dim": 32, "n_layers": 6, "n_loops": 2, "num_heads": 2}
    model = build(ModelConfig.model_validate({**sizes, "layout": HYBRID}))
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, out: seen.append((args[1].type, tuple(args[0].shape))))
    assert run_each_kind(model, rows=3, seq_len=40, dtype=dtype, packed=packed) == 2
    assert sorted(seen) == [("full", (3, 40, 32)), ("gdn", (3, 40, 32))]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mixer_of_ones_own_may_have_lists_among_its_fields(monkeypatch):
    monkeypatch.setattr(MixerConfig, "kinds", dict(MixerConfig.kinds))

    class Listed(GatedDeltaNetConfig):
        type: Literal["listed"] = "listed"
        weights: ClassVar[str] = "listed"
        widths: list[int] = [1, 2]

    sizes = {"vocab_size": 32, "dim": 32, "n_layers": 2, "n_loops": 2, "num_heads": 2}
    model = build(ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": {"type": "listed"}}}))
    assert run_each_kind(model, rows=1, seq_len=8, dtype=None, packed=False) == 1


def waits(folder):
    def work():
        time.sleep(0.3)
        Path(folder, f"done-{ranks.rank()}").touch()

    first_rank_first(work)
    return sorted(path.name for path in Path(folder).iterdir())


def test_no_rank_goes_on_before_the_first_of_its_machine(tmp_path):
    assert run_ranks(waits, 3, str(tmp_path)) == [["done-0"]] * 3
