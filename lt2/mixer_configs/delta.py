"""Schemas of the delta-rule mixers: DeltaNet, Gated DeltaNet, Kimi Delta Attention."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from lt2.config import CacheSpec, Dims, MixerConfig
from lt2.mixer_configs.linear import Expansion


class DeltaConfig(MixerConfig):
    """Fields shared by the delta-rule mixers; the head size counts keys, values are expand_v times as wide."""

    num_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    expand_v: Expansion = 1.0
    conv_size: int = 4
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
            raise ValueError(
                f"{self.type}: expand_v {self.expand_v} × head_dim {head_k_dim} is not a positive whole number"
            )
        if self.conv_size < 0 or self.conv_size == 1:
            raise ValueError(f"{self.type}: conv_size is {self.conv_size}; use 0 for none, or at least 2")
        if head_k_dim > 256:
            raise ValueError(
                f"{self.type}: head_dim {head_k_dim} exceeds the 256 its CUDA kernel allows; use more heads"
            )

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        num_heads, head_k_dim, head_v_dim = self.heads(dims)
        spec: CacheSpec = {"state": ((num_heads, head_k_dim, head_v_dim), "float32")}
        if self.conv_size > 1:
            width = num_heads * (2 * head_k_dim + head_v_dim)
            spec["conv"] = ((self.conv_size - 1, width), "compute")
        return spec

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        return delta_rule_flops(*self.heads(dims))


class DeltaNetConfig(DeltaConfig):
    """DeltaNet: S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (Schlag et al. 2021; Yang et al. 2024)."""

    module: ClassVar[str] = "lt2.mixers.delta:DeltaNet"
    weights: ClassVar[str] = "deltanet"

    type: Literal["deltanet"] = "deltanet"
    use_gate: bool = False


class GatedDeltaNetConfig(DeltaConfig):
    """Gated DeltaNet: S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (Yang et al. 2024)."""

    module: ClassVar[str] = "lt2.mixers.delta:GatedDeltaNet"
    weights: ClassVar[str] = "gdn"

    type: Literal["gdn"] = "gdn"
    use_gate: bool = True


class KimiDeltaConfig(DeltaConfig):
    """KDA: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T (Kimi Linear, 2025)."""

    module: ClassVar[str] = "lt2.mixers.delta:KimiDeltaAttention"
    weights: ClassVar[str] = "kda"

    type: Literal["kda"] = "kda"


def delta_rule_flops(num_heads: int, head_k_dim: int, head_v_dim: int, chunk: int = 64) -> float:
    """Forward FLOPs per token of the chunkwise gated delta rule: state read, write and erase, and in-chunk products.

    Products with the keys: k kᵀ, q kᵀ and inverse @ k; with the values: inverse @ v and scores @ written. Finding the
    small triangular inverse is left out, like all that is no product.
    """
    state = 3 * 2 * head_k_dim * head_v_dim
    in_chunk = 2 * chunk * (3 * head_k_dim + 2 * head_v_dim)
    return float(num_heads * (state + in_chunk))
