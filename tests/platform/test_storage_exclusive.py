"""Of any number of callers that create a file at once, exactly one does, on a local folder and on S3 (moto)."""

import multiprocessing
import os

import pytest
from botocore.exceptions import ClientError
from s3fs import S3FileSystem

from lt2_platform import s3_keys
from lt2_platform.storage import Storage


def test_create_exclusive_keeps_the_first(storage):
    assert storage.create_exclusive("lock/done.json", b"first") is True
    assert storage.create_exclusive("lock/done.json", b"second") is False
    assert storage.read_bytes("lock/done.json") == b"first"
    assert storage.list("lock") == ["done.json"]


def _race(root, start, winners, name):
    storage = Storage(root)
    storage.exists()  # connect before the gun
    start.wait()
    for index in range(10):
        if storage.create_exclusive(f"race/{index}", name.encode()):
            winners.put((index, name))


def test_create_exclusive_has_one_winner_among_processes(root):
    context = multiprocessing.get_context("spawn")
    start, winners = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_race, args=(root, start, winners, f"p{i}")) for i in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    won = dict(winners.get(timeout=5) for _ in range(10))
    assert winners.empty()
    storage = Storage(root)
    assert {index: storage.read_bytes(f"race/{index}").decode() for index in range(10)} == won


def test_create_exclusive_knows_its_own_object_when_an_answer_was_lost(s3_root, monkeypatch):
    ask = S3FileSystem.call_s3

    def sent_twice(files, method, **options):
        if method == "put_object":
            ask(files, method, **options)
        return ask(files, method, **options)

    monkeypatch.setattr(S3FileSystem, "call_s3", sent_twice)
    storage = Storage(s3_root)
    assert storage.create_exclusive("done.json", b"mine") is True
    assert storage.create_exclusive("done.json", b"mine") is False
    assert storage.read_bytes("done.json") == b"mine"


def test_create_exclusive_tries_again_where_s3_took_neither_of_two_writes(s3_root, monkeypatch):
    """409 ConditionalRequestConflict: nothing is there, so nobody has won yet."""
    ask, conflicts = S3FileSystem.call_s3, [1, 1]

    def conflicting(files, method, **options):
        if method == "put_object" and conflicts:
            conflicts.pop()
            answer = {"Error": {"Code": "Conflict"}, "ResponseMetadata": {"HTTPStatusCode": 409}}
            raise OSError("conflict") from ClientError(answer, "PutObject")
        return ask(files, method, **options)

    monkeypatch.setattr(S3FileSystem, "call_s3", conflicting)
    monkeypatch.setattr(s3_keys, "CONFLICT_PAUSES", (0.0, 0.0))
    storage = Storage(s3_root)
    assert storage.create_exclusive("done.json", b"mine") is True
    conflicts += [1]
    assert storage.create_exclusive("done.json", b"theirs") is False
    conflicts += [1, 1, 1]
    with pytest.raises(OSError, match="conflict"):
        storage.create_exclusive("other.json", b"mine")
    assert storage.read_bytes("done.json") == b"mine"


def test_create_exclusive_knows_its_own_link_when_an_answer_was_lost(tmp_path, monkeypatch):
    link = os.link

    def sent_twice(*paths):
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", sent_twice)
    storage = Storage(str(tmp_path))
    assert storage.create_exclusive("done.json", b"mine") is True
    assert storage.create_exclusive("done.json", b"theirs") is False
    assert os.listdir(tmp_path) == ["done.json"]
