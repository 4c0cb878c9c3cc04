"""A Hopper card through which only shapes, dtypes and devices pass: tensors are fake ones on "cuda", Triton kernels
are noted instead of launched, ours are compiled for it, and whoever waits for the device is found out.

What it shows of code for CUDA without one: nothing is made on the wrong device, fla and torch take our arguments, our
kernels compile as they are called and fit the card's shared memory, and the host never waits where it should run ahead
(a copy of a Python number to the card raises). Nothing about values or speed, or whether fla's kernels compile.

`library()` has to be preloaded, for torch decides when it is loaded whether there is CUDA; then `install()`, before
triton and fla are imported.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

DOCUMENTS = 6
"""Packed documents of every batch, as far as the host is told."""

ASKING = tuple(str(Path(str(spec.origin)).parent) for spec in map(find_spec, ("lt2", "fla")) if spec is not None)
"""Whose functions are told to wait: ours and fla's."""

SHARED_MEMORY = 232_448
"""Bytes of a block on Hopper, at most."""

launched: Counter[str] = Counter()
shared: dict[str, int] = {}
"""Kernel of ours -> bytes of shared memory that it takes, the most of all ways it was called in."""
waits: Counter[str] = Counter()


def library(folder: Path, compiler: str) -> Path:
    """Build card.cpp, which takes two seconds."""
    home, built = Path(torch.__file__).parent, folder / "card.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-w", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    command += [str(Path(__file__).with_name("card.cpp")), "-o", str(built), "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return built


def install() -> None:
    """Have torch, triton and fla believe in the card."""
    _pretend_to_torch(torch.cuda)
    _pretend_to_triton()
    _answer_fla()
    _answer_what_waits()


@contextlib.contextmanager
def running():
    """Make and use tensors in here; the counters begin anew."""
    launched.clear()
    waits.clear()
    with FakeTensorMode():
        yield


class Moment:
    """A stream, or an event in one: on this card nothing takes time."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _at_once(self, *args: Any) -> Moment:
        return self

    wait_stream = wait_event = wait = record = record_event = _at_once

    def synchronize(self) -> None:
        waits[_who()] += 1


def _pretend_to_torch(cuda: Any) -> None:
    def always(value: Any) -> Any:  # one function for each name: Dynamo tells torch's functions apart by identity
        return lambda *args, **kwargs: value

    def waiting(*args: Any) -> None:
        waits[_who()] += 1

    cuda.is_available, cuda.is_bf16_supported = always(True), always(True)
    cuda.device_count, cuda.current_device = always(1), always(0)
    cuda.get_device_capability, cuda.get_device_name = always((9, 0)), always("NVIDIA H100 80GB HBM3")
    cuda.get_device_properties = always(
        SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 * 10**9)
    )
    cuda.get_rng_state, cuda.set_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8), always(None)
    cuda.init, cuda._lazy_init = always(None), always(None)
    cuda.device = lambda *args: contextlib.nullcontext()
    cuda.synchronize = waiting
    cuda.Event, torch.Event, cuda.Stream = Moment, Moment, Moment  # type: ignore[misc,assignment]
    cuda.current_stream, cuda.stream = lambda *args: Moment(), lambda *args: contextlib.nullcontext()
    Tensor.record_stream = always(None)  # type: ignore[method-assign]


def _pretend_to_triton() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction, MockTensor

    hopper = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": 132, "warpSize": 32}
    driver: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(get_device_properties=lambda index: hopper),
    )
    triton.runtime.driver.set_active(driver)
    compiling = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        given = {**dict(zip(self.arg_names, args)), **kwargs}
        for name, value in given.items():
            if isinstance(value, Tensor):
                assert value.is_cuda, f"{self.fn.__name__}: {name} is on {value.device}"
        size: Any = grid(given) if callable(grid) else grid
        assert all(int(n) > 0 for n in size), self.fn.__name__
        launched[self.fn.__name__] += 1
        if self.module.startswith("lt2."):
            types = {
                name: MockTensor(value.dtype) if isinstance(value, Tensor) else value for name, value in given.items()
            }
            kernel = compiling(self, grid=grid, warmup=True, **types)
            shared[self.fn.__name__] = max(shared.get(self.fn.__name__, 0), kernel.metadata.shared)

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args))
        self.fn.run(*args, **kwargs, **self.prune_configs(kwargs)[0].all_kwargs())

    torch.library.wrap_triton = lambda kernel: kernel  # else no kernel of an operator is called on fake tensors
    JITFunction.run, Autotuner.run = launch, first_configuration  # type: ignore[method-assign,assignment]


def _answer_fla() -> None:
    """Where fla looks into packed documents, once a batch."""
    import fla.ops.delta_rule
    import fla.ops.gla
    import fla.ops.kda
    import fla.ops.nsa  # noqa: F401
    from fla.ops.utils import index

    def indices(cu_seqlens: Tensor, chunk_size: int = 1, *args: Any, **kwargs: Any) -> Tensor:
        return cu_seqlens.new_zeros(2 * 256 // chunk_size + DOCUMENTS, 2)

    answers: dict[Any, Any] = {index.prepare_chunk_indices: indices, index.prepare_token_indices: indices}
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("fla.") else ():
            if callable(value) and value.__hash__ and value in answers:
                setattr(module, attribute, answers[value])


def _answer_what_waits() -> None:
    """A fake tensor has no value to look at and raises; answer where looking is known and meant, and count it."""
    item, places = Tensor.item, Tensor.nonzero

    def nonzero(mask: Tensor) -> Tensor:
        if not isinstance(mask, FakeTensor):
            return places(mask)
        waits[_who()] += 1
        return torch.zeros(DOCUMENTS, mask.ndim, dtype=torch.int64, device=mask.device)

    def look(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return item(tensor)
        if not tensor.is_cuda:
            return 0  # the loop's news, arrived on the host: nothing bad, nothing asked
        waits[_who()] += 1
        return 16  # pieces of packed documents (fla), or a figure to log

    Tensor.nonzero, Tensor.item = nonzero, look  # type: ignore[assignment,method-assign]


def _who() -> str:
    """The function of ours, or of fla's, that asked."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ASKING)]
    return f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "?"
