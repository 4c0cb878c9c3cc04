"""The paper's unrolled diagnostics (Fig. on attention sinks): three numbers at every (loop, layer) of a forward pass.

No hooks: the model hands every block's input and output to a recorder when it is given one.

Shapes: B batch, L tokens, D width, H query heads, G key heads, E head_dim, T loops, N layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lt2.config import ConfigError, MixerConfig
from lt2.mixer_configs import WindowConfig
from lt2.mixers.attention import Attention
from lt2.model import Block, LoopedLM
from lt2.sequence import SequenceInfo


@dataclass(frozen=True)
class Reading:
    """One position of the unrolled computation; loop and layer count from 0.

    Attributes:
        first_token_mass: attention weight on the first token, mean over heads, batch and queries after it; None where
            the layer is not full or window attention. Put BOS there, as in training.
        max_abs: largest |h| after the FFN's residual add.
        rms: mean over tokens of sqrt(mean over channels of h²).
    """

    loop: int
    layer: int
    mixer: str
    first_token_mass: float | None
    max_abs: float
    rms: float

    def as_dict(self) -> dict[str, int | float | str | None]:
        return asdict(self)


class Recorder:
    """Pass as `record` to the model's forward; `readings` then holds one entry per (loop, layer), in order."""

    def __init__(self, query_chunk: int = 256):
        self.query_chunk = query_chunk
        self.readings: list[Reading] = []

    @torch.no_grad()
    def __call__(
        self, loop: int, layer: int, block: Block, spec: MixerConfig, seq: SequenceInfo, entry: Tensor, h: Tensor
    ) -> None:
        mass, attention = None, block.mixers[spec.weights]
        if isinstance(attention, Attention):
            q, k = attention.queries_and_keys(block.mixer_norm(entry), seq)
            window = spec.window if isinstance(spec, WindowConfig) else None
            mass = first_token_mass(q, k, window=window, query_chunk=self.query_chunk)
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        rms = wide.square().mean(-1).sqrt().mean().item()
        self.readings.append(Reading(loop, layer, spec.type, mass, wide.abs().max().item(), rms))


def unrolled(model: LoopedLM, input_ids: Tensor, *, n_loops: int | None = None) -> list[Reading]:
    """The readings of model on input_ids (B, L), whole documents with BOS first; T·N of them, loop-major.

    Raises:
        ConfigError: fewer than two tokens, so that no query comes after the first.
    """
    if input_ids.shape[1] < 2:
        raise ConfigError(f"diagnostics need at least 2 tokens per row, got {input_ids.shape[1]}")
    recorder = Recorder()
    with torch.no_grad():
        model(input_ids, n_loops=n_loops, record=recorder)
    return recorder.readings


def first_token_mass(q: Tensor, k: Tensor, *, window: int | None = None, query_chunk: int = 256) -> float:
    """Mean attention weight on token 0 over queries 1..L-1, heads and batch; a window past it gives 0.

    q: (B, L, H, E), k: (B, L, G, E). Scores exist for query_chunk queries at a time.
    """
    B, L, H, E = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(H // k.shape[2], dim=2)
    total = 0.0
    for start in range(1, L, query_chunk):
        stop = min(start + query_chunk, L)
        if window is not None and start >= window:
            break  # these queries and all later ones no longer see token 0
        scores = torch.einsum("bihe,bjhe->bhij", q[:, start:stop].to(wide), keys[:, :stop]) * E**-0.5
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(stop, device=q.device)
        hidden = (distance < 0) | (distance >= (window or L))
        total += scores.masked_fill(hidden, float("-inf")).softmax(-1)[..., 0].sum().item()
    return total / (B * H * (L - 1))
