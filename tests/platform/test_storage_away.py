"""A store that refuses for a while is asked again by whoever leads work that others are at."""

import errno
import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pyarrow.fs import FileSelector
from s3fs import S3FileSystem

from lt2_platform import storage, storage_errors
from lt2_platform.storage import Storage, arrow_filesystem
from lt2_platform.storage_errors import is_away, patiently


class Pauses(threading.Event):
    """Pauses that take no time."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def wait(self, timeout=None):
        self.taken.append(timeout)
        return self.is_set()


class S3Object(BaseHTTPRequestHandler):
    """One object of a bucket, behind the server's faults: codes of S3, None for a connection that is cut, "half" for
    an answer that is.
    """

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        code, status = self.server.faults.pop(0) if self.server.faults else ("", 200)
        if code is None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if code == "half":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.close_connection = True
            return
        body = f"<Error><Code>{code}</Code><Message>why</Message></Error>".encode() if code else b"here"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """An S3 server with `faults` to answer first; the client itself asks no second time where it can be told so."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), S3Object)
    served.faults = []
    threading.Thread(target=served.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{served.server_port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    yield served
    served.shutdown()
    served.server_close()


FAULTS = {
    "InternalError": [("InternalError", 500)] * 2,
    "ServiceUnavailable": [("ServiceUnavailable", 503)] * 2,
    "SlowDown": [("SlowDown", 503)] * 2,
    "a cut connection": [(None, 0)] * 4,  # after the first the client connects once more
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_read_that_s3_refuses_is_asked_again(server, caplog, fault):
    read, pauses = lambda: Storage("s3://bucket/root").read_bytes("a"), Pauses()
    assert patiently(read, pauses) == b"here"
    server.faults = list(FAULTS[fault])
    with pytest.raises(storage_errors.STORAGE_ERRORS):
        read()
    server.faults = list(FAULTS[fault])
    pauses.taken.clear()
    assert patiently(read, pauses) == b"here"
    assert pauses.taken == [1, 2]
    assert "storage refused (" in caplog.text


def refusing(times, error):
    left = [error] * times

    def ask():
        if left:
            raise left.pop()
        return "answer"

    return ask


EIO = OSError(errno.EIO, os.strerror(errno.EIO))


def test_pauses_grow_to_a_minute_and_patience_ends(monkeypatch):
    pauses = Pauses()
    monkeypatch.setattr(storage_errors.time, "monotonic", lambda: float(sum(pauses.taken)))
    assert patiently(refusing(8, EIO), pauses) == "answer"
    assert pauses.taken == [1, 2, 4, 8, 16, 32, 60, 60]
    pauses.taken.clear()
    with pytest.raises(OSError, match="Input/output error"):
        patiently(refusing(10**6, EIO), pauses)
    assert 840 < sum(pauses.taken) <= 900


def test_who_is_told_to_stop_waits_for_no_store():
    pauses = Pauses()
    pauses.set()
    with pytest.raises(OSError, match="Input/output error"):
        patiently(refusing(1, EIO), pauses)
    assert pauses.taken == []


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), ValueError("no JSON")])
def test_what_is_no_refusal_is_raised_at_once(error):
    pauses = Pauses()
    with pytest.raises(type(error)):
        patiently(refusing(1, error), pauses)
    assert pauses.taken == []


# Code, status, and whether the trouble is the store's own.
ANSWERS = [
    ("InternalError", 500, True),
    ("SlowDown", 503, True),
    ("ServiceUnavailable", 503, True),
    ("", 502, True),  # a proxy's
    ("", 504, True),
    (None, 0, True),
    ("half", 200, True),
    ("AccessDenied", 403, False),
    ("InvalidAccessKeyId", 403, False),
    ("NoSuchBucket", 404, False),
    ("MalformedXML", 400, False),
]


@pytest.mark.parametrize(("code", "status", "away"), ANSWERS)
@pytest.mark.parametrize("request_of", ["look", "list", "read"])
def test_what_arrow_says_of_a_store_with_a_trouble_of_its_own(server, monkeypatch, code, status, away, request_of):
    monkeypatch.setattr(storage, "ARROW_ATTEMPTS", 1)
    fs, path = arrow_filesystem("s3://bucket/key")
    server.faults = [(code, status)] * 8
    requests = {
        "look": lambda: fs.get_file_info(path),
        "list": lambda: fs.get_file_info(FileSelector(path)),
        "read": lambda: fs.open_input_file(path).read(),
    }
    if (request_of, code) in {("look", "half"), ("look", "NoSuchBucket")}:
        requests[request_of]()  # all that it needs came before the cut, or it takes the answer for "is not there"
        return
    with pytest.raises(OSError) as refused:  # noqa: PT011  what it says, is the question
        requests[request_of]()
    assert is_away(refused.value) is away


@pytest.mark.parametrize(("code", "status", "away"), ANSWERS)
def test_what_the_s3_client_says_of_a_store_with_a_trouble_of_its_own(server, monkeypatch, code, status, away):
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    server.faults = [(code, status)] * 8
    with pytest.raises(Exception) as refused:  # noqa: PT011  which, is the question
        Storage("s3://bucket/root").read_bytes("a")
    found = [refused.value, refused.value.__cause__]
    assert any(is_away(error) for error in found if error is not None) is away, found


def test_only_clients_of_s3_are_heard():
    assert not is_away(TimeoutError("a step's own"))
    assert not is_away(ValueError("AWS Error SLOW_DOWN during ListObjectsV2 operation: quoted"))


def test_who_waits_for_a_store_is_told(server, monkeypatch, caplog):
    monkeypatch.setattr(storage_errors, "SLOW_SECONDS", 0.05)
    asked = threading.Event()

    def answer(handler):
        asked.wait(30)
        return S3Object.do_GET(handler)

    monkeypatch.setattr(server.RequestHandlerClass, "do_HEAD", answer)
    release = threading.Timer(0.5, asked.set)
    release.start()
    Storage("s3://bucket").is_file("object")
    assert "storage root s3://bucket: a request has taken 0 s so far; still waiting" in caplog.text
    caplog.clear()
    monkeypatch.setattr(storage_errors, "SLOW_SECONDS", 30)
    Storage("s3://bucket").is_file("object")  # at once
    assert caplog.text == ""
