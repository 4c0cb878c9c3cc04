"""Linear-attention mixers: recurrent memories that decay and add.

All follow fla's layers of the same names. The read-out is o_t = S_t^T q_t.
Shapes: B batch, L tokens, D width, H heads, K head_k_dim, V head_v_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import GatedRMSNorm, RMSNorm, ShortConv
from lt2.mixer_configs import GatedLinearConfig, HGRN2Config, LinearAttentionConfig, Mamba2Config, RetNetConfig
from lt2.mixers.recurrent import init_decay, run_linear_attention, split_heads
from lt2.sequence import SequenceInfo, rotate


class LinearAttention(nn.Module):
    """S_t = S_{t-1} + k_t v_t^T over feature-mapped q, k (Katharopoulos et al. 2020; paper Table 1)."""

    def __init__(self, config: LinearAttentionConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.o_norm = GatedRMSNorm(V, dims.norm_eps)
        self.feature_map = config.feature_map
        self.normalize = config.normalize

    def forward(
        self, x: Tensor, spec: LinearAttentionConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        H, K, V = self.heads
        q, k, v = self.qkv_proj(x).split([H * K, H * K, H * V], dim=-1)
        q, k, v = split_heads(q, H), split_heads(k, H), split_heads(v, H)
        if self.feature_map == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.normalize:
            # A value column of ones reads out q_t · sum k_s, which the state then carries along with the rest.
            v = F.pad(v, (0, 1), value=1.0)

        o = run_linear_attention(q, k, v, None, seq, cache)

        if self.normalize:
            # Before a row's first token both are 0; fp16 has no 1e-10.
            o = o[..., :V] / (o[..., V:] + max(1e-10, torch.finfo(o.dtype).tiny))
        return self.o_proj(self.o_norm(o, None).flatten(2)), None


class RetNet(nn.Module):
    """S_t = gamma_h S_{t-1} + k_t v_t^T with rotary q, k and a swish gate (Sun et al. 2023; paper Table 1)."""

    def __init__(self, config: RetNetConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.gate_proj = nn.Linear(dims.dim, H * V, bias=False)
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.o_norm = GatedRMSNorm(V, dims.norm_eps)

    def forward(
        self, x: Tensor, spec: RetNetConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        H, K, V = self.heads
        q, k, v = self.qkv_proj(x).split([H * K, H * K, H * V], dim=-1)
        q, k = rotate(split_heads(q, H), *seq.rope[K]), rotate(split_heads(k, H), *seq.rope[K])
        g = retention_log_decay(H, like=x).expand(*x.shape[:2], H)

        o = run_linear_attention(q, k, split_heads(v, H), g, seq, cache)

        return self.o_proj(self.o_norm(o, split_heads(self.gate_proj(x), H)).flatten(2)), None


def retention_log_decay(heads: int, *, like: Tensor) -> Tensor:
    """log gamma_h, gamma_h = 1 - 2^(-5-h), (H,) in fp32 (fp64 stays fp64)."""
    head = torch.arange(heads, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return torch.log1p(-(2.0 ** (-5.0 - head)))


class GatedLinearAttention(nn.Module):
    """S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T with a swish gate (Yang et al. 2023; paper Table 1)."""

    def __init__(self, config: GatedLinearConfig, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qkv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        rank = config.gate_low_rank
        self.decay_proj = nn.Sequential(nn.Linear(dims.dim, rank, bias=False), nn.Linear(rank, H * K, bias=True))
        self.gate_proj = nn.Linear(dims.dim, H * V, bias=False)
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.o_norm = GatedRMSNorm(V, dims.norm_eps)
        self.gate_logit_normalizer = config.gate_logit_normalizer

    def forward(
        self, x: Tensor, spec: GatedLinearConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        H, K, V = self.heads
        q, k, v = self.qkv_proj(x).split([H * K, H * K, H * V], dim=-1)
        g = log_sigmoid(split_heads(self.decay_proj(x), H)) / self.gate_logit_normalizer

        o = run_linear_attention(split_heads(q, H), split_heads(k, H), split_heads(v, H), g, seq, cache)

        return self.o_proj(self.o_norm(o, split_heads(self.gate_proj(x), H)).flatten(2)), None


class HGRN2(nn.Module):
    """S_t = Diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T with swish q (Qin et al. 2024; paper Table 1)."""

    def __init__(self, config: HGRN2Config, dims: Dims):
        super().__init__()
        H, K, V = self.heads = config.heads(dims)
        self.qfv_proj = nn.Linear(dims.dim, H * (2 * K + V), bias=False)
        self.o_norm = RMSNorm(H * V, eps=dims.norm_eps)  # over all heads at once, unlike GLA
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)

    def forward(self, x: Tensor, spec: HGRN2Config, seq: SequenceInfo, cache: LayerCache | None) -> tuple[Tensor, None]:
        H, K, V = self.heads
        q, f, v = self.qfv_proj(x).split([H * K, H * K, H * V], dim=-1)
        g = log_sigmoid(split_heads(f, H))
        k = torch.sigmoid(-split_heads(f, H))  # 1 - alpha, without cancellation

        o = run_linear_attention(split_heads(F.silu(q), H), k, split_heads(v, H), g, seq, cache)

        return self.o_proj(self.o_norm(o.flatten(2))), None


def log_sigmoid(logits: Tensor) -> Tensor:
    """log alpha of a sigmoid gate, in fp32: bf16 would round decays near 1 to no decay."""
    return F.logsigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))


class Mamba2(nn.Module):
    """S_t = exp(A dt_t) S_{t-1} + B_t (dt_t x_t)^T, y_t = S_t^T C_t + D x_t (Dao & Gu 2024; paper Table 1).

    x, B and C pass one short convolution; the output is RMSNorm(y · silu(z)), the gate inside the norm.
    """

    def __init__(self, config: Mamba2Config, dims: Dims):
        super().__init__()
        H, N, P = self.heads = config.heads(dims)  # N state size, P head size
        self.inner = H * P
        self.in_proj = nn.Linear(dims.dim, 2 * H * P + 2 * N + H, bias=False)  # z, (x, B, C), dt
        self.conv = ShortConv(H * P + 2 * N, config.conv_size, bias=True)
        self.o_norm = RMSNorm(H * P, eps=dims.norm_eps)
        self.o_proj = nn.Linear(H * P, dims.dim, bias=False)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H))
        self.D = nn.Parameter(torch.empty(H))

    def init_special(self) -> None:
        init_decay(self.A_log, self.dt_bias, least=1.0)
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, spec: Mamba2Config, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        H, N, P = self.heads
        z, xbc, dt = self.in_proj(x).split([self.inner, self.inner + 2 * N, H], dim=-1)
        values, key, query = self.conv(xbc, seq, cache).split([self.inner, N, N], dim=-1)
        values = split_heads(values, H)
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))  # (B, L, H)
        g = -self.A_log.to(wide).exp() * dt
        written = (values * dt[..., None]).to(values.dtype)
        key, query = (t[:, :, None].expand(-1, -1, H, -1) for t in (key, query))

        o = run_linear_attention(query, key, written, g, seq, cache, scale=1.0)

        y = o + self.D.to(o.dtype)[:, None] * values
        return self.o_proj(self.o_norm(y.flatten(2) * F.silu(z))), None
