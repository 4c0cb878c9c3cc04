"""The corpus of corpora.py, and one Ray per module that can reach moto."""

import shutil
import tempfile
from contextlib import nullcontext

import pytest

from lt2_platform.data import prepare
from tests.platform.data.corpora import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """(folder, [(file name, documents)]) of `write_corpus`; tests must not change it."""
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_corpus(folder)


@pytest.fixture(scope="module")
def local_ray(s3_environment):
    """A Ray of this module's own, with 2 CPUs and moto's environment."""
    import ray

    temporary = tempfile.mkdtemp(prefix="r", dir="/tmp")  # socket paths must stay short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temporary)
    yield
    ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def no_ray(monkeypatch):
    """prepare() does its work in this process, one item after another."""
    monkeypatch.setattr(prepare, "some_ray", lambda parallelism: nullcontext())
    monkeypatch.setattr(prepare, "spread", lambda function, items, shared, limit: (function(i, shared) for i in items))
