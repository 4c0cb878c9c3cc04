"""A real headless Chromium, a dashboard for it to look at, and how tests wait for what it draws."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lt2_dashboards import queries
from lt2_dashboards.app import create_app, listen
from lt2_dashboards.auth import LOGIN, Access
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.conftest import fill, fill_workflow

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = ("background-networking", "component-update", "sync", "gpu", "quic")
ARGUMENTS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{feature}" for feature in QUIET)]


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip("Debian's chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Site:
    """A dashboard on a free port, over a store that tests may add to."""

    def __init__(self, root: Path):
        self.store = ResultsStore(Storage(str(root)))
        self.access = Access("token", root.parent / "token")
        self.socket = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(create_app(str(root), self.access), log_level="warning", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> Site:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


def log_in(context, site: Site) -> None:
    """As a visit to the link does, but no page is drawn."""
    assert context.request.get(f"{site.address}{LOGIN}?token={site.access.token}").ok


@contextmanager
def visiting(browser, root: Path) -> Iterator[tuple]:
    """(page, address) of a dashboard over a store of a test's own; the page is empty, but logged in."""
    with Site(root) as site:
        context = browser.new_context()
        log_in(context, site)
        yield context.new_page(), site.address
        context.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site") / "store"
    fill(root)
    fill_workflow(Storage(str(root)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "FRESH_SECONDS", 0.0)
        with Site(root) as running:
            yield running


def _answered(message: Any) -> bool:
    """Whether an error of the console is only what the site said to a question; a file that is not there is none."""
    found = re.search("status of (400|404|503)", message.text)
    return found is not None and (found[1] != "404" or "/api/" in message.location["url"])


@pytest.fixture
def page(browser, site):
    """An empty page that is logged in; any script error or breach of the CSP fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    log_in(context, site)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" and not _answered(m) else None)
    yield page
    context.close()
    assert problems == []


def until(page, condition: str, seconds: float = 60.0) -> None:
    """Wait for a JavaScript condition; one that throws (what it looks at is not there yet) does not hold.

    Playwright's own way to do that evaluates strings, which our CSP forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        page.wait_for_timeout(50)


def drawn(page, count: int = 1) -> None:
    """Wait until `count` figures are on the screen."""
    until(page, f"document.querySelectorAll('figure[data-ready]').length >= {count}")


def option(page, index: int = 0) -> dict:
    """The chart option that ECharts holds for a figure."""
    return page.evaluate(f"document.querySelectorAll('figure')[{index}].figure.option()")
