"""Stores that keep what LT2 builds on, and stores that do not."""

import errno
import os

import pytest

from lt2_platform.doctor.store import one_winner, sees_writes, store
from lt2_platform.storage import Storage


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path):
    return str(tmp_path / "root") if request.param == "local" else request.getfixturevalue("s3_root")


def test_a_good_store(root):
    storage = Storage(root)
    found = {finding.name: finding for finding in store(storage)}
    assert list(found) == ["small files", "consistency", "exclusive creation", "large files"]
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert storage.list() == []


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    (found,) = store(Storage(str(tmp_path / "file" / "root")))
    assert found.state == "PROBLEM"
    assert "a part of the path is a file" in found.said


def test_a_full_disk_is_told_and_left_as_it_was(tmp_path, monkeypatch):
    class Full(Storage):
        def write_bytes(self, path: str, data: bytes) -> None:
            if len(data) > 10**6:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write_bytes(path, data)

    *_, last = store(Full(str(tmp_path)))
    assert last.state == "PROBLEM"
    assert "No space left on device" in last.said
    assert list(tmp_path.iterdir()) == []


class WithoutConditions(Storage):
    """A server that ignores If-None-Match."""

    def create_exclusive(self, path: str, data: bytes) -> bool:
        self.write_bytes(path, data)
        return True


def test_a_store_where_everybody_wins(tmp_path):
    found = one_winner(WithoutConditions(str(tmp_path)), "folder")
    assert found.state == "PROBLEM"
    assert "8 of 8 writers" in found.said
    assert "If-None-Match" in found.said


class Stale(Storage):
    """A cache between us and the files: listings are old, deleted files stay."""

    def list(self, path: str = "") -> list[str]:
        return []

    def delete(self, path: str) -> None:
        if not path.endswith("/seen"):
            super().delete(path)


def test_a_store_that_shows_old_files(tmp_path):
    found = sees_writes(Stale(str(tmp_path)), "folder")
    assert found.state == "PROBLEM"
    assert "is not listed" in found.said
    assert "still there" in found.said
    assert os.path.exists(tmp_path / "folder" / "seen")
