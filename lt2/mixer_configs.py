"""Schemas of the shipped token mixers (paper Table 1, parameterised as flash-linear-attention does). No torch here."""

from __future__ import annotations

from typing import ClassVar, Literal

from lt2.config import CacheSpec, Dims, MixerConfig


class SoftmaxConfig(MixerConfig):
    """Fields shared by full and window attention, which run on the same weights."""

    module: ClassVar[str] = "lt2.mixers.attention:Attention"
    weights: ClassVar[str] = "softmax"
    run_fields: ClassVar[frozenset[str]] = frozenset({"type", "window"})

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: bool = True
    qk_norm: bool = False
    gate: Literal["elementwise", "headwise"] | None = None

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


class GatedDeltaNetConfig(MixerConfig):
    """Gated DeltaNet: S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (Yang et al. 2024)."""

    module: ClassVar[str] = "lt2.mixers.delta:GatedDeltaNet"
    weights: ClassVar[str] = "gdn"

    type: Literal["gdn"] = "gdn"
    num_heads: int | None = None
    head_dim: int | None = None
    expand_v: float = 1.0
    conv_size: int = 4
    use_gate: bool = True
    allow_neg_eigval: bool = False

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, head_k_dim, head_v_dim)."""
        num_heads = self.num_heads or dims.num_heads
        head_k_dim = self.head_dim or dims.dim // num_heads
        return num_heads, head_k_dim, int(head_k_dim * self.expand_v)

    def check(self, dims: Dims) -> None:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        if self.head_dim is None and dims.dim % num_heads:
            raise ValueError(f"{self.type}: num_heads {num_heads} does not divide dim {dims.dim}; set head_dim")
        if head_v_dim != head_k_dim * self.expand_v:
            raise ValueError(f"{self.type}: expand_v {self.expand_v} × head_dim {head_k_dim} is not a whole number")
        if self.conv_size < 0:
            raise ValueError(f"{self.type}: conv_size is {self.conv_size}; use 0 for none")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        spec: CacheSpec = {"state": ((num_heads, head_k_dim, head_v_dim), "float32")}
        if self.conv_size > 1:
            width = num_heads * (2 * head_k_dim + head_v_dim)
            spec["conv"] = ((self.conv_size - 1, width), "compute")
        return spec

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        return delta_rule_flops(num_heads, head_k_dim, head_v_dim)


def delta_rule_flops(num_heads: int, head_k_dim: int, head_v_dim: int, chunk: int = 64) -> float:
    """Forward FLOPs per token of the chunkwise gated delta rule: state read, write and erase, and in-chunk products."""
    state = 3 * 2 * head_k_dim * head_v_dim
    in_chunk = 2 * chunk * (2 * head_k_dim + 2 * head_v_dim)
    return float(num_heads * (state + in_chunk))


def linear_attention_flops(num_heads: int, head_k_dim: int, head_v_dim: int, chunk: int = 64) -> float:
    """Forward FLOPs per token of chunkwise gated linear attention: state read and write, and in-chunk products."""
    return float(num_heads * (2 * 2 * head_k_dim * head_v_dim + 2 * chunk * (head_k_dim + head_v_dim)))
