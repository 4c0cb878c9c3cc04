"""Native sparse attention as fla parameterises it (Yuan et al. 2025; paper Table 1).

Shapes: B batch, L tokens, D width, H query heads, G KV heads, E head_dim, M cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.mixer_configs import NSAConfig
from lt2.ops.sparse import nsa_attention, nsa_continued, pool_blocks
from lt2.sequence import SequenceInfo, rotate


class NativeSparseAttention(nn.Module):
    """Compressed, selected and windowed attention on one q, k, v, each under a sigmoid gate per head."""

    def __init__(self, config: NSAConfig, dims: Dims):
        super().__init__()
        H, G, E = self.heads = config.heads(dims)
        self.q_proj = nn.Linear(dims.dim, H * E, bias=False)
        self.k_proj = nn.Linear(dims.dim, G * E, bias=False)
        self.v_proj = nn.Linear(dims.dim, G * E, bias=False)
        self.branch_proj = nn.Linear(dims.dim, H * 3, bias=False)  # gates of compressed, selected, window
        self.o_proj = nn.Linear(H * E, dims.dim, bias=False)
        self.rope = config.rope

    def forward(self, x: Tensor, spec: NSAConfig, seq: SequenceInfo, cache: LayerCache | None) -> tuple[Tensor, None]:
        B, L, _ = x.shape
        H, G, E = self.heads
        q = self.q_proj(x).view(B, L, H, E)
        k = self.k_proj(x).view(B, L, G, E)
        v = self.v_proj(x).view(B, L, G, E)
        gates = torch.sigmoid(self.branch_proj(x)).view(B, L, H, 3)
        if self.rope:
            q, k = rotate(q, *seq.rope[E]), rotate(k, *seq.rope[E])

        if cache is not None:
            store_heads_first(cache, seq, k=k, v=v)
            assert seq.starts is not None
            pool_blocks(cache, seq.starts, L, spec.block_size)
        if cache is None or (seq.fresh and L > 1):
            backend = "torch" if spec.backend == "torch" else "auto"
            o = nsa_attention(q, k, v, gates, doc_ids=seq.doc_ids, backend=backend, **_sizes(spec))
        else:
            k, v, k_pooled, v_pooled = (cache[name].to(v.dtype) for name in ("k", "v", "k_pooled", "v_pooled"))
            o = nsa_continued(q.to(v.dtype), gates, k, v, k_pooled, v_pooled, seq.positions, **_sizes(spec))
        return self.o_proj(o.reshape(B, L, H * E)), None


def _sizes(spec: NSAConfig) -> dict[str, int]:
    return {"block_size": spec.block_size, "num_blocks": spec.num_blocks, "window": spec.window}


def store_heads_first(cache: LayerCache, seq: SequenceInfo, **new: Tensor) -> None:
    """Write (B, L, G, E) tensors at their positions into caches (B, G, M, E), heads first so that the sparse reads need
    no copy. A pad lands beyond its row's length, where nothing reads it before it is overwritten."""
    rows = torch.arange(seq.positions.shape[0], device=seq.positions.device)[:, None]
    for name, tensor in new.items():
        cache[name][rows, :, seq.positions] = tensor.to(cache[name].dtype)
