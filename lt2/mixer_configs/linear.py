"""Schemas of the linear-attention mixers: LA, RetNet, Mamba2, GLA, HGRN2."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from lt2.config import CacheSpec, Dims, MixerConfig

Expansion = Annotated[float, Field(gt=0)]
"""How many times as wide as the model, or as the keys."""


class LinearConfig(MixerConfig):
    """Fields shared by LA, RetNet and GLA: all heads together have dim·expand_k keys and dim·expand_v values."""

    num_heads: PositiveInt | None = None
    expand_k: Expansion = 1.0
    expand_v: Expansion = 1.0

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, head_k_dim, head_v_dim)."""
        num_heads = self.num_heads or dims.num_heads
        return num_heads, int(dims.dim * self.expand_k) // num_heads, int(dims.dim * self.expand_v) // num_heads

    def check(self, dims: Dims) -> None:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        for name, expand, head_dim in (("k", self.expand_k, head_k_dim), ("v", self.expand_v, head_v_dim)):
            if head_dim < 1 or head_dim * num_heads != dims.dim * expand:
                raise ValueError(
                    f"{self.type}: num_heads {num_heads} does not divide dim {dims.dim} × expand_{name} {expand}"
                )

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        return {"state": (self.heads(dims), "float32")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        return linear_attention_flops(*self.heads(dims))


class LinearAttentionConfig(LinearConfig):
    """LA: S_t = S_{t-1} + k_t v_t^T (Katharopoulos et al. 2020).

    feature_map is applied to q and k: "elu" is elu(x) + 1. normalize divides by q_t · sum_{s<=t} k_s; the RMSNorm on
    each head's output makes it optional, and it needs the positive keys and queries of "elu".
    """

    module: ClassVar[str] = "lt2.mixers.linear:LinearAttention"
    weights: ClassVar[str] = "la"

    type: Literal["la"] = "la"
    feature_map: Literal["elu", "identity"] = "elu"
    normalize: bool = False

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.normalize and self.feature_map == "identity":
            raise ValueError(
                "la: normalize is true with feature_map 'identity', whose sums may be zero; use feature_map 'elu'"
            )

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        # The normaliser is one more value column, always 1.
        return {"state": ((num_heads, head_k_dim, head_v_dim + self.normalize), "float32")}


class RetNetConfig(LinearConfig):
    """RetNet: S_t = gamma_h S_{t-1} + k_t v_t^T with gamma_h = 1 - 2^(-5-h) and rotary q, k (Sun et al. 2023)."""

    module: ClassVar[str] = "lt2.mixers.linear:RetNet"
    weights: ClassVar[str] = "retnet"

    type: Literal["retnet"] = "retnet"
    expand_v: Expansion = 2.0

    def rope_dim(self, dims: Dims) -> int | None:
        return self.heads(dims)[1]

    def check(self, dims: Dims) -> None:
        super().check(dims)
        num_heads, head_k_dim, _ = self.heads(dims)
        if head_k_dim % 2:
            raise ValueError(f"retnet: rotary positions need an even key size per head, got {head_k_dim}")


class GatedLinearConfig(LinearConfig):
    """GLA: S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T, alpha_t = sigmoid(W2 W1 x_t + b)^(1/16) (Yang et al. 2023)."""

    module: ClassVar[str] = "lt2.mixers.linear:GatedLinearAttention"
    weights: ClassVar[str] = "gla"

    type: Literal["gla"] = "gla"
    expand_k: Expansion = 0.5
    gate_low_rank: int = 16
    gate_logit_normalizer: float = 16.0

    def check(self, dims: Dims) -> None:
        super().check(dims)
        if self.gate_low_rank < 1:
            raise ValueError(f"gla: gate_low_rank is {self.gate_low_rank}; it must be at least 1")
        if not self.gate_logit_normalizer > 0:
            raise ValueError(f"gla: gate_logit_normalizer is {self.gate_logit_normalizer}; it must be positive")


class HGRN2Config(MixerConfig):
    """HGRN2: S_t = Diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T, alpha_t = sigmoid(f_t) (Qin et al. 2024).

    The original's per-layer lower bound on alpha is left out: a looped layer has no single depth to bound it by.
    """

    module: ClassVar[str] = "lt2.mixers.linear:HGRN2"
    weights: ClassVar[str] = "hgrn2"

    type: Literal["hgrn2"] = "hgrn2"
    num_heads: PositiveInt | None = None

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, head_k_dim, head_v_dim); keys, the forget gate's complement, are as wide as values."""
        num_heads = self.num_heads or dims.num_heads
        head_dim = dims.dim // num_heads
        return num_heads, head_dim, head_dim

    def check(self, dims: Dims) -> None:
        num_heads = self.num_heads or dims.num_heads
        if dims.dim % num_heads:
            raise ValueError(f"hgrn2: num_heads {num_heads} does not divide dim {dims.dim}")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        return {"state": (self.heads(dims), "float32")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        return linear_attention_flops(*self.heads(dims))


class Mamba2Config(MixerConfig):
    """Mamba2: S_t = exp(A dt_t) S_{t-1} + B_t (dt_t x_t)^T, y_t = S_t^T C_t + D x_t (Dao & Gu 2024).

    B and C are shared by all heads (one group). Heads are counted by their size: expand·dim / head_dim of them,
    whatever the model's num_heads. d_state is the paper's 64; 128 is the common default elsewhere.
    """

    module: ClassVar[str] = "lt2.mixers.linear:Mamba2"
    weights: ClassVar[str] = "mamba2"

    type: Literal["mamba2"] = "mamba2"
    expand: int = 2
    head_dim: int = 64
    d_state: int = 64
    conv_size: int = 4

    def heads(self, dims: Dims) -> tuple[int, int, int]:
        """(num_heads, d_state, head_dim): the state's shape, d_state in the role of the key size."""
        return self.expand * dims.dim // self.head_dim, self.d_state, self.head_dim

    def check(self, dims: Dims) -> None:
        for name in ("expand", "head_dim", "d_state"):
            if getattr(self, name) < 1:
                raise ValueError(f"mamba2: {name} is {getattr(self, name)}; it must be at least 1")
        if self.expand * dims.dim % self.head_dim:
            raise ValueError(f"mamba2: head_dim {self.head_dim} does not divide expand {self.expand} × dim {dims.dim}")
        if self.conv_size < 2:
            raise ValueError(f"mamba2: conv_size is {self.conv_size}; Mamba2 needs its convolution, of at least 2")

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        width = self.expand * dims.dim + 2 * self.d_state
        return {"state": (self.heads(dims), "float32"), "conv": ((self.conv_size - 1, width), "compute")}

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        num_heads, d_state, head_dim = self.heads(dims)
        return linear_attention_flops(num_heads, d_state, head_dim)


def linear_attention_flops(num_heads: int, head_k_dim: int, head_v_dim: int, chunk: int = 64) -> float:
    """Forward FLOPs per token of chunkwise gated linear attention: state read and write, and in-chunk products."""
    return float(num_heads * (2 * 2 * head_k_dim * head_v_dim + 2 * chunk * (head_k_dim + head_v_dim)))
