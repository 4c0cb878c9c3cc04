"""Every registered mixer against every parity check, in a looped model, fp64."""

from __future__ import annotations

import pytest
import torch

from lt2.analysis.parity import CHECKS, TOLERANCE, sample_model, sample_tokens
from lt2.config import mixer_types
from tests.lt2.mixers.samples import FIELDS, samples, shipped_types

SAMPLES = samples()


def test_every_mixer_has_a_sample():
    assert sorted(FIELDS) == shipped_types()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SAMPLES)
def test_mixer(name, check):
    assert CHECKS[check](SAMPLES[name]) <= TOLERANCE


@pytest.mark.parametrize("name", SAMPLES)
def test_one_loop_is_the_plain_stack(name):
    model, ids = sample_model(SAMPLES[name]), sample_tokens(SAMPLES[name])
    with torch.no_grad():
        model.rho.zero_()
        seq = model.sequence_info(ids, None, None, None)
        h = model.embed(ids)
        for block, spec in zip(model.blocks, model.schedule[0]):
            h, _ = block(h, spec, seq)
        assert torch.equal(model(ids, n_loops=1).hidden, model.norm(h))


RECURRENT_STATES = {
    "la": (2, 16, 16),
    "la1": (2, 16, 17),  # and the normaliser's column
    "la2": (2, 16, 24),
    "retnet": (2, 16, 32),
    "mamba2": (4, 12, 16),
    "gla": (2, 8, 16),
    "hgrn2": (2, 16, 16),
    "hgrn21": (4, 8, 8),
    "deltanet": (2, 16, 16),
    "gdn1": (2, 12, 24),
    "kda1": (2, 16, 8),
}


@pytest.mark.parametrize("name", RECURRENT_STATES)
def test_recurrent_state_is_heads_keys_values(name):
    model, ids = sample_model(SAMPLES[name]), sample_tokens(SAMPLES[name])
    cache = model.init_cache(3, 24)
    model(ids, cache=cache)
    assert {layer["state"].shape for loop in cache.layers for layer in loop} == {(3, *RECURRENT_STATES[name])}
    assert all(layer["state"].any() for loop in cache.layers for layer in loop)


def test_linear_caches_do_not_grow_and_softmax_caches_do():
    for name, cls in mixer_types().items():
        if name not in FIELDS:
            continue
        mixer = cls(**FIELDS[name][0])
        dims = SAMPLES[name].config.dims
        grows = mixer.cache_spec(dims, 64) != mixer.cache_spec(dims, 128)
        assert grows == (name in {"full", "nsa", "dsa", "mla"}), name
