"""Delta-rule mixers: recurrent memories that overwrite what a key held before writing to it.

Shapes: B batch, L tokens, D width, H heads, K head_k_dim, V head_v_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import GatedRMSNorm, ShortConv, l2_normalise, mask_padding
from lt2.mixer_configs import GatedDeltaNetConfig
from lt2.ops.gated_delta import gated_delta_rule, gated_delta_rule_step
from lt2.sequence import SequenceInfo


class GatedDeltaNet(nn.Module):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t (Yang et al. 2024; paper Table 1)."""

    def __init__(self, config: GatedDeltaNetConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.ab_proj = nn.Linear(dims.dim, 2 * H, bias=False)  # decay and write strength
        self.gate_proj = nn.Linear(dims.dim, H * V, bias=False) if config.use_gate else None
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.conv = ShortConv(H * (2 * K + V), config.conv_size) if config.conv_size > 1 else None
        self.o_norm = GatedRMSNorm(V, dims.norm_eps)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.beta_scale = 2.0 if config.allow_neg_eigval else 1.0

    def init_special(self) -> None:
        """A ~ U(0, 16) and a time step log-uniform in [1e-3, 1e-1], as Mamba2 and fla initialise them."""
        with torch.no_grad():
            self.A_log.copy_(torch.empty_like(self.A_log).uniform_(1e-4, 16).log())
            dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def forward(
        self, x: Tensor, spec: GatedDeltaNetConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        B, L, _ = x.shape
        H, K, V = self.heads
        qkv = self.qkv_proj(x)
        qkv = self.conv(qkv, seq, cache) if self.conv is not None else F.silu(qkv)
        q, k, v = qkv.split([H * K, H * K, H * V], dim=-1)
        q, k = l2_normalise(q.view(B, L, H, K)), l2_normalise(k.view(B, L, H, K))
        v = v.view(B, L, H, V)
        a, b = self.ab_proj(x).view(B, L, 2, H).unbind(2)
        g = log_decay(a, self.A_log, self.dt_bias)  # (B, L, H), fp32
        beta = self.beta_scale * torch.sigmoid(b)

        o = run_delta_rule(q, k, v, g, beta, seq, cache)

        gate = self.gate_proj(x).view(B, L, H, V) if self.gate_proj is not None else None
        o = self.o_norm(o, gate)
        return self.o_proj(o.reshape(B, L, H * V)), None


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """log alpha = -exp(A_log) softplus(a + dt_bias), in fp32: bf16 would round decays near 1 to no decay."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))


def run_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, seq: SequenceInfo, cache: LayerCache | None
) -> Tensor:
    """The recurrence over a whole pass, or one decode step of it; reads and writes cache["state"] (B, H, K, V)."""
    if cache is None:
        return gated_delta_rule(q, k, v, g, beta, reset=seq.reset)[0]
    if q.shape[1] == 1:
        step_g = None if g is None else g[:, 0]
        o, state = gated_delta_rule_step(q[:, 0], k[:, 0], v[:, 0], step_g, beta[:, 0], cache["state"])
        cache["state"].copy_(state)
        return o[:, None]
    (k,) = mask_padding(seq, k)
    if g is not None:
        (g,) = mask_padding(seq, g)
    o, state = gated_delta_rule(q, k, v, g, beta, initial_state=cache["state"], output_final_state=True)
    cache["state"].copy_(state)
    return o
