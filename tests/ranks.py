"""Run a test's function on gloo ranks, each a fresh process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [ROOT, ROOT / "platform", ROOT / "workflows", ROOT / "dashboards"]

# Ranks are forked from a process that has done these imports and nothing else; by itself each would take seconds.
_FRESH = multiprocessing.get_context("forkserver")
_FRESH.set_forkserver_preload(["lt2.train.parallel", "lt2_platform.train.worker", "torch._dynamo"])  # for optimizers


def run_ranks(function: Callable, world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, …], inside a gloo process group of `world_size` ranks.

    The function must be importable (module level); arguments and results are pickled. A rank that fails fails the
    test with that rank's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.pickle")
        job.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size)}
        processes = [
            _FRESH.Process(target=_rank, args=(folder, environment | {"RANK": str(rank)})) for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            for process in processes:
                process.join(deadline - time.monotonic())
            late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        titles = {rank: f"rank {rank}" + (f", ended after {timeout_s} s" if rank in late else "") for rank in failed}
        outputs = [f"{titles[rank]}:\n{Path(folder, f'output-{rank}').read_text()}" for rank in failed]
        assert not failed, "\n".join(outputs)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _rank(folder: str, environment: dict[str, str]) -> None:
    output = os.open(Path(folder, f"output-{environment['RANK']}"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    module, name, args = pickle.loads(Path(folder, "job.pickle").read_bytes())
    # A file, not a port: nothing else on the machine can take it between choosing and binding.
    store = dist.FileStore(str(Path(folder, "rendezvous")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = getattr(importlib.import_module(module), name)(*args)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Not the interpreter's own end: gloo's C++ threads now and then abort a process that has done all its work.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
