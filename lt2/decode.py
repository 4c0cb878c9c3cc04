"""One decode step with static shapes: replayed as a CUDA graph on a GPU, called plainly on a CPU.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lt2.cache import Cache
from lt2.layers import SwiGLU
from lt2.mixers.delta import GatedDeltaNet
from lt2.model import LoopedLM, LoopedOutput
from lt2.ops.dispatch import announce


def merge_projections(model: LoopedLM) -> None:
    """In place, for decoding: the projections of one input become rows of one matrix, and so one kernel.

    The layers' own weights become views of it: names, parameters and memory stay what they are. Do it last, as moving,
    casting or deep-copying the model afterwards would part them. With gradients on, the layers' own weights are used.
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


@dataclass
class Recording:
    """A decode step as a CUDA graph, and the tensors that each replay fills: output.hidden (B, 1, D), logits (B, V)."""

    graph: torch.cuda.CUDAGraph
    output: LoopedOutput
    logits: Tensor


class DecodeStep:
    """Feed one token per row, get the logits of the next: (B,) int64 -> (B, V), overwritten by the next call.

    On CUDA the step is recorded once for this cache and replayed, so that N·T small layers are not bound by kernel
    launches. The cache must not be reallocated meanwhile. Not recorded are a model that halts per token, which asks
    the device after each loop whether to go on, and a mixer that synchronises with it. Hooks of the model see every
    decoded token, a replayed one too, and none of the rehearsal's.
    """

    def __init__(self, model: LoopedLM, cache: Cache, *, n_loops: int | None = None, record: bool = True):
        self.model, self.cache, self.n_loops = model, cache, n_loops
        self.token = torch.zeros_like(cache.lengths)
        self.wanted = record and self.token.is_cuda and model.config.halting is None
        self.recording: Recording | None = None

    def __call__(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        if self.wanted and self.recording is None:
            self.recording = self.capture()
        if self.recording is None:
            return self.run(self.model)[1]
        view = copy.copy(self.model)  # shares its hooks; one kept here would be a cycle that holds on to the cache
        view.forward = self.replay  # pyright: ignore[reportAttributeAccessIssue]
        view(self.token[:, None], cache=self.cache, n_loops=self.n_loops)
        return self.recording.logits

    def run(self, forward: Callable[..., LoopedOutput]) -> tuple[LoopedOutput, Tensor]:
        output = forward(self.token[:, None], cache=self.cache, n_loops=self.n_loops)
        return output, self.model.logits(output.hidden[:, 0])

    def replay(self, input_ids: Tensor, *, cache: Cache, n_loops: int | None) -> LoopedOutput:
        """Stands in for the model's forward, so that hooks see what they would have seen without a graph."""
        if cache.used >= cache.max_len:
            raise ValueError(f"cache of {cache.max_len} tokens is full; allocate a longer one")
        assert self.recording is not None
        self.recording.graph.replay()
        cache.used += input_ids.shape[1]
        return self.recording.output

    def capture(self) -> Recording | None:
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
            self.run(self.model.forward)  # kernels compile and tune themselves here
            restore()
            refusal = self.synchronises()
            restore()
        torch.cuda.current_stream().wait_stream(stream)
        if refusal:
            announce("decode step", "cuda", "launched kernel by kernel", refusal)
            self.wanted = False
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, logits = self.run(self.model.forward)
        restore()
        return Recording(graph, output, logits)

    def synchronises(self) -> str:
        """Why a step cannot be recorded: what torch says of the first wait for the device in it; "" without any."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(self.model.forward)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return ""

    def overwritten(self) -> list[tuple[Tensor, Tensor]]:
        """The cache tensors whose valid contents a step changes, each with a copy."""
        return [
            (tensor, tensor.clone())
            for loop, kinds in zip(self.cache.layers, self.cache.by_position)
            for layer, by_position in zip(loop, kinds)
            for name, tensor in layer.items()
            if name not in by_position
        ]
