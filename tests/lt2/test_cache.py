"""Decode caches: what is done with them between passes, which no mixer sees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lt2.analysis.parity import sample_model, sample_tokens
from lt2.cache import cache_dtype, has_slot_per_token
from lt2.config import Dims
from tests.lt2.mixers.samples import samples
from tests.lt2.tiny import HYBRID, WINDOW_GDN, model, tokens

SAMPLES = samples()


@pytest.mark.parametrize("name", ["full", "window", "mla", "nsa", "dsa", "gdn", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_a_cache_may_be_of_another_dtype_than_the_model(name, dtype):
    net, ids = sample_model(SAMPLES[name]), sample_tokens(SAMPLES[name])
    expected = net(ids).hidden
    if dtype == torch.float64:
        net = net.float()
    cache = net.init_cache(3, 24, dtype=dtype)
    parts = [net(piece, cache=cache).hidden for piece in ids.split([5, 1, 4, 14], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=2e-3, check_dtype=False)


@pytest.mark.parametrize("layout", [HYBRID, WINDOW_GDN])
@torch.no_grad()
def test_rows_are_reordered_repeated_and_dropped(layout):
    net, x = model(layout), tokens(3, 9)
    cache = net.init_cache(3, 9)
    net(x[:, :5], lengths=torch.tensor([5, 2, 4]), cache=cache)
    rows = torch.tensor([2, 0, 2, 0])
    cache.reorder(rows)
    assert (cache.lengths.tolist(), cache.used) == ([4, 5, 4, 5], 5)
    got = net(x[rows, 5:], cache=cache).hidden
    for row, length, found in zip(rows, [4, 5, 4, 5], got):
        alone = net(torch.cat([x[row, :length], x[row, 5:]])[None]).hidden[0, length:]
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", [HYBRID, WINDOW_GDN])
@torch.no_grad()
def test_a_longer_cache_takes_what_a_shorter_one_holds_and_a_cleared_one_nothing(layout):
    net, x = model(layout), tokens(2, 9)
    whole = net(x).hidden
    shorter, longer = net.init_cache(2, 5), net.init_cache(2, 9)
    net(x[:, :5], cache=shorter)
    net(x.flip(1), cache=longer)
    longer.take(shorter)
    assert (longer.lengths.tolist(), longer.used, longer.max_len) == ([5, 5], 5, 9)
    got = net(x[:, 5:], cache=longer).hidden
    torch.testing.assert_close(got, whole[:, 5:], rtol=1e-10, atol=1e-10)
    assert shorter.lengths.tolist() == [5, 5], "the counters are its own"

    where = [tensor.data_ptr() for loop in longer.layers for layer in loop for tensor in layer.values()]
    longer.clear()
    assert (longer.lengths.tolist(), longer.used) == ([0, 0], 0)
    assert where == [tensor.data_ptr() for loop in longer.layers for layer in loop for tensor in layer.values()]
    torch.testing.assert_close(net(x, cache=longer).hidden, whole, rtol=1e-10, atol=1e-10)


def test_what_a_spec_calls_its_dtype():
    assert cache_dtype("compute", torch.bfloat16) == torch.bfloat16
    assert cache_dtype("float32", torch.bfloat16) == torch.float32  # states stay wide
    assert cache_dtype("float32", torch.float64) == torch.float64
    assert cache_dtype("int64", torch.float64) == torch.int64


def test_tensors_with_a_slot_per_token_are_told_from_states_of_any_shape():
    def cache_spec(dims: Dims, max_len: int) -> dict:
        shapes = {"count": (), "levels": (max_len.bit_length(), 4), "slots": (max_len, 4), "second": (2, max_len + 1)}
        return {name: (shape, "compute") for name, shape in shapes.items()}

    mixer: Any = SimpleNamespace(cache_spec=cache_spec)
    assert has_slot_per_token(mixer, Dims(dim=8, num_heads=2)) == {"slots", "second"}


@torch.no_grad()
def test_a_row_of_no_token_yet_is_a_number_in_half_precision():
    net, ids = sample_model(SAMPLES["la1"]).half(), sample_tokens(SAMPLES["la1"])  # with `normalize`: 0 by 0
    cache = net.init_cache(3, 24)
    net(ids[:, :3], lengths=torch.tensor([0, 3, 1]), cache=cache)
    got = net(ids[:, 3:9], cache=cache).hidden[0]
    torch.testing.assert_close(got, net(ids[:1, 3:9]).hidden[0], rtol=0, atol=2e-2)
