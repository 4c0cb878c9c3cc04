"""DeltaProduct (Siems et al. 2025): several Householder steps per token, as a mixer of one's own in one file.

Check it:   lt2 check-mixer examples/deltaproduct.py:DeltaProductConfig
Use it:     mixer: {type: deltaproduct, source: examples/deltaproduct.py, num_householder: 3}

A token takes alpha_t S_{t-1} through S <- (I - beta_j k_j k_j^T) S + beta_j k_j v_j^T, j = 1..n, then reads S_t^T q_t.
Its n factors can permute n + 1 states, where the delta rule's single one swaps two.
Shapes: B batch, L tokens, D width, H heads, K head size, n Householder steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import CacheSpec, Dims, MixerConfig
from lt2.layers import GatedRMSNorm, ShortConv, l2_normalise, mask_padding
from lt2.mixer_configs.delta import delta_rule_flops
from lt2.mixers.recurrent import init_decay, log_decay
from lt2.ops.recurrence.gated_delta import gated_delta_rule
from lt2.sequence import SequenceInfo


class DeltaProductConfig(MixerConfig):
    """Fields of a DeltaProduct layer; head sizes are dim / num_heads."""

    module: ClassVar[str] = "DeltaProduct"  # the class below, in this file
    weights: ClassVar[str] = "deltaproduct"

    type: Literal["deltaproduct"] = "deltaproduct"
    num_heads: PositiveInt | None = None
    num_householder: PositiveInt = 2
    conv_size: PositiveInt = 4

    def heads(self, dims: Dims) -> tuple[int, int]:
        """(num_heads, head_dim)."""
        num_heads = self.num_heads or dims.num_heads
        return num_heads, dims.dim // num_heads

    def check(self, dims: Dims) -> None:
        num_heads, _ = self.heads(dims)
        if dims.dim % num_heads:
            raise ValueError(f"deltaproduct: num_heads {num_heads} does not divide dim {dims.dim}")

    def width(self, dims: Dims) -> int:
        """Channels of q, and of n keys and n values."""
        return (1 + 2 * self.num_householder) * dims.dim

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        H, K = self.heads(dims)
        return {"state": ((H, K, K), "float32"), "conv": ((self.conv_size - 1, self.width(dims)), "compute")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        H, K = self.heads(dims)
        return self.num_householder * delta_rule_flops(H, K, K)


class DeltaProduct(nn.Module):
    """Runs the gated delta rule over a sequence n times as long: n writes per token, then one read."""

    def __init__(self, config: DeltaProductConfig, dims: Dims):
        super().__init__()
        H, K = self.heads = config.heads(dims)
        self.n = config.num_householder
        self.qkv_proj = nn.Linear(dims.dim, config.width(dims), bias=False)
        self.ab_proj = nn.Linear(dims.dim, H * (1 + self.n), bias=False)
        self.gate_proj = nn.Linear(dims.dim, H * K, bias=False)
        self.o_proj = nn.Linear(H * K, dims.dim, bias=False)
        self.conv = ShortConv(config.width(dims), config.conv_size)
        self.o_norm = GatedRMSNorm(K, dims.norm_eps)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))

    def init_special(self) -> None:
        init_decay(self.A_log, self.dt_bias, least=1e-4)

    def forward(
        self, x: Tensor, spec: DeltaProductConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        B, L, _ = x.shape
        (H, K), n = self.heads, self.n
        q, k, v = self.conv(self.qkv_proj(x), seq, cache).split([H * K, n * H * K, n * H * K], dim=-1)
        q, k, v = l2_normalise(q.view(B, L, H, K)), l2_normalise(k.view(B, L, n, H, K)), v.view(B, L, n, H, K)
        a, b = self.ab_proj(x).split([H, n * H], dim=-1)
        g = log_decay(a, self.A_log, self.dt_bias)  # (B, L, H)
        beta = 2 * torch.sigmoid(b).view(B, L, n, H)  # up to 2: reflections, with eigenvalue -1
        k, g = mask_padding(seq, k, g)  # a padded token must leave the state as it is

        # Of a token's n steps the first decays the state and the last reads it.
        steps = {
            "q": F.pad(q[:, :, None], (0, 0, 0, 0, n - 1, 0)),
            "k": k,
            "v": v,
            "g": F.pad(g[:, :, None], (0, 0, 0, n - 1)),
            "beta": beta,
        }
        inputs = {name: step.flatten(1, 2) for name, step in steps.items()}
        reset = None if seq.reset is None else F.pad(seq.reset[:, :, None], (0, n - 1)).flatten(1)
        initial_state = None if cache is None else cache["state"]
        o, state = gated_delta_rule(**inputs, initial_state=initial_state, output_final_state=True, reset=reset)
        if cache is not None:
            assert state is not None
            cache["state"].copy_(state)

        o = o.unflatten(1, (L, n))[:, :, -1]
        o = self.o_norm(o, self.gate_proj(x).view(B, L, H, K))
        return self.o_proj(o.flatten(2)), None
