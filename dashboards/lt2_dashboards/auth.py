"""Who may look: a token exchanged once for a cookie, or the word of a trusted proxy; and the headers of every answer.

The dashboard only reads, so every method but GET and HEAD is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from lt2.config import ConfigError

COOKIE = "lt2_session"
WANTED = "lt2_wanted"  # the page that somebody asked for before being let in: logging in leads there
MAX_SESSIONS = 1_000
LOGIN = "/login"
PAGE = re.compile(r"/(?!/)[\w.~!$&'()*+/:=?@%-]*", re.ASCII)  # a path of this server, and nothing that ends a cookie
MOST_OF_A_COOKIE = 3_000  # bytes; browsers take 4,096

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # unless the answer says otherwise: ask again each time, by ETag
}

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass
class Access:
    """How visitors are let in.

    mode "token": whoever presents the token of `token_file` gets a session cookie and the token is replaced.
    mode "none": everyone, which `check_bind` allows on loopback only.
    `trusted_proxies` may vouch for a visitor with `proxy_header`, in either mode; the header of others is ignored.
    """

    mode: Literal["token", "none"] = "token"
    token_file: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    proxy_header: str = "x-forwarded-user"
    sessions: set[str] = field(default_factory=set)
    token: str = ""

    def __post_init__(self) -> None:
        for address in self.trusted_proxies:
            try:
                ipaddress.ip_address(address)
            except ValueError as error:
                raise ConfigError(f"trusted proxy {address!r} is not an IP address") from error
        if self.mode == "token":
            self.renew_token()

    def renew_token(self) -> None:
        """Make a new token and put it in the file, which only its owner may read."""
        self.token = secrets.token_urlsafe(32)
        if self.token_file is not None:
            write_private(self.token_file, self.token + "\n")

    def exchange(self, token: str) -> str | None:
        """A session for the right token, which is then used up; None for any other."""
        if self.mode != "token" or not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        session = secrets.token_urlsafe(32)
        if len(self.sessions) >= MAX_SESSIONS:
            self.sessions.clear()
        self.sessions.add(session)
        self.renew_token()
        return session

    def admits(self, scope: Scope) -> bool:
        """True if this request may see results."""
        headers = _headers(scope)
        peer = (scope.get("client") or ("",))[0]
        if peer in self.trusted_proxies and headers.get(self.proxy_header.lower()):
            return True
        if self.mode == "none":
            # Without a secret, a web page that points its own name at 127.0.0.1 must not read along.
            return is_local_name(headers.get("host", ""))
        session = _cookie(headers.get("cookie", ""), COOKIE)
        return any(hmac.compare_digest(session.encode(), known.encode()) for known in self.sessions)


def check_bind(host: str, access: Access) -> None:
    """Raise ConfigError if `host` can be reached from elsewhere while nobody is asked who they are."""
    if access.mode == "none" and not is_loopback(host):
        raise ConfigError(
            f"refusing to serve on {host} without authentication; use --host 127.0.0.1, or leave authentication on"
        )


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local_name(host_header: str) -> bool:
    name, _, port = host_header.rpartition(":")
    return is_loopback(name if name and port.isdigit() else host_header)


def write_private(path: Path, text: str) -> None:
    """Replace `path` with a file of mode 0600, never readable by others even for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # mkstemp creates with 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _cookie(header: str, wanted: str) -> str:
    for item in header.split(";"):
        name, _, value = item.strip().partition("=")
        if name == wanted:
            return value
    return ""


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _asked(scope: Scope) -> str:
    """The page that a browser asks for, as a path of this server with its query; "" for anything else."""
    path = (scope.get("raw_path") or b"").decode("latin-1").partition("?")[0]
    query = scope["query_string"].decode("latin-1")
    page = (f"{path}?{query}" if query else path).replace(",", "%2C")
    fits = PAGE.fullmatch(page) is not None and len(page) < MOST_OF_A_COOKIE
    return page if fits and "text/html" in _headers(scope).get("accept", "") else ""


class Guard:
    """ASGI middleware: login, refusal, and the headers of every answer. Everything but the login page is refused to a
    visitor who is not admitted."""

    def __init__(self, app: Any, access: Access):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        if scope["method"] not in ("GET", "HEAD"):
            return await _answer(send_with_headers, 405, "This dashboard is read-only: use GET or HEAD.")
        scope = {**scope, "method": "GET"}  # to HEAD the routes would say 405; the server sends no body in answer to it
        if scope["path"] == LOGIN:
            return await self._login(scope, send_with_headers)
        if self.access.admits(scope):
            return await self.app(scope, receive, send_with_headers)
        page = _asked(scope)
        wanted = f"{WANTED}={page}; HttpOnly; SameSite=Lax; Path={LOGIN}; Max-Age=3600".encode()
        return await _answer(send_with_headers, 401, self._how_to_enter(), [(b"set-cookie", wanted)] * bool(page))

    async def _login(self, scope: Scope, send: Send) -> None:
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        session = self.access.exchange(token)
        if session is None and not self.access.admits(scope):
            return await _answer(send, 401, self._how_to_enter())
        wanted = _cookie(_headers(scope).get("cookie", ""), WANTED)
        headers = [(b"location", wanted.encode() if PAGE.fullmatch(wanted) else b"/")]
        if session is not None:
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            headers.append((b"set-cookie", f"{COOKIE}={session}; HttpOnly; SameSite=Lax; Path=/{secure}".encode()))
        return await _answer(send, 303, "", headers)

    def _how_to_enter(self) -> str:
        where = f"\n\nA new address: http://<host>:<port>{LOGIN}?token=<the content of {self.access.token_file}>"
        text = "Open the address that `lt2 dashboard` printed. Each address works once, for one browser."
        return text + (where if self.access.mode == "token" and self.access.token_file else "") + "\n"


async def _answer(send: Send, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = text.encode()
    start = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    start += [(b"cache-control", b"no-store"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body})
