"""What transformers' users and generate() give with tokens: caches, masks and positions.

Shapes: B batch, L tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt2.cache import Cache
from lt2.config import ConfigError
from lt2.model import LoopedLM


class LoopedCache:
    """LT2's cache under the interface that transformers' generate() expects."""

    is_compileable = False
    is_linear = (False,)

    def __init__(self, held: Cache):
        self.held = held

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held.used

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.held.max_len

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.reorder(beam_idx)

    def room(self, model: LoopedLM, rows: int, n_tokens: int, n_loops: int | None) -> Cache:
        """What is held, with room for n_tokens more; ConfigError where it is of other rows or loops than asked for."""
        held, depth = self.held, len(model.schedule_for(n_loops))
        if (len(held.lengths), len(held.layers)) != (rows, depth):
            raise ConfigError(
                f"the cache is of {len(held.lengths)} rows and {len(held.layers)} loops, the request of {rows} and "
                f"{depth}; give each its own cache"
            )
        if held.used + n_tokens > held.max_len:
            longer = model.init_cache(rows, max(held.used + n_tokens, 2 * held.max_len), n_loops=depth)
            longer.take(held)
            self.held = longer
        return self.held


def looped(cache: Any) -> LoopedCache:
    """`cache`, or ConfigError where it is another library's."""
    if not isinstance(cache, LoopedCache):
        raise ConfigError(
            f"an LT2 model's cache is a LoopedCache, not {type(cache).__name__}; leave it out, and generate() or "
            "use_cache=True makes one"
        )
    return cache


def valid_tokens(attention_mask: Tensor, rows: int, n_tokens: int) -> Tensor:
    """(B, L) bool of the last L of a mask's tokens."""
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < n_tokens:
        raise ConfigError(
            f"attention_mask is {tuple(attention_mask.shape)}; give (rows, tokens so far), here ({rows}, {n_tokens}) "
            "or longer, 0 on padding"
        )
    return attention_mask[:, -n_tokens:].bool()


def packed_documents(position_ids: Tensor, valid: Tensor | None, held: Cache | None) -> Tensor | None:
    """Document ids (B, L) of packed rows; None where positions are what the model counts itself."""
    real = torch.ones_like(position_ids, dtype=torch.bool) if valid is None else valid
    counted = real.cumsum(1) - 1 + (0 if held is None else held.lengths[:, None])
    if bool(((position_ids == counted) | ~real).all()):
        return None
    if held is not None:
        raise ConfigError(
            f"position_ids do not continue the {held.used} tokens in the cache; give the cache of the text's "
            "beginning, and nothing after it, and pad prompts of generate() on the left"
        )
    starts = position_ids == 0
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if bool(real.all() & starts[:, 0].all() & (starts[:, 1:] | goes_on).all()):
        return starts.cumsum(1)
    raise ConfigError(
        "position_ids are not the tokens' places in their rows, which the model counts by attention_mask; leave them "
        "out, or pack documents by positions that begin again at 0, without padding"
    )
