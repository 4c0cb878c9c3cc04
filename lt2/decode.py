"""One decode step with static shapes: replayed as a CUDA graph on a GPU, called plainly on a CPU.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lt2.cache import Cache
from lt2.layers import SwiGLU
from lt2.mixers.delta import GatedDeltaNet
from lt2.model import LoopedLM


def merge_projections(model: LoopedLM) -> None:
    """In place, for decoding: the projections of one input become rows of one matrix, and so one kernel.

    The layers' own weights become views of it: names, parameters and memory stay what they are. Do it last, as moving
    or casting the model afterwards would part them. With gradients on, the layers' own weights are used.
    """
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            projections = [module.qkv_proj, module.gate_proj, module.ab_proj]
        elif isinstance(module, SwiGLU):
            projections = [module.gate_proj, module.up_proj]
        else:
            continue
        layers = [layer for layer in projections if layer is not None]
        module.in_weight = torch.cat([layer.weight.data for layer in layers])
        for layer, rows in zip(layers, module.in_weight.split([layer.out_features for layer in layers])):
            layer.weight.data = rows


class GreedyStep:
    """Feed one token per row, return the most likely next one; (B,) int64 -> (B,) int64.

    On CUDA the step is captured once for this cache and replayed, so that N·T small layers are not bound by kernel
    launches. The cache must not be reallocated meanwhile. A model that halts per token asks the device after each
    loop whether to go on, so it is never captured.
    """

    def __init__(self, model: LoopedLM, cache: Cache, *, n_loops: int | None = None):
        self.model, self.cache, self.n_loops = model, cache, n_loops
        self.graph: torch.cuda.CUDAGraph | None = None
        self.token = torch.zeros_like(cache.lengths)
        self.next = torch.zeros_like(cache.lengths)

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        if self.token.is_cuda and self.graph is None and self.model.config.halting is None:
            self.capture()
        if self.graph is None:
            self.run()
            return self.next.clone()
        if self.cache.used >= self.cache.max_len:
            raise ValueError(f"cache of {self.cache.max_len} tokens is full; allocate a longer one")
        self.graph.replay()
        self.cache.used += 1
        return self.next.clone()

    def run(self) -> None:
        hidden = self.model(self.token[:, None], cache=self.cache, n_loops=self.n_loops).hidden
        self.next.copy_(self.model.logits(hidden[:, 0]).argmax(-1))

    def capture(self) -> None:
        """Warm up and record, then put the cache back as it was: capture must not count as a decoded token.

        Tensors with a slot per token need no copy (nothing reads beyond a row's length), so capture takes no second
        KV cache; recurrent states and rings are kept.
        """
        kept = self.overwritten()
        lengths, used = self.cache.lengths.clone(), self.cache.used

        def restore() -> None:
            for tensor, value in kept:
                tensor.copy_(value)
            self.cache.lengths.copy_(lengths)
            self.cache.used = used

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        restore()

    def overwritten(self) -> list[tuple[Tensor, Tensor]]:
        """The cache tensors whose valid contents a step changes, each with a copy."""
        return [
            (tensor, tensor.clone())
            for loop, kinds in zip(self.cache.layers, self.cache.by_position)
            for layer, by_position in zip(loop, kinds)
            for name, tensor in layer.items()
            if name not in by_position
        ]
