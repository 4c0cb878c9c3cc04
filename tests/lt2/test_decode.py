"""One decode step with static shapes: what capturing it as a CUDA graph has to put back, on a CPU."""

from __future__ import annotations

import pytest
import torch

from lt2.cache import Cache
from lt2.config import ModelConfig
from lt2.decode import GreedyStep, merge_projections
from lt2.model import LoopedLM, build
from tests.lt2.mixers.samples import samples

CONFIGS = {name: sample.config for name, sample in samples().items()}


def prefilled(config: ModelConfig, rows: torch.Tensor) -> tuple[LoopedLM, Cache]:
    model = build(config, seed=3).eval()
    cache = model.init_cache(len(rows), 40)
    model(rows, cache=cache)
    return model, cache


@pytest.mark.parametrize("name", sorted(CONFIGS))
@torch.no_grad()
def test_a_rehearsed_step_leaves_nothing_behind(name):
    """Rehearse two steps on other tokens and put back what `overwritten` names: the next tokens are the same."""
    rows = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))
    model, plain = prefilled(CONFIGS[name], rows)
    _, rehearsed = prefilled(CONFIGS[name], rows)
    step = GreedyStep(model, rehearsed)
    kept = step.overwritten()
    step(torch.tensor([5, 6]))
    step(torch.tensor([7, 8]))
    for tensor, value in kept:
        tensor.copy_(value)
    rehearsed.rewind(13)

    token = other = rows[:, -1]
    for _ in range(9):
        hidden = model(token[:, None], cache=plain).hidden
        token, other = model.logits(hidden[:, 0]).argmax(-1), step(other)
        assert torch.equal(token, other)
    for ours, theirs in zip(plain.layers, rehearsed.layers):
        for layer, kinds, wanted in zip(ours, plain.by_position[0], theirs):
            for key in layer:
                held = slice(0, 22) if key in kinds else slice(None)
                assert torch.equal(layer[key][:, held], wanted[key][:, held]), key


def test_only_what_a_step_loses_is_kept():
    rows = torch.zeros(2, 13, dtype=torch.int64)
    for name, kept in {"full": set(), "mla": set(), "window": {"k", "v"}, "gdn": {"conv", "state"}}.items():
        _, cache = prefilled(CONFIGS[name], rows)
        assert set(cache.layers[0][0]) - cache.by_position[0][0] == kept, name


def test_merged_projections_are_the_same_weights_under_the_same_names():
    rows = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))
    model = build(CONFIGS["gdn"], seed=3)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(rows).hidden
    merge_projections(model)
    assert model.state_dict().keys() == names.keys()
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())
    ffn = model.blocks[0].ffn
    assert ffn.in_weight.data_ptr() == ffn.gate_proj.weight.data_ptr()
    with torch.no_grad():
        assert (model(rows).hidden - expected).abs().max() < 1e-5
    # With gradients the layers' own weights are used, and what they learn is in the merged ones.
    hidden = model(rows).hidden
    assert torch.equal(hidden, expected)
    hidden.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    learned = model(rows).hidden.detach()
    assert (learned - expected).abs().max() > 1e-3
    with torch.no_grad():
        assert (model(rows).hidden - learned).abs().max() < 1e-5
