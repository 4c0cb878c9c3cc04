"""Schemas of the softmax mixers: full and sliding-window attention."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from lt2.config import CacheSpec, Dims, MixerConfig


class SoftmaxConfig(MixerConfig):
    """Fields shared by full and window attention, which run on the same weights.

    bias: which projections have one, q, k and v ("qkv") or the output's too ("qkvo").
    """

    module: ClassVar[str] = "lt2.mixers.attention:Attention"
    weights: ClassVar[str] = "softmax"
    run_fields: ClassVar[frozenset[str]] = frozenset({"type", "window"})

    num_heads: PositiveInt | None = None
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rope: bool = True
    qk_norm: bool = False
    gate: Literal["elementwise", "headwise"] | None = None
    bias: Literal["qkv", "qkvo"] | None = None

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, num_kv_heads, head_dim)."""
        num_heads = self.num_heads or dims.num_heads
        return num_heads, self.num_kv_heads or num_heads, self.head_dim or dims.dim // num_heads

    def rope_dim(self, dims: Dims) -> int | None:
        return self.heads(dims)[2] if self.rope else None

    def check(self, dims: Dims) -> None:
        num_heads, num_kv_heads, head_dim = self.heads(dims)
        if self.head_dim is None and dims.dim % num_heads:
            raise ValueError(f"{self.type}: num_heads {num_heads} does not divide dim {dims.dim}; set head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"{self.type}: num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        if self.rope and head_dim % 2:
            raise ValueError(f"{self.type}: rotary positions need an even head_dim, got {head_dim}")

    def _kv(self, dims: Dims, slots: int) -> CacheSpec:
        _, num_kv_heads, head_dim = self.heads(dims)
        shape = (slots, num_kv_heads, head_dim)
        return {"k": (shape, "compute"), "v": (shape, "compute")}


class FullConfig(SoftmaxConfig):
    """Softmax attention over the whole causal prefix, MHA or GQA."""

    type: Literal["full"] = "full"

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        return self._kv(dims, max_len)

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, _, head_dim = self.heads(dims)
        return 4.0 * num_heads * head_dim * (seq_len + 1) / 2


class WindowConfig(SoftmaxConfig):
    """Sliding-window attention: token t sees {t-window+1..t}."""

    type: Literal["window"] = "window"
    window: int = 256

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.window < 1:
            raise ValueError(f"window: window is {self.window}; it counts the token itself, so it must be at least 1")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        return self._kv(dims, min(self.window, max_len))

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, _, head_dim = self.heads(dims)
        w = min(self.window, seq_len)
        mean_keys = w - w * (w - 1) / (2 * seq_len)
        return 4.0 * num_heads * head_dim * mean_keys
