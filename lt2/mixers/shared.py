"""Two mixers of one layer on the same projections: the "mixer" reading of a random-sample hybrid."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class SharedRows(nn.Module):
    """The linear map made of rows start..stop of another layer's weight, which stays the owner of the parameter, and of
    a bias of its own."""

    def __init__(self, owner: nn.Linear, start: int, stop: int, bias: nn.Parameter | None):
        super().__init__()
        self.owner = (owner,)  # in a tuple, so that the weight has one name in the state dict
        self.start, self.stop = start, stop
        self.bias = bias

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def numel(self) -> int:
        return (self.stop - self.start) * self.owner[0].in_features

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.owner[0].weight[self.start : self.stop], self.bias)


def fused_heads(mixer: Any, name: str) -> tuple[int, int, int] | None:
    """`mixer.heads` (H, K, V) where its projection `name` has H·K rows of q, H·K of k and H·V of v, as in the shipped
    mixers; None where it has none or, in a mixer of one's own, another one."""
    projection, heads = getattr(mixer, name, None), getattr(mixer, "heads", None)
    if not isinstance(projection, nn.Linear) or not isinstance(heads, tuple) or len(heads) != 3:
        return None
    H, K, V = heads
    return (H, K, V) if projection.out_features == H * (2 * K + V) else None


def share_projections(mixers: nn.ModuleDict) -> None:
    """Make softmax attention use the recurrent mixer's q, k, v and o projections wherever the shapes are equal.

    Does nothing unless the layer holds both softmax attention and a mixer with a fused `qkv_proj`.
    """
    fused: list[Any] = [mixer for mixer in mixers.values() if fused_heads(mixer, "qkv_proj")]
    if "softmax" not in mixers or len(fused) != 1:
        return
    attention: Any = mixers["softmax"]
    (other,) = fused
    H, K, V = other.heads
    spans = {"q_proj": (0, H * K), "k_proj": (H * K, 2 * H * K), "v_proj": (2 * H * K, H * (2 * K + V))}
    for name, (start, stop) in spans.items():
        projection = getattr(attention, name)
        if projection.out_features == stop - start:
            setattr(attention, name, SharedRows(other.qkv_proj, start, stop, projection.bias))
    output = getattr(other, "o_proj", None)
    if isinstance(output, nn.Linear) and attention.o_proj.weight.shape == output.weight.shape:
        attention.o_proj = SharedRows(other.o_proj, 0, other.o_proj.out_features, attention.o_proj.bias)
