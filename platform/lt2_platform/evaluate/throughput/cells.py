"""One throughput measurement per fresh process: no allocator, cache or kernel of one cell is there in the next.

`python -m lt2_platform.evaluate.throughput.cells` reads a Cell as JSON and writes lines of JSON: {"phase"} as it goes,
{"result"} or {"out_of_memory": phase} at the end. `measured` runs it and reads them.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from lt2.config import Config, ModelConfig
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.machine.memory import peak_resident

RESOLUTION = 1 / 16


class Cell(Config):
    """What one process measures: a model with random weights, and the throughput task's own settings.

    Attributes:
        memory_gib: limit of the process: address space on a CPU, allocator's share on CUDA; None for the machine's.
        peer: also measure transformers' generate() on the same model.
    """

    model: ModelConfig
    throughput: ThroughputConfig
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(default=None, ge=1)
    memory_gib: float | None = Field(default=None, gt=0)
    peer: bool = False


def measured(cell: Cell, *, timeout_s: float = 3600) -> dict[str, Any]:
    """What `task.measure` returns for the cell, or {"out_of_memory": phase}; from a process of its own.

    A process that the kernel kills for memory counts as out of memory.

    Raises:
        RuntimeError: the process failed in another way, with what it wrote.
        subprocess.TimeoutExpired: it took longer than timeout_s.
    """
    command = [sys.executable, "-m", "lt2_platform.evaluate.throughput.cells"]
    done = subprocess.run(command, input=cell.model_dump_json(), capture_output=True, text=True, timeout=timeout_s)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = lines[-1] if lines else {}
    if done.returncode == -signal.SIGKILL:
        return {"out_of_memory": last.get("phase", "model")}
    if done.returncode != 0 or "phase" in last or not last:
        raise RuntimeError(f"measuring {cell.model_dump_json()} failed ({done.returncode}):\n{done.stderr[-4000:]}")
    return last.get("result", last)


def frontier(fits: Callable[[int], bool], *, first: int, most: int) -> tuple[int, int | None]:
    """(longest context that fits, shortest found that does not), by doubling from `first` and then bisection.

    The first is 0 if not even `first` fits; the second None if `most` does. Stops when they are closer than
    RESOLUTION of the first.
    """
    low, high, context = 0, None, first
    while high is None:
        if fits(context):
            low = context
            if low >= most:
                return low, None
            context = min(2 * context, most)
        else:
            high = context
    if low == 0:
        return 0, high
    while high - low > max(1, int(low * RESOLUTION)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def main() -> None:
    cell = Cell.model_validate_json(sys.stdin.read())
    import torch

    from lt2.analysis.timing import random_model
    from lt2.decode import merge_projections
    from lt2_platform.evaluate.throughput.peer import measure_peer
    from lt2_platform.evaluate.throughput.task import OutOfMemoryError, measure, phase

    say = lambda **line: print(json.dumps(line), flush=True)  # noqa: E731
    if cell.threads is not None:
        torch.set_num_threads(cell.threads)
    limit(cell)
    try:
        say(phase="model")
        with phase("model"):
            model = random_model(cell.model, dtype=getattr(torch, cell.dtype), device=cell.device)
            model.requires_grad_(False).eval()
            if cell.device == "cuda":
                merge_projections(model)
        say(phase="prefill")  # the later phases are told apart by what is raised, unless the kernel kills
        found = measure(model, cell.throughput)
        if cell.peer:
            say(phase="peer")
            with phase("peer"):
                found["peer"] = measure_peer(model, cell.throughput)
    except OutOfMemoryError as error:
        say(out_of_memory=error.phase)
        return
    found |= {
        "threads": torch.get_num_threads(),
        "max_rss_bytes": peak_resident(),
    }
    say(result=found)


def limit(cell: Cell) -> None:
    """Cap the process's memory, once torch is loaded."""
    import torch

    if cell.memory_gib is None:
        return
    size = int(cell.memory_gib * 2**30)
    if cell.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / total))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))


if __name__ == "__main__":
    main()
