"""Who is let in, and what every answer carries."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from fastapi.testclient import TestClient

from lt2.config import ConfigError
from lt2_dashboards.app import create_app, listen, serve
from lt2_dashboards.auth import COOKIE, WANTED, Access, check_bind, is_local_name, is_loopback

PAGES = (
    "/",
    "/runs/full-1",
    "/api/runs",
    "/api/figures/curves?runs=full-1",
    "/static/app.js",
    "/api/nothing",
    "/etc/passwd",
)


@pytest.fixture
def access(tmp_path):
    return Access("token", tmp_path / "state" / "token")


@pytest.fixture
def guarded(root, access):
    return TestClient(create_app(str(root), access), base_url="http://127.0.0.1:8787", follow_redirects=False)


@pytest.mark.parametrize("page", PAGES)
def test_strangers_see_nothing(guarded, page):
    answer = guarded.get(page)
    assert answer.status_code == 401
    assert "lt2 dashboard" in answer.text
    assert "full-1" not in answer.text


def test_the_token_buys_one_cookie(guarded, access, root):
    token = access.token
    answer = guarded.get("/login", params={"token": token})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert token not in cookie
    assert guarded.get("/api/runs").status_code == 200
    other = TestClient(guarded.app, base_url="http://127.0.0.1:8787", follow_redirects=False)
    assert other.get("/login", params={"token": token}).status_code == 401  # used up
    assert other.get("/login", params={"token": access.token}).status_code == 303  # its successor, in the file
    assert (access.token_file.read_text()).strip() == access.token


BROWSER = {"accept": "text/html,application/xhtml+xml"}


@pytest.mark.parametrize(
    ("asked", "lands"),
    [
        ("/compare?runs=a,b&by=step", "/compare?runs=a%2Cb&by=step"),
        ("/runs/full-1", "/runs/full-1"),
        ("//elsewhere.org/runs", "/"),  # a browser takes this for another host
        ("/runs/a;b", "/"),
        ("/runs/" + "a" * 5_000, "/"),
    ],
)
def test_logging_in_leads_to_the_page_that_was_asked_for(guarded, access, asked, lands):
    assert guarded.get(f"http://127.0.0.1:8787{asked}", headers=BROWSER).status_code == 401
    assert guarded.get("/login", params={"token": access.token}).headers["location"] == lands


def test_only_pages_are_remembered_and_no_other_host_is_led_to(guarded, access):
    assert "set-cookie" not in guarded.get("/api/runs").headers
    made_up = {"cookie": f"{WANTED}=//elsewhere.org"}
    assert guarded.get("/login", params={"token": access.token}, headers=made_up).headers["location"] == "/"


@pytest.mark.parametrize("token", ["", "wrong", "é", "\x00", "a" * 50_000])
def test_wrong_tokens_are_refused(guarded, token):
    assert guarded.get("/login", params={"token": token}).status_code == 401
    assert guarded.get("/api/runs").status_code == 401


@pytest.mark.parametrize("cookie", ["", "x", "=", COOKIE, f"{COOKIE}=", f"{COOKIE}=guess", f"other=1; {COOKIE}=guess"])
def test_made_up_cookies_are_refused(guarded, cookie):
    assert guarded.get("/api/runs", headers={"cookie": cookie}).status_code == 401


def test_the_token_file_is_private(access):
    assert stat.S_IMODE(os.stat(access.token_file).st_mode) == 0o600
    assert len(access.token) >= 40


def test_a_bind_that_others_reach_needs_authentication(tmp_path):
    for host in ("0.0.0.0", "::", "192.168.1.5", "myhost", "example.org", ""):
        with pytest.raises(ConfigError, match="refusing to serve on"):
            serve(str(tmp_path), host, auth="none")
    check_bind("0.0.0.0", Access("token", tmp_path / "token"))
    for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"):
        check_bind(host, Access("none"))


def test_the_command_refuses_such_a_bind_in_one_line(tmp_path):
    command = [sys.executable, "-m", "lt2_dashboards", "--storage", str(tmp_path), "--host", "0.0.0.0", "--no-auth"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("refusing to serve on 0.0.0.0 without authentication")
    assert done.stderr.count("\n") == 1


def test_without_authentication_only_local_names_are_answered(client):
    """A page elsewhere that resolves its own name to 127.0.0.1 (DNS rebinding) must not read along."""
    assert client.get("/api/runs").status_code == 200
    for host in ("evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "127.0.0.1:x"):
        assert client.get("/api/runs", headers={"host": host}).status_code == 401, host
    assert is_local_name("localhost:1")
    assert is_local_name("[::1]:8787")
    assert not is_loopback("10.0.0.1")


def test_only_listed_proxies_may_vouch(root, tmp_path):
    app = create_app(str(root), Access("token", tmp_path / "t", trusted_proxies=("10.1.2.3",)))
    header = {"X-Forwarded-User": "ada", "X-Forwarded-For": "10.1.2.3"}
    proxy = TestClient(app, client=("10.1.2.3", 1))
    assert proxy.get("/api/runs", headers=header).status_code == 200
    assert proxy.get("/api/runs").status_code == 401
    assert proxy.get("/api/runs", headers={"X-Forwarded-User": ""}).status_code == 401
    stranger = TestClient(app, client=("10.1.2.4", 1))
    assert stranger.get("/api/runs", headers=header).status_code == 401
    with pytest.raises(ConfigError, match="'proxy.local' is not an IP address"):
        Access("none", trusted_proxies=("proxy.local",))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client, method):
    for page in ("/", "/api/runs", "/login"):
        assert client.request(method, page).status_code == 405


@pytest.mark.parametrize(
    "page", [*PAGES, "/api/figures/curves.html?runs=full-1", "/api/figures/curves.csv?runs=full-1"]
)
def test_every_answer_has_the_security_headers(client, page):
    headers = client.get(page).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_refusals_have_them_too(guarded):
    assert guarded.get("/").headers["content-security-policy"].startswith("default-src 'self'")


def test_a_taken_port_is_named():
    sock = listen("127.0.0.1", 0)
    try:
        with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+ .*choose another --port"):
            listen("127.0.0.1", sock.getsockname()[1])
    finally:
        sock.close()
