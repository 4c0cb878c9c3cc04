"""A Ray of a test module's own, in the process of the tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

# Ray's workers give way to everything else (nice 15) by default; on a busy machine a test would wait for minutes. And
# it starts one per CPU before anybody needs it.
SYSTEM = {"worker_niceness": 0, "prestart_worker_first_driver": False}


@contextmanager
def one_ray(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """With two CPUs. environment: what its processes have besides our own."""
    import ray

    folder = tempfile.mkdtemp(prefix="lt2-r-", dir="/tmp")  # short: Unix sockets lie below it
    try:
        options = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            ray.init(address="local", _temp_dir=folder, _system_config=SYSTEM, **options)
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
