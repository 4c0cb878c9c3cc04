"""What is recorded of the code that ran: its own checkout, and no other."""

import subprocess
from pathlib import Path

import pytest

from lt2_workflows import provenance


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of somebody's, with our package in it."""
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "package/provenance.py"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package/provenance.py").write_text("")
    (tmp_path / "notes.txt").write_text("caf")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "notes.txt")
    git(tmp_path, "commit", "-qm", "notes")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_wheel_installed_inside_a_repository_has_no_git(repository):
    assert provenance._checkout() == {"git": None, "dirty": None}


def test_changes_in_any_encoding_count(repository):
    git(repository, "add", "package")
    git(repository, "commit", "-qm", "package")
    clean = provenance._checkout()
    assert clean == {"git": git(repository, "rev-parse", "HEAD").strip(), "dirty": None}
    (repository / "notes.txt").write_bytes(b"caf\xe9")
    assert provenance._checkout()["dirty"]


def test_what_is_installed_of_the_packages_that_compute_is_recorded(monkeypatch):
    monkeypatch.setattr(provenance, "version_of", {"lm-eval": "1", "flash-attn": "2", "fla-core": "3"}.get)
    assert provenance.provenance.__wrapped__()["packages"] == {"lm-eval": "1", "flash-attn": "2", "fla-core": "3"}
