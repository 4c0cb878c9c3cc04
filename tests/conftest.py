"""What every test may ask for: an S3 server in its own process, moto or with `--s3-server ceph` a real Ceph RGW."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

LOOPBACK = "127.0.0.1"
# Every training run would start these processes. wandb's tests ask for it; those of clusters take no RAY_* from here.
os.environ["WANDB_MODE"] = "disabled"
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"  # as `lt2 run` has it: every training waits for a look to end

# Tests kill processes, never the machine: what is written is there, synced or not, and syncing took much of their time.
os.fsync = lambda descriptor: None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _wait_until_up(url: str, server: subprocess.Popen) -> None:
    for _ in range(200):
        assert server.poll() is None, f"moto exited with {server.returncode}"
        try:
            urllib.request.urlopen(url + "/moto-api/", timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"moto did not answer on {url} within 10 s")


def pytest_addoption(parser):
    parser.addoption("--s3-server", choices=("moto", "ceph"), default="moto", help="what the tests marked s3 talk to")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if {"s3_root", "s3_environment"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("s3")
    if hasattr(config, "workerinput"):  # one of several workers
        # Files are handed out in this order: the long ones first, so that no worker is left alone with one at the end.
        long = {item.path for item in items for marker in ("ray", "interpret") if item.get_closest_marker(marker)}
        items.sort(key=lambda item: item.path not in long)


@contextmanager
def _moto():
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{LOOPBACK}:{port}"
    try:
        _wait_until_up(url, server)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def _ceph():
    script = Path(__file__).parents[1] / "scripts" / "ceph_rgw"
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        answer = server.stdout.readline()
        assert answer, f"{script} ended with {server.wait()}"
        yield json.loads(answer)
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="session")
def s3_environment(request):
    """The variables that point a process at the S3 server; a Ray that shall reach it must be started with them."""
    server = _ceph if request.config.getoption("--s3-server") == "ceph" else _moto
    with server() as environment:
        yield {**environment, "NO_PROXY": LOOPBACK}


@pytest.fixture
def s3_root(s3_environment, monkeypatch):
    """A fresh `s3://bucket/prefix`, with the AWS_* environment pointing at the server."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"lt2-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_listings_cache=False).mkdir(bucket)
    return f"s3://{bucket}/root"
