"""Sparse attention: selected keys (DSA), compressed and selected blocks (NSA). Memory is linear in the length."""

from lt2.ops.sparse.gathered import group_queries, selected_attention, ungroup_queries
from lt2.ops.sparse.indexer import dense_kl, index_scores, select_keys, selected_kl
from lt2.ops.sparse.nsa import nsa_attention, nsa_continued, pool_blocks

__all__ = [
    "dense_kl",
    "group_queries",
    "index_scores",
    "nsa_attention",
    "nsa_continued",
    "pool_blocks",
    "select_keys",
    "selected_attention",
    "selected_kl",
    "ungroup_queries",
]
