"""The dashboard on a large store: `python benchmarks/dashboard.py [--quick] [--json FILE] [--store ROOT]`.

The server runs in a process of its own. Its peer answers the same questions straight from the runs' files with DuckDB,
as a dashboard without manifest and downsampled curves would. Also printed, without a peer: seconds until the first
page and a run's page are drawn in headless Chromium, and the server's peak memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import duckdb
from comparison import interleaved, row, write_rows
from generate_store import generate

CHROMIUM = "/usr/bin/chromium"
READY = "document.querySelectorAll('figure[data-ready]').length >= 4"


def start(root: str) -> tuple[subprocess.Popen, str]:
    """The dashboard over `root` on a free port, and its address."""
    command = [sys.executable, "-m", "lt2_dashboards", "--storage", root, "--no-auth"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().split()[-1].rstrip("/")


def read(address: str) -> bytes:
    with urllib.request.urlopen(address) as answer:
        return answer.read()


def peer_table(root: str) -> list:
    """The last value of every metric of every run, from one file per run."""
    return duckdb.execute(
        "SELECT filename, metric, arg_max(last, step) FROM read_parquet(?, filename = true) GROUP BY ALL",
        [f"{root}/runs/*/curves.parquet"],
    ).fetchall()


def peer_curve(root: str, steps: int) -> list:
    """The curve of one metric of one run, from its raw rows."""
    return duckdb.execute(
        "SELECT step // ?, min(value), avg(value), max(value) FROM read_parquet(?) WHERE metric = 'loss' GROUP BY 1",
        [max(1, steps // 2_000), f"{root}/runs/run-000000/metrics/*.parquet"],
    ).fetchall()


def seconds_until_drawn(address: str) -> dict[str, float]:
    """Seconds from opening a page to its figures being on the screen, median of three fresh browser profiles."""
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"])
        for name, path in (("runs page", "/"), ("run page", "/runs/run-000000")):
            times = []
            for _ in range(3):
                context = browser.new_context(viewport={"width": 1440, "height": 900})
                page = context.new_page()
                begun = time.perf_counter()
                page.goto(address + path)
                while not page.evaluate(READY):
                    time.sleep(0.01)
                times.append(time.perf_counter() - begun)
                context.close()
            found[name] = sorted(times)[1]
        browser.close()
    return found


def peak_mb(server: subprocess.Popen) -> float:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 runs of 20,000 steps instead of 10,000 of 100,000")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--store", help="a store that generate_store.py made with the same sizes")
    given = parser.parse_args()
    runs, steps = (1_000, 20_000) if given.quick else (10_000, 100_000)
    with tempfile.TemporaryDirectory() as temporary:
        root = given.store or temporary
        if not given.store:
            generate(root, runs, steps)
        server, address = start(root)
        try:
            begun = time.perf_counter()
            read(f"{address}/api/runs")
            cold = time.perf_counter() - begun
            # A new question each time, so that no answer is a remembered one.
            fresh = iter(range(1_000_000))
            table = interleaved(
                {
                    "ours": lambda: read(f"{address}/api/runs?q=step>-{next(fresh) + 1}"),
                    "peer": lambda: peer_table(root),
                }
            )
            curve = interleaved(
                {
                    "ours": lambda: read(f"{address}/api/figures/curves?runs=run-000000&smooth={next(fresh)}"),
                    "peer": lambda: peer_curve(root, steps),
                }
            )
            drawn = seconds_until_drawn(address) if Path(CHROMIUM).exists() else {}
            memory = peak_mb(server)
        finally:
            server.terminate()
            server.wait(10)
    size = f"{runs:,} runs x {steps:,} steps"
    rows = [
        row("runs table, a new filter", size, table["ours"], "DuckDB, one file per run", table["peer"], "ms"),
        row("a run's loss curve", size, curve["ours"], "DuckDB, raw rows", curve["peer"], "ms"),
    ]
    for found in rows:
        print(f"{found['work']:28s} {found['ours']:9.1f} ms   {found['peer_name']} {found['peer']:9.1f} ms")
    print(f"{'first answer of a new server':28s} {1e3 * cold:9.1f} ms")
    for name, seconds in drawn.items():
        print(f"{name + ' drawn in Chromium':28s} {1e3 * seconds:9.1f} ms")
    print(f"{'peak memory of the server':28s} {memory:9.1f} MB")
    write_rows(rows, given.json)


if __name__ == "__main__":
    main()
