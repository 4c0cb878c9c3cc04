"""The parts of a block that are not token mixers, and what mixers share.

Shapes: B batch, L tokens, D width, C channels, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.sequence import SequenceInfo


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    in_weight: Tensor | None

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.register_buffer("in_weight", None, persistent=False)  # gate, up: lt2.decode.merge_projections

    def forward(self, x: Tensor) -> Tensor:  # (B, L, D) -> (B, L, D)
        if self.in_weight is not None and not torch.is_grad_enabled():
            gate, up = F.linear(x, self.in_weight).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the input's dtype with fp32 statistics, whatever autocast is on."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(nn.Module):
    """RMSNorm over each head's values times an activation of a gate (the output norm of GDN, KDA, GLA, RetNet)."""

    def __init__(self, head_dim: int, eps: float, activation: str = "silu"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))
        self.eps = eps
        self.activation = activation

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:  # (B, L, H, V), (B, L, H, V)
        o = F.rms_norm(o, (o.shape[-1],), self.weight.to(o.dtype), self.eps)
        if gate is None:
            return o
        return o * (F.silu(gate) if self.activation == "silu" else torch.sigmoid(gate))


class OutputGate(nn.Linear):
    """The SDPA output gate (paper §3.4): o · sigmoid(W x), one number per channel ("elementwise") or per head."""

    def __init__(self, kind: str, dim: int, heads: int, head_dim: int):
        super().__init__(dim, heads * head_dim if kind == "elementwise" else heads, bias=False)

    def init_special(self) -> None:
        """It starts at sigmoid(0) everywhere: zero-init, as the paper's gate ablation."""
        nn.init.zeros_(self.weight)

    def gated(self, o: Tensor, x: Tensor) -> Tensor:  # (B, L, H, E), (B, L, D) -> (B, L, H, E)
        return o * torch.sigmoid(self(x)).view(*o.shape[:3], -1)


class ShortConv(nn.Module):
    """Depthwise causal convolution over the last `size` tokens of a document, then SiLU.

    Its cache holds the last size-1 inputs of each row.
    """

    def __init__(self, channels: int, size: int, *, bias: bool = False):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.size**-0.5), self.size**-0.5)

    def forward(self, x: Tensor, seq: SequenceInfo, cache: LayerCache | None) -> Tensor:  # (B, L, C) -> (B, L, C)
        B, L, C = x.shape
        past = x.new_zeros(B, self.size - 1, C) if cache is None else cache["conv"].to(x.dtype)
        padded = torch.cat([past, x], dim=1)
        if cache is not None:
            assert seq.lengths is not None
            last = seq.lengths[:, None] + torch.arange(self.size - 1, device=x.device)
            cache["conv"].copy_(padded.gather(1, last[..., None].expand(-1, -1, C)))
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if seq.doc_ids is None and not x.is_cuda and self.size < L:
            y = F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=C).transpose(1, 2)
            return F.silu(y)
        # cuDNN's depthwise convolution is slow in bf16, and oneDNN's has a high fixed cost for one token. Shifted
        # products fuse into one kernel when compiled.
        y = x * weight[:, -1] if bias is None else x * weight[:, -1] + bias
        for back in range(1, self.size):
            shifted = padded[:, self.size - 1 - back :][:, :L] * weight[:, -1 - back]
            if seq.doc_ids is not None:
                shifted = shifted * (seq.positions >= back)[..., None]
            y = y + shifted
        return F.silu(y)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, statistics in fp32 (fp64 stays fp64), as fla's kernels do."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def mask_padding(seq: SequenceInfo, *tensors: Tensor) -> list[Tensor]:
    """Zero the padded tokens of each (B, L, …) tensor: a zero key and log-decay leave a recurrent state as it is."""
    if seq.valid is None:
        return list(tensors)
    return [t * seq.valid.view(*seq.valid.shape, *(1,) * (t.dim() - 2)).to(t.dtype) for t in tensors]
