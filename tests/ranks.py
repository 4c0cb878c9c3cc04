"""Run a test's function on gloo ranks, each a fresh process."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [ROOT, ROOT / "platform", ROOT / "workflows", ROOT / "dashboards"]


def run_ranks(function: Callable, world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, …], inside a gloo process group of `world_size` ranks.

    The function must be importable (module level); arguments and results are pickled. A rank that fails fails the
    test with that rank's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.pickle")
        job.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        processes = [_start(rank, world_size, folder) for rank in range(world_size)]
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [f"rank {r}:\n{outputs[r]}" for r, process in enumerate(processes) if process.returncode]
        assert not failed, "\n".join(failed)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _start(rank: int, world_size: int, folder: str) -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    return subprocess.Popen(
        [sys.executable, __file__, folder],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip


def _main(folder: str) -> None:
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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


if __name__ == "__main__":
    _main(sys.argv[1])
