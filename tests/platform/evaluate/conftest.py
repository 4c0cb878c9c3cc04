"""A Ray for the tests that need model actors."""

import shutil
import tempfile

import pytest


@pytest.fixture(scope="module")
def ray_here():
    import ray

    folder = tempfile.mkdtemp(prefix="lt2e-")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
