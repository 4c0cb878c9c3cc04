"""Counting the bytes that operations make."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations inside the block make: `live` now, `peak` since it was last set.

    Works on real tensors and on those without data; what operations allocate and free within themselves is not seen,
    but for logsumexp's copy of its input, which is a whole chunk of logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), 0)  # not made here: weights, inputs
        if func is torch.ops.aten.logsumexp.default:
            self.peak = max(self.peak, self.live + args[0].nbytes)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def over(self) -> Iterator[list[int]]:
        """[bytes that stayed, peak above the beginning] of the block, filled in at its end."""
        before, found = self.live, []
        self.peak = before
        yield found
        found += [self.live - before, self.peak - before]
