"""Delta-rule mixers: recurrent memories that overwrite what a key held before writing to it.

All follow fla's layers of the same names. q, k and v pass a short convolution and SiLU, then q and k are L2-normalised.
The read-out is o_t = S_t^T q_t. Shapes: B batch, L tokens, D width, H heads, K head_k_dim, V head_v_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import GatedRMSNorm, ShortConv
from lt2.mixer_configs import DeltaNetConfig, GatedDeltaNetConfig, KimiDeltaConfig
from lt2.mixers.recurrent import init_decay, is_step, log_decay, run_delta_rule, split_heads, split_qkv
from lt2.ops import dispatch
from lt2.sequence import SequenceInfo


class DeltaNet(nn.Module):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (Yang et al. 2024; paper Table 1)."""

    def __init__(self, config: DeltaNetConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.b_proj = nn.Linear(dims.dim, H, bias=False)
        self.gate_proj = nn.Linear(dims.dim, H * V, bias=False) if config.use_gate else None
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.conv = ShortConv(H * (2 * K + V), config.conv_size) if config.conv_size > 1 else None
        self.o_norm = GatedRMSNorm(V, dims.norm_eps)
        self.beta_scale = 2.0 if config.allow_neg_eigval else 1.0

    def forward(
        self, x: Tensor, spec: DeltaNetConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        qkv = self.qkv_proj(x)
        qkv = self.conv(qkv, seq, cache) if self.conv is not None else F.silu(qkv)
        q, k, v = split_qkv(qkv, self.heads)
        beta = self.beta_scale * torch.sigmoid(self.b_proj(x))

        o = run_delta_rule(q, k, v, None, beta, seq, cache)

        gate = split_heads(self.gate_proj(x), self.heads[0]) if self.gate_proj is not None else None
        return self.o_proj(self.o_norm(o, gate).flatten(2)), None


class GatedDeltaNet(nn.Module):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (Yang et al. 2024; paper Table 1)."""

    in_weight: Tensor | None

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
        self.register_buffer("in_weight", None, persistent=False)  # qkv, gate, ab: lt2.decode.merge_projections
        self.beta_scale = 2.0 if config.allow_neg_eigval else 1.0

    def init_special(self) -> None:
        init_decay(self.A_log, self.dt_bias, least=1e-4)

    def forward(
        self, x: Tensor, spec: GatedDeltaNetConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        if cache is not None and self.decodes_fused(x, seq, cache):
            return self.decoded(x, cache), None
        qkv = self.qkv_proj(x)
        qkv = self.conv(qkv, seq, cache) if self.conv is not None else F.silu(qkv)
        q, k, v = split_qkv(qkv, self.heads)
        a, b = self.ab_proj(x).chunk(2, dim=-1)
        g = log_decay(a, self.A_log, self.dt_bias)  # (B, L, H), fp32
        beta = self.beta_scale * torch.sigmoid(b)

        o = run_delta_rule(q, k, v, g, beta, seq, cache)

        gate = split_heads(self.gate_proj(x), self.heads[0]) if self.gate_proj is not None else None
        return self.o_proj(self.o_norm(o, gate).flatten(2)), None

    def decodes_fused(self, x: Tensor, seq: SequenceInfo, cache: LayerCache) -> bool:
        """Whether one kernel can do all of a decode step that is no product with weights."""
        fits = self.conv is not None and max(self.heads[1:]) <= 128 and cache["state"].dtype == torch.float32
        return fits and is_step(x, seq) and not torch.is_grad_enabled() and dispatch.triton_runs(x)

    def decoded(self, x: Tensor, cache: LayerCache) -> Tensor:  # (B, 1, D) -> (B, 1, D)
        from lt2.ops.kernels.delta_decode import delta_decode

        dispatch.announce("gated delta decode step", x.device.type, "triton")
        (H, K, V), x = self.heads, x[:, 0]
        if self.in_weight is not None:
            qkv = gate = ab = F.linear(x, self.in_weight)
            gate_at, ab_at = H * (2 * K + V), self.in_weight.shape[0] - 2 * H
        else:
            qkv, ab, gate_at, ab_at = self.qkv_proj(x), self.ab_proj(x), 0, 0
            gate = None if self.gate_proj is None else self.gate_proj(x)
        assert self.conv is not None
        o = delta_decode(
            qkv, cache["conv"], self.conv.weight, None if self.gate_proj is None else gate, gate_at, ab, ab_at,
            self.A_log, self.dt_bias, self.o_norm.weight, cache["state"], self.o_norm.eps, self.beta_scale,
        )  # fmt: skip
        return self.o_proj(o)[:, None]


class KimiDeltaAttention(nn.Module):
    """S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T (Kimi Linear; paper Table 1).

    The decay of each key channel and the output gate come from projections of rank V.
    """

    def __init__(self, config: KimiDeltaConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.b_proj = nn.Linear(dims.dim, H, bias=False)
        self.decay_proj = nn.Sequential(nn.Linear(dims.dim, V, bias=False), nn.Linear(V, H * K, bias=False))
        self.gate_proj = nn.Sequential(nn.Linear(dims.dim, V, bias=False), nn.Linear(V, H * V, bias=True))
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.conv = ShortConv(H * (2 * K + V), config.conv_size) if config.conv_size > 1 else None
        self.o_norm = GatedRMSNorm(V, dims.norm_eps, activation="sigmoid")
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * K))
        self.beta_scale = 2.0 if config.allow_neg_eigval else 1.0

    def init_special(self) -> None:
        init_decay(self.A_log, self.dt_bias, least=1.0)

    def forward(
        self, x: Tensor, spec: KimiDeltaConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        H = self.heads[0]
        qkv = self.qkv_proj(x)
        qkv = self.conv(qkv, seq, cache) if self.conv is not None else F.silu(qkv)
        q, k, v = split_qkv(qkv, self.heads)
        g = log_decay(split_heads(self.decay_proj(x), H), self.A_log[:, None], self.dt_bias.view(H, -1))
        beta = self.beta_scale * torch.sigmoid(self.b_proj(x))

        o = run_delta_rule(q, k, v, g, beta, seq, cache)  # g: (B, L, H, K), fp32

        return self.o_proj(self.o_norm(o, split_heads(self.gate_proj(x), H)).flatten(2)), None
