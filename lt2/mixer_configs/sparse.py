"""Schemas of the sparse mixers NSA and DSA, and of MLA. No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from lt2.config import CacheSpec, Dims, MixerConfig
from lt2.mixer_configs.softmax import SoftmaxConfig


class NSAConfig(MixerConfig):
    """Native sparse attention as fla parameterises it (Yuan et al. 2025): mean-pooled blocks, the best-scored blocks
    read in full, and a window, summed under three sigmoid gates per head.

    `num_blocks` counts the first, the previous and the current block, which are always read.

    The group rule: fla's kernel puts the query heads of one KV head in one tile, so their number must be a power of
    two >= 16. `backend="fla"` (default) holds a config to that kernel's rules, on every device, so that a model that
    trains on a laptop also trains on the kernel. `backend="torch"` lifts them and never calls fla; it is meant for
    small models, and runs our own gather (Triton on CUDA, PyTorch on CPU) for any group. Both compute one function.
    """

    module: ClassVar[str] = "lt2.mixers.nsa:NativeSparseAttention"
    weights: ClassVar[str] = "nsa"

    type: Literal["nsa"] = "nsa"
    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    block_size: int = 64
    num_blocks: int = 16
    window: int = 512
    rope: bool = True
    backend: Literal["fla", "torch"] = "fla"

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, num_kv_heads, head_dim); by default one KV head per 16 query heads."""
        num_heads = self.num_heads or dims.num_heads
        return num_heads, self.num_kv_heads or max(1, num_heads // 16), self.head_dim or dims.dim // num_heads

    def rope_dim(self, dims: Dims) -> int | None:
        return self.heads(dims)[2] if self.rope else None

    def check(self, dims: Dims) -> None:
        num_heads, num_kv_heads, head_dim = self.heads(dims)
        if self.head_dim is None and dims.dim % num_heads:
            raise ValueError(f"nsa: num_heads {num_heads} does not divide dim {dims.dim}; set head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"nsa: num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        if self.rope and head_dim % 2:
            raise ValueError(f"nsa: rotary positions need an even head_dim, got {head_dim}")
        if self.window < 1:
            raise ValueError(f"nsa: window is {self.window}; it counts the token itself, so it must be at least 1")
        if self.block_size < 1:
            raise ValueError(f"nsa: block_size is {self.block_size}; it must be at least 1")
        if self.num_blocks < 4:
            raise ValueError(
                f"nsa: num_blocks is {self.num_blocks}; the first, previous and current block are always read, so at "
                "least 4 are needed for one to be chosen by score"
            )
        if self.backend == "fla":
            self._check_kernel(num_heads, num_kv_heads, head_dim)

    def _check_kernel(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        group = num_heads // num_kv_heads
        if group < 16 or not _power_of_two(group):
            raise ValueError(
                f"nsa: {num_heads} query heads over {num_kv_heads} KV heads is a group of {group}, but fla's kernel "
                "needs a power of two >= 16 query heads per KV head; change num_heads or num_kv_heads, or set "
                'backend "torch" for a small model'
            )
        if not _power_of_two(self.num_blocks):  # the kernel would round it up and read more
            raise ValueError(
                f'nsa: num_blocks is {self.num_blocks}, but fla\'s kernel needs a power of two; or set backend "torch"'
            )
        if head_dim > 256:
            raise ValueError(
                f"nsa: head_dim {head_dim} exceeds the 256 that fla's kernel allows; use more heads, or set backend "
                '"torch"'
            )
        least = max(16, 2 * self.num_blocks)
        if not _power_of_two(self.block_size) or self.block_size < least:
            raise ValueError(
                f"nsa: block_size {self.block_size} with num_blocks {self.num_blocks}: fla's kernel needs a power of "
                f'two >= {least}, at least twice num_blocks; change either, or set backend "torch"'
            )

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        _, num_kv_heads, head_dim = self.heads(dims)
        blocks = -(-max_len // self.block_size)
        tokens = (num_kv_heads, blocks * self.block_size, head_dim)
        pooled = (num_kv_heads, blocks, head_dim)
        return {
            "k": (tokens, "compute"),
            "v": (tokens, "compute"),
            "k_pooled": (pooled, "compute"),
            "v_pooled": (pooled, "compute"),
        }

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, _, head_dim = self.heads(dims)
        pooled = (seq_len + 1) / 2 / self.block_size
        keys = pooled + mean_keys(self.num_blocks * self.block_size, seq_len) + mean_keys(self.window, seq_len)
        return 4.0 * num_heads * head_dim * keys


class DSAConfig(SoftmaxConfig):
    """DeepSeek sparse attention (DeepSeek-V3.2): a lightning indexer scores the causal prefix, attention reads the
    top_k best keys.

    The indexer has `index_heads` query heads of width `index_dim` over one shared key per token; `index_rope_dim` of
    that width is rotated. It learns from KL(attention || softmax(scores)) alone: for the first `warmup_steps` training
    steps attention is dense and so is the KL, afterwards both are over the selected keys.
    """

    module: ClassVar[str] = "lt2.mixers.dsa:SparseAttention"
    weights: ClassVar[str] = "dsa"
    run_fields: ClassVar[frozenset[str]] = frozenset({"type", "top_k", "warmup_steps"})

    type: Literal["dsa"] = "dsa"
    top_k: int = 512
    index_heads: int = 4
    index_dim: int = 64
    index_rope_dim: int = 32
    warmup_steps: int = 1000

    def rope_dims(self, dims: Dims) -> tuple[int, ...]:
        main = self.rope_dim(dims)
        sizes = {size for size in (main, self.index_rope_dim) if size}
        return tuple(sorted(sizes))

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.top_k < 1:
            raise ValueError(f"dsa: top_k is {self.top_k}; each query reads at least 1 key")
        if dims.max_seq_len is not None and self.top_k >= dims.max_seq_len:
            raise ValueError(
                f"dsa: top_k {self.top_k} is not below max_seq_len {dims.max_seq_len}, so nothing would be left out; "
                'lower top_k or use type "full"'
            )
        if self.index_heads < 1 or self.index_dim < 1:
            raise ValueError(f"dsa: index_heads {self.index_heads} and index_dim {self.index_dim} must be at least 1")
        if self.index_rope_dim % 2 or not 0 <= self.index_rope_dim <= self.index_dim:
            raise ValueError(
                f"dsa: index_rope_dim {self.index_rope_dim} must be even and between 0 and index_dim {self.index_dim}"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"dsa: warmup_steps is {self.warmup_steps}; use 0 for none")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        _, num_kv_heads, head_dim = self.heads(dims)
        tokens = (num_kv_heads, max_len, head_dim)
        return {"k": (tokens, "compute"), "v": (tokens, "compute"), "index_k": ((max_len, self.index_dim), "compute")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, _, head_dim = self.heads(dims)
        indexer = 2.0 * self.index_heads * (self.index_dim + 1) * (seq_len + 1) / 2
        return indexer + 4.0 * num_heads * head_dim * mean_keys(self.top_k, seq_len)


class MLAConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads come from one cached latent.

    head_dim is the width of a head's un-rotated query and of its value; rope_head_dim more dimensions carry the
    position, with one rotated key shared by all heads. q_rank gives the query a low-rank projection too.
    """

    module: ClassVar[str] = "lt2.mixers.mla:LatentAttention"
    weights: ClassVar[str] = "mla"

    type: Literal["mla"] = "mla"
    num_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    kv_rank: int = 512
    q_rank: int | None = None
    rope_head_dim: int = 64
    gate: Literal["elementwise", "headwise"] | None = None

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, head_dim, v_head_dim)."""
        num_heads = self.num_heads or dims.num_heads
        head_dim = self.head_dim or dims.dim // num_heads
        return num_heads, head_dim, self.v_head_dim or head_dim

    def rope_dim(self, dims: Dims) -> int | None:
        return self.rope_head_dim

    def check(self, dims: Dims) -> None:
        num_heads, _, _ = self.heads(dims)
        if self.head_dim is None and dims.dim % num_heads:
            raise ValueError(f"mla: num_heads {num_heads} does not divide dim {dims.dim}; set head_dim")
        if self.kv_rank < 1 or (self.q_rank is not None and self.q_rank < 1):
            raise ValueError(f"mla: kv_rank {self.kv_rank} and q_rank {self.q_rank} must be at least 1")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ValueError(f"mla: rope_head_dim is {self.rope_head_dim}; rotary positions need an even number >= 2")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        return {"latent": ((max_len, self.kv_rank + self.rope_head_dim), "compute")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, head_dim, v_head_dim = self.heads(dims)
        return 2.0 * num_heads * (head_dim + self.rope_head_dim + v_head_dim) * (seq_len + 1) / 2


def mean_keys(budget: int, seq_len: int) -> float:
    """Keys a query reads on average over a sequence, at most `budget` of its causal prefix."""
    w = min(budget, seq_len)
    return w - w * (w - 1) / (2 * seq_len)


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
