"""The dashboard server: pages are static files, everything they show is JSON from a results store, nothing is written.

Every answer carries an ETag over its content, so a page that polls gets 304 until something has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles

from lt2.config import ConfigError
from lt2_dashboards.auth import LOGIN, Access, Guard, check_bind
from lt2_dashboards.export import STATIC, static_html
from lt2_dashboards.figures import FIGURES, GROUPS, Figure, draw
from lt2_dashboards.figures.figure import describe
from lt2_dashboards.queries import Source
from lt2_dashboards.runs.page import compare_page, run_page
from lt2_dashboards.runs.significance import significance
from lt2_dashboards.runs.silent import moment
from lt2_dashboards.runs.table import runs_page, whole_table
from lt2_dashboards.workflows.dags import read_trials, read_workflow, read_workflows
from lt2_dashboards.workflows.records import NotThereError
from lt2_dashboards.workflows.steps import read_log, read_step
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)

DEFAULT_PORT = 8787


def create_app(root: str | None, access: Access) -> FastAPI:
    """The ASGI application over one storage root."""
    source = Source(root)

    def there(request: Request) -> None:
        if request.url.path.startswith("/api/") and request.url.path != "/api/root":
            source.check_there()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, dependencies=[Depends(there)])
    app.add_middleware(GZipMiddleware, minimum_size=2_000, compresslevel=4)
    app.add_middleware(Guard, access=access)

    def mistaken(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 404 if isinstance(error, NotThereError) else 400)

    app.add_exception_handler(ConfigError, mistaken)

    def not_a_number(request: Request, error: Exception) -> Response:
        (first, *_) = cast(RequestValidationError, error).errors()
        return JSONResponse({"error": f"{first['loc'][-1]}={str(first['input'])[:40]!r}: {first['msg']}"}, 400)

    app.add_exception_handler(RequestValidationError, not_a_number)

    def away(request: Request, error: Exception) -> Response:
        # Pages go on asking, so a storage that comes back shows again by itself.
        log.warning("%s: %s cannot be read: %s", request.url.path, source.storage.root, error)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return JSONResponse({"error": f"{source.storage.root} cannot be read at the moment ({reason})"}, 503)

    for kind in STORAGE_ERRORS:
        app.add_exception_handler(kind, away)
    _add_api(app, source)
    _add_figures(app, source)

    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/{path:path}", include_in_schema=False)
    def page(path: str) -> Response:
        # Any other address is a page: the script in index.html reads the URL and says so if there is none.
        if path.startswith("api/"):
            return JSONResponse({"error": f"no such address: /{path[:80]}"}, 404)
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    return app


def _add_api(app: FastAPI, source: Source) -> None:
    @app.get("/api/root")
    def root(request: Request) -> Response:
        return answer(request, {"root": source.storage.root})

    @app.get("/api/runs")
    def runs(request: Request, q: str = "", status: str = "", sort: str = "-created", page: int = 1) -> Response:
        at = moment(source)  # time only decides who is stalled
        body = source.remembered(
            ("runs", at, q, status, sort, page),
            lambda snapshot: runs_page(snapshot, at=at, q=q, status=status, sort=sort, page=page),
        )
        return answer(request, body | {"root": source.storage.root})

    @app.get("/api/runs.csv")
    def table(q: str = "", status: str = "", sort: str = "-created") -> Response:
        columns, rows = whole_table(source.snapshot(), at=moment(source), q=q, status=status, sort=sort)
        return download(Figure("Runs", {}, columns, lambda: rows).csv(), "runs.csv", "text/csv; charset=utf-8")

    @app.get("/api/runs/{run_id}")
    def run(request: Request, run_id: str) -> Response:
        return answer(request, run_page(source, run_id))

    @app.get("/api/compare")
    def compare(request: Request, runs: str = "") -> Response:
        return answer(request, compare_page(source, [run for run in runs.split(",") if run]))

    @app.get("/api/significance")
    def significant(request: Request, runs: str = "") -> Response:
        names = tuple(run for run in runs.split(",") if run)
        return answer(request, source.remembered(("significance", names), lambda _: significance(source, list(names))))

    @app.get("/api/workflows")
    def workflows(request: Request) -> Response:
        return answer(request, read_workflows(source.storage, source.clock()))

    @app.get("/api/workflows/{workflow_id}")
    def workflow(request: Request, workflow_id: str) -> Response:
        return answer(request, read_workflow(source.storage, workflow_id, source.clock()))

    @app.get("/api/steps/{step_id}")
    def step(request: Request, step_id: str) -> Response:
        found = read_step(source.storage, step_id, source.clock())
        return answer(request, found | {"has_run": bool(source.snapshot().runs([step_id]))})

    @app.get("/api/steps/{step_id}/trials")
    def trials(request: Request, step_id: str) -> Response:
        return answer(request, read_trials(source.storage, step_id, source.clock()))

    @app.get("/api/steps/{step_id}/attempts/{attempt}/log")
    def log(request: Request, step_id: str, attempt: int) -> Response:
        return answer(request, read_log(source.storage, step_id, attempt))


def _add_figures(app: FastAPI, source: Source) -> None:
    def figure(name: str, request: Request) -> Figure:
        if name not in FIGURES:
            raise NotThereError(f"no figure {name[:60]!r}; choose from {', '.join(FIGURES)}")
        return draw(FIGURES[name], source, {k: v for k, v in request.query_params.items() if k != "rows"})

    @app.get("/api/figures")
    def figures(request: Request) -> Response:
        found = [describe(function) | {"group": name} for name, group in GROUPS.items() for function in group]
        return answer(request, {"figures": found})

    @app.get("/api/figures/{name}.csv")
    def table(request: Request, name: str) -> Response:
        return download(figure(name, request).csv(), file_name(name, request, "csv"), "text/csv; charset=utf-8")

    @app.get("/api/figures/{name}.html")
    def page(request: Request, name: str) -> Response:
        html = static_html(figure(name, request), origin=source.storage.root)
        return download(html, file_name(name, request, "html"), "text/html; charset=utf-8")

    @app.get("/api/figures/{name}")
    def drawn(request: Request, name: str) -> Response:
        found = figure(name, request)
        body = {name: getattr(found, name) for name in ("title", "option", "columns", "notes", "links", "produce")}
        wanted = request.query_params.get("rows") != "0"  # small charts ask for no table until somebody opens it
        return answer(request, body | ({"rows": found.rows} if wanted else {}))


def answer(request: Request, body: dict[str, Any]) -> Response:
    """JSON with an ETag, or 304 if the visitor has it already."""
    content = json.dumps(json_safe(body), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {"etag": etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="application/json", headers=headers)


def file_name(figure: str, request: Request, kind: str) -> str:
    """E.g. "curves-loss.csv": with the metric, since one saves several; of ASCII letters, digits, "_" and "." only."""
    metric = re.sub(r"[^\w.]+", "-", request.query_params.get("metric", ""), flags=re.ASCII).strip("-.")[:60]
    return f"{figure}-{metric}.{kind}" if metric else f"{figure}.{kind}"


def download(text: str, name: str, kind: str) -> Response:
    """A file to save; never shown in place, where a script in it would run as ours."""
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(text, media_type=kind, headers=headers)


def json_safe(value: Any) -> Any:
    """`value` with NaN and infinities as their names, which JSON has no other way to say."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value).replace("nan", "NaN")
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def default_token_file() -> Path:
    """Where the login token is kept: $XDG_STATE_HOME (or ~/.local/state) /lt2/dashboard-token."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "lt2" / "dashboard-token"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 means 8787, or any free port if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in [port] if port else [DEFAULT_PORT, 0]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host.strip("[]"), wanted))
            sock.listen(128)  # from here on a browser that is faster than us waits instead of being refused
            return sock
        except OSError as error:
            sock.close()
            if wanted != DEFAULT_PORT or port:
                raise ConfigError(
                    f"cannot listen on {host}:{wanted} ({error.strerror}); choose another --port"
                ) from error
    raise AssertionError("unreachable")


def serve(
    storage_root: str | None,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    auth: Literal["token", "none"] = "token",
    token_file: str | Path | None = None,
    trusted_proxies: tuple[str, ...] = (),
    proxy_header: str = "x-forwarded-user",
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the results under `storage_root` until interrupted; `announce` gets the address to open.

    Raises ConfigError for a bind that would be open to others, a taken port or a proxy that is no IP address.
    """
    path = Path(token_file) if token_file else default_token_file()
    access = Access(auth, path if auth == "token" else None, trusted_proxies, proxy_header)
    check_bind(host, access)
    app = create_app(storage_root, access)
    sock = listen(host, port)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
    address = f"http://{shown}:{sock.getsockname()[1]}"
    announce(f"{address}{LOGIN}?token={access.token}" if auth == "token" else f"{address}/")
    # proxy_headers would let any visitor choose the address that Access compares with trusted_proxies.
    config = uvicorn.Config(app, log_level="warning", proxy_headers=False, lifespan="off")
    try:
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        sock.close()
