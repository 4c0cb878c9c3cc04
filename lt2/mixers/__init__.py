"""Token mixers. A mixer is an nn.Module called as

    y, aux = mixer(x, spec, seq, cache)

with x: (B, L, D) the pre-normed block input, spec the config that the layout gives this (loop, layer), seq what is
known about the tokens, cache this (loop, layer)'s tensors (None in training), y: (B, L, D), and aux an auxiliary
loss, of each row (B,) or one of all, or None. The config class names the module, so a mixer of one's own needs no entry
here.
"""

from __future__ import annotations

from torch import nn

from lt2.config import Dims, MixerConfig


def build_mixer(config: MixerConfig, dims: Dims) -> nn.Module:
    """The module that runs `config`, freshly constructed."""
    return config.implementation()(config, dims)
