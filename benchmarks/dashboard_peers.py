"""Our dashboard beside TensorBoard and MLflow on the same runs:

    python benchmarks/dashboard_peers.py [--peers PYTHON] [--runs 100] [--steps 5000] [--json FILE]

PYTHON is an interpreter that has tensorboard and mlflow (the extra `dashboard-peers`), in an environment of its own.
For each dashboard, in headless Chromium: seconds from starting the server until a run's curves are on the screen; from
then on seconds until the list of runs, and until one run's curves, are drawn in a fresh profile (medians of three,
dashboards in turns); and the peak memory of all processes of the server. What a page shows differs: ours draws up to
2,000 buckets per metric with their range, TensorBoard a sample of 1,000 points, MLflow one of a few hundred.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from comparison import machine, print_rows, row, write_rows

CHROMIUM = "/usr/bin/chromium"
ROUNDS = 3
LEAN = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # else MLflow keeps a dozen idle job workers beside its server
WAIT_MS = 600_000


@dataclass
class Page:
    """An address and the element that is there once the page is drawn; `count` of them."""

    path: str
    selector: str
    count: int = 1


@dataclass
class Dashboard:
    name: str
    command: list[str]
    address: str
    listing: Page
    curves: Page


def dashboards(root: Path, peers: str, mlflow_run: Callable[[], str]) -> list[Dashboard]:
    """The three, each over what peer_logs.py has written under `root`."""
    ours, board, flow = (free_port() for _ in range(3))
    serve = ["--no-auth", "--port", str(ours)]
    drawn = "figure[data-ready]"
    chart = "scalar-card line-chart canvas, scalar-card line-chart svg path"
    run = mlflow_run()
    return [
        Dashboard(
            "LT2",
            [sys.executable, "-m", "lt2_dashboards", "--storage", str(root / "ours"), *serve],
            f"http://127.0.0.1:{ours}",
            Page("/", f"tr[data-run], {drawn}", 5),
            Page("/runs/run-0000", drawn, 2),
        ),
        Dashboard(
            "TensorBoard",
            [peers, "-m", "tensorboard.main", "--logdir", str(root / "tensorboard"), "--port", str(board)],
            f"http://127.0.0.1:{board}",
            Page("/#timeseries", chart),
            Page("/?runFilter=run-0000#timeseries", chart),
        ),
        Dashboard(
            "MLflow",
            [peers, "-m", "mlflow", "server", "--port", str(flow), "--workers", "1"]
            + ["--backend-store-uri", f"sqlite:///{root}/mlflow/mlflow.db"],
            f"http://127.0.0.1:{flow}",
            Page("/#/experiments/1/runs", "[role=row] a[href*='/runs/']"),
            Page(f"/#/experiments/1/runs/{run}/model-metrics", ".js-plotly-plot .xtick", 4),
        ),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_up(address: str, server: subprocess.Popen) -> None:
    while True:
        assert server.poll() is None, f"{server.args} ended with {server.returncode}"
        try:
            return urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.05)


def seconds_until(browser: Any, address: str, page: Page) -> float:
    """From opening the page in a fresh profile to its elements being there."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    tab = context.new_page()
    begun = time.perf_counter()
    tab.goto(address + page.path, timeout=WAIT_MS)
    tab.locator(page.selector).nth(page.count - 1).wait_for(state="attached", timeout=WAIT_MS)
    taken = time.perf_counter() - begun
    context.close()
    return taken


def peak_mb(server: subprocess.Popen) -> float:
    """Peak resident memory, summed over the server's processes."""
    process = psutil.Process(server.pid)
    found = [Path(f"/proc/{each.pid}/status").read_text() for each in (process, *process.children(recursive=True))]
    return sum(int(text.split("VmHWM:")[1].split()[0]) for text in found if "VmHWM:" in text) / 1024


def measure(found: list[Dashboard]) -> dict[str, dict[str, float]]:
    from playwright.sync_api import sync_playwright

    servers: dict[str, subprocess.Popen] = {}
    results: dict[str, dict[str, float]] = {}
    arguments = ["--headless", "--no-sandbox", "--disable-gpu"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            for each in found:
                begun = time.perf_counter()
                servers[each.name] = subprocess.Popen(
                    each.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **LEAN}
                )
                until_up(each.address, servers[each.name])
                seconds_until(browser, each.address, each.curves)
                results[each.name] = {"first": time.perf_counter() - begun}
                print(f"{each.name}: first curves after {results[each.name]['first']:.2f} s", flush=True)
            for what in ("listing", "curves"):
                times: dict[str, list[float]] = {each.name: [] for each in found}
                for _ in range(ROUNDS):
                    for each in found:
                        times[each.name].append(seconds_until(browser, each.address, getattr(each, what)))
                for name, taken in times.items():
                    results[name][what] = statistics.median(taken)
            for name, server in servers.items():
                results[name]["memory"] = peak_mb(server)
        finally:
            browser.close()
            for server in servers.values():
                stop(server)
    return results


def stop(server: subprocess.Popen) -> None:
    """End a server and the processes that it started."""
    processes = [psutil.Process(server.pid)] if server.poll() is None else []
    processes += [child for process in processes for child in process.children(recursive=True)]
    for signal in ("terminate", "kill"):
        for process in processes:
            if process.is_running():
                getattr(process, signal)()
        _, processes = psutil.wait_procs(processes, timeout=10)
    server.wait()


def first_mlflow_run(root: Path, peers: str) -> str:
    code = (
        "import sys; from mlflow import MlflowClient; client = MlflowClient(sys.argv[1]); "
        "print(client.search_runs(['1'], \"attributes.run_name = 'run-0000'\")[0].info.run_id)"
    )
    uri = f"sqlite:///{root}/mlflow/mlflow.db"
    return subprocess.run([peers, "-c", code, uri], check=True, capture_output=True, text=True).stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="an interpreter with tensorboard and mlflow")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for kind, python in (("ours", sys.executable), ("tensorboard", given.peers), ("mlflow", given.peers)):
            begun = time.perf_counter()
            writer = [python, str(Path(__file__).with_name("peer_logs.py")), kind, str(root / kind)]
            subprocess.run([*writer, str(given.runs), str(given.steps)], check=True)
            print(f"{kind}: written in {time.perf_counter() - begun:.0f} s", flush=True)
        results = measure(dashboards(root, given.peers, lambda: first_mlflow_run(root, given.peers)))
    size = f"{given.runs} runs x {given.steps:,} steps x 2 metrics"
    work = {
        "first": ("from start of the server to a run's curves", "s"),
        "listing": ("list of runs drawn", "s"),
        "curves": ("a run's curves drawn", "s"),
        "memory": ("peak memory of the server", "MB"),
    }
    rows = [
        row(title, size, results["LT2"][key], peer, results[peer][key], unit)
        for key, (title, unit) in work.items()
        for peer in ("TensorBoard", "MLflow")
    ]
    print(machine())
    print_rows(rows)
    write_rows(rows, given.json)


if __name__ == "__main__":
    main()
