"""A Ray head of the test's own, with token authentication, as a cluster would have it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Head:
    address: str
    folder: Path
    token: Path
    metrics: str

    def client_environment(self, **more: str) -> dict[str, str]:
        """What a user on another machine has: the token, nothing of this repository on any path."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "NO_PROXY": LOOPBACK, **more}


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def ray_cluster(num_cpus: int = 2) -> Iterator[Head]:
    """`ray start --head --block` on free ports of loopback; its processes, and no others, end with the block."""
    folder = Path(tempfile.mkdtemp(prefix="lt2-t-"))  # short: Unix sockets below it have a limit of 107 characters
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    names = ["port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port"]
    names += ["ray-client-server-port", "metrics-export-port", "runtime-env-agent-port", "node-manager-port"]
    ports = dict(zip(names, _free_ports(len(names))))
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--temp-dir={folder / 'r'}", f"--node-ip-address={LOOPBACK}", f"--num-cpus={num_cpus}"]
    command += ["--include-dashboard=true", "--object-store-memory=100000000"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    url = f"http://{LOOPBACK}:{ports['metrics-export-port']}/metrics"
    cluster = Head(f"http://{LOOPBACK}:{ports['dashboard-port']}", folder, token, url)
    environment = cluster.client_environment(RAY_metrics_report_interval_ms="1000")
    with open(folder / "start.log", "wb") as log:
        # In a folder of its own: no process of it shall find the repository by where it started.
        head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        _wait_until_up(cluster.address, token, head, folder)
        yield cluster
    finally:
        _end(head)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(address: str, token: Path, head: subprocess.Popen, folder: Path) -> None:
    request = urllib.request.Request(f"{address}/api/jobs/", headers={"Authorization": f"Bearer {token.read_text()}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert head.poll() is None, (folder / "start.log").read_text()
        try:
            opener.open(request, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise TimeoutError(f"no Ray head at {address} within 90 s: {(folder / 'start.log').read_text()}")


def _end(head: subprocess.Popen) -> None:
    family = (
        [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)] if head.poll() is None else []
    )
    head.terminate()
    _, alive = psutil.wait_procs(family, timeout=15)
    for process in alive:
        process.kill()
    head.wait(10)
