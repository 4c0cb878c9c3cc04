"""Sparse attention written the slow, obvious way, query by query, for fp64 comparison of values and gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def documents(doc_ids: Tensor | None, length: int, row: int) -> list[tuple[int, int]]:
    """(start, end) of every run of equal ids in a row."""
    if doc_ids is None:
        return [(0, length)]
    ids = doc_ids[row].tolist()
    cuts = [0, *[t for t in range(1, length) if ids[t] != ids[t - 1]], length]
    return list(zip(cuts, cuts[1:]))


def nsa(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *, block_size: int, num_blocks: int, window: int, doc_ids=None
) -> Tensor:
    """q (B, L, H, E); k, v (B, L, G, E); gates (B, L, H, 3) -> (B, L, H, E)."""
    (B, L, H, _), G = q.shape, k.shape[2]
    group = H // G
    o = [[[None] * H for _ in range(L)] for _ in range(B)]
    for b in range(B):
        for start, end in documents(doc_ids, L, b):
            for position in range(end - start):
                for g in range(G):
                    keys, values = (x[b, start : start + position + 1, g] for x in (k, v))
                    heads = range(g * group, (g + 1) * group)
                    queries = [q[b, start + position, h] for h in heads]
                    branches = _branches(queries, keys, values, block_size, num_blocks, window)
                    for h, three in zip(heads, branches):
                        gate = gates[b, start + position, h]
                        o[b][start + position][h] = sum(gate[i] * three[i] for i in range(3))
    return torch.stack([torch.stack([torch.stack(heads) for heads in row]) for row in o])


def _branches(queries: list[Tensor], keys: Tensor, values: Tensor, block_size: int, num_blocks: int, window: int):
    """Compressed, selected and windowed output of every head of one group at one position (the last key)."""
    position = len(keys) - 1
    whole = (position + 1) // block_size
    pooled_keys, pooled_values = (
        [x[c * block_size : (c + 1) * block_size].mean(dim=0) for c in range(whole)] for x in (keys, values)
    )
    own = position // block_size
    importance = [0.0] * (own + 1)
    compressed = []
    for query in queries:
        if not whole:
            compressed.append(torch.zeros_like(values[0]))
            continue
        weights = _softmax(query, torch.stack(pooled_keys))
        compressed.append(weights @ torch.stack(pooled_values))
        for c in range(whole):
            importance[c] += weights[c].item()
    always = {0, own, max(own - 1, 0)}
    ranked = sorted(set(range(own + 1)) - always, key=lambda c: importance[c], reverse=True)
    chosen = always | set(ranked[: num_blocks - len(always)])
    tokens = [t for t in range(position + 1) if t // block_size in chosen]
    return [
        (compressed[i], _softmax(query, keys[tokens]) @ values[tokens], _attend(query, keys, values, window))
        for i, query in enumerate(queries)
    ]


def _attend(query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    return _softmax(query, keys[-window:]) @ values[-window:]


def _softmax(query: Tensor, keys: Tensor) -> Tensor:
    return (keys @ query * query.shape[-1] ** -0.5).softmax(dim=0)


def index_score(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I of one query (q (J, D), w (J,)) on keys k (M, D) -> (M,)."""
    return sum(w[j] * torch.clamp(k @ q[j], min=0) for j in range(len(w)))


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (N, L, R, E), k (N, M, E), v (N, M, V), visible (N, L, M) -> o (N, L, R, V), weights (N, L, R, M)."""
    scores = torch.einsum("nlre,nme->nlrm", q, k) * scale
    weights = scores.masked_fill(~visible[:, :, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("nlrm,nmv->nlrv", weights, v), weights
