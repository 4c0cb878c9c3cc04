"""Native sparse attention: compressed, selected and windowed attention under one gate each (Yuan et al. 2025).

Shapes: B batch, L tokens, H query heads, G KV heads, E head dim, P blocks of S tokens, M = P·S cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lt2.ops import dispatch, outline
from lt2.ops.documents import packed_documents
from lt2.ops.sparse.blocks import block_table, into_blocks
from lt2.ops.sparse.compressed import compressed_attention
from lt2.ops.sparse.gathered import group_queries, selected_attention, ungroup_queries
from lt2.ops.windowed import windowed_attention


def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    *,
    block_size: int,
    num_blocks: int,
    window: int,
    doc_ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """NSA of whole sequences: q (B, L, H, E); k, v (B, L, G, E); gates (B, L, H, 3) for (compressed, selected, window).

    doc_ids (B, L): tokens see only their own document, whose blocks start at its first token. backend: "auto" takes
    fla's kernel on CUDA (its group rule is the caller's to keep, see NSAConfig), "torch" never. Returns (B, L, H, E).
    """
    scale = q.shape[-1] ** -0.5
    q, k = q.to(v.dtype), k.to(v.dtype)
    g_compressed, g_selected, g_window = gates.to(v.dtype).unsqueeze(-1).unbind(-2)
    o = g_window * windowed_attention(q, k, v, window=window, doc_ids=doc_ids, scale=scale)
    chosen = dispatch.backend_for("nsa", q, backend)
    if chosen == "outline":
        picked = torch.empty(*k.shape[:3], num_blocks, dtype=torch.int64, device=q.device)
        compressed, selected = outline.attention(q, k, v), outline.attention(q, k, v, picked)
        return o + g_compressed * compressed + g_selected * selected
    if chosen == "fla":
        return o + _fla(q, k, v, g_compressed, g_selected, block_size, num_blocks, doc_ids, scale)
    table = block_table(q, doc_ids, block_size)
    k_blocks, v_blocks = (into_blocks(x, table, block_size) for x in (k, v))
    compressed, selected = _block_branches(
        q,
        k_blocks,
        v_blocks,
        k_blocks.mean(dim=3),
        v_blocks.mean(dim=3),
        table.first,
        table.position,
        num_blocks=num_blocks,
        scale=scale,
    )
    return o + g_compressed * compressed + g_selected * selected


def nsa_continued(
    q: Tensor,
    gates: Tensor,
    k: Tensor,
    v: Tensor,
    k_pooled: Tensor,
    v_pooled: Tensor,
    position: Tensor,
    *,
    block_size: int,
    num_blocks: int,
    window: int,
) -> Tensor:
    """NSA of L new tokens over caches that already hold them: k, v (B, G, M, E), k_pooled, v_pooled (B, G, P, E).

    position: (B, L) int64. Returns (B, L, H, E). Reads window + L tokens, num_blocks blocks a query and the pooled
    blocks.
    """
    B, G, M, E = k.shape
    g_compressed, g_selected, g_window = gates.to(q.dtype).unsqueeze(-1).unbind(-2)
    k_blocks, v_blocks = (x.view(B, G, M // block_size, block_size, E) for x in (k, v))
    compressed, selected = _block_branches(
        q,
        k_blocks,
        v_blocks,
        k_pooled,
        v_pooled,
        torch.zeros_like(position),
        position,
        num_blocks=num_blocks,
        scale=E**-0.5,
    )
    recent = _recent(q, k, v, position, window)
    return g_window * recent + g_compressed * compressed + g_selected * selected


def pool_blocks(cache: dict[str, Tensor], starts: Tensor, n_tokens: int, block_size: int) -> None:
    """Refresh the pooled blocks that n_tokens written at starts (B,) may have completed, in place.

    Blocks not complete yet get a partial mean that nothing reads: the token that completes a block refreshes it.
    """
    B, G, M, E = cache["k"].shape
    P = M // block_size
    touched = starts[:, None] // block_size + torch.arange(n_tokens // block_size + 2, device=starts.device)
    touched = touched.clamp(max=P - 1)
    rows = torch.arange(B, device=starts.device)[:, None]
    for name in ("k", "v"):
        blocks = cache[name].view(B, G, P, block_size, E)[rows, :, touched]  # (B, touched, G, S, E)
        cache[f"{name}_pooled"][rows, :, touched] = blocks.mean(dim=3)


def _block_branches(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    k_pooled: Tensor,
    v_pooled: Tensor,
    first: Tensor,
    position: Tensor,
    *,
    num_blocks: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compressed and selected attention, each (B, L, H, E). Blocks: (B, G, P, S, E); pooled: (B, G, P, E)."""
    B, G, _, S, _ = k_blocks.shape
    grouped = group_queries(q, G)
    compressed, blocks, found = compressed_attention(
        grouped,
        k_pooled.flatten(0, 1),
        v_pooled.flatten(0, 1),
        first,
        position,
        block_size=S,
        top=num_blocks,
        scale=scale,
    )
    # Tokens of a block up to the query itself; a document's last block ends past every one of its queries.
    first, position = (x.repeat_interleave(G, dim=0)[..., None] for x in (first, position))
    counts = (position - (blocks - first) * S + 1).clamp(max=S) * found
    selected, _ = selected_attention(
        grouped, k_blocks.flatten(0, 1), v_blocks.flatten(0, 1), blocks, counts, scale=scale
    )
    return ungroup_queries(compressed, B), ungroup_queries(selected, B)


def _recent(q: Tensor, k: Tensor, v: Tensor, position: Tensor, window: int) -> Tensor:
    """Windowed attention of L consecutive tokens over caches (B, G, M, E) that hold them; -> (B, L, H, E)."""
    L = q.shape[1]
    token = position[:, :1] - window + 1 + torch.arange(window + L - 1, device=q.device)  # (B, window + L - 1)
    distance = position[:, :, None] - token[:, None, :]
    mask = (distance >= 0) & (distance < window) & (token[:, None, :] >= 0)
    slot = token.clamp(min=0, max=k.shape[2] - 1)[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    keys, values = k.gather(2, slot), v.gather(2, slot)
    gqa = q.shape[2] != k.shape[1]
    o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask[:, None], enable_gqa=gqa)
    return o.transpose(1, 2)


def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_compressed: Tensor,
    g_selected: Tensor,
    block_size: int,
    num_blocks: int,
    doc_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """The compressed and selected branches on fla's kernel; its window needs flash-attn, so ours runs instead."""
    from fla.ops.nsa import parallel_nsa

    settings = {"block_size": block_size, "block_counts": num_blocks, "window_size": 0, "scale": scale}
    gates = {"g_cmp": g_compressed.squeeze(-1), "g_slc": g_selected.squeeze(-1)}
    if doc_ids is None:
        return parallel_nsa(q, k, v, **gates, **settings)
    cu_seqlens = packed_documents(doc_ids).cu_seqlens
    flat = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in {"q": q, "k": k, "v": v, **gates}.items()}
    return parallel_nsa(**flat, **settings, cu_seqlens=cu_seqlens).view(q.shape)
