"""What every test may ask for: an S3 server (moto) in its own process."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

import fsspec
import pytest

LOOPBACK = "127.0.0.1"


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


@pytest.fixture(scope="session")
def s3_endpoint():
    """URL of a running moto server; the process ends with the session."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{LOOPBACK}:{port}"
    try:
        _wait_until_up(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="session")
def s3_environment(s3_endpoint):
    """The variables that point a process at moto; a Ray that shall reach it must be started with them."""
    return {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "NO_PROXY": LOOPBACK,
    }


@pytest.fixture
def s3_root(s3_environment, monkeypatch):
    """A fresh `s3://bucket/prefix`, with the AWS_* environment pointing at moto."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"lt2-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], use_listings_cache=False).mkdir(bucket)
    return f"s3://{bucket}/root"
