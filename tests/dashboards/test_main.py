"""What `lt2 dashboard` says before it serves."""

import pytest

from lt2_dashboards import __main__ as command


@pytest.fixture
def served(monkeypatch):
    """The roots that were served, without serving them."""
    roots = []
    monkeypatch.setattr(command, "serve", lambda root, *more, **options: roots.append(root))
    return roots


def test_a_mistyped_folder_is_said_and_served_for_it_may_come(served, tmp_path, capsys):
    missing = str(tmp_path / "mistyped")
    assert command.main(["--storage", missing]) == 0
    assert served == [missing]
    assert capsys.readouterr().err.startswith(f"dashboard: folder {missing} does not exist; choose another")
    assert command.main(["--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_missing_bucket_is_said(served, s3_root, capsys):
    assert command.main(["--storage", "s3://nobucket/x"]) == 0
    assert "(there is no bucket nobucket); create it" in capsys.readouterr().err


def test_an_empty_root_is_refused(served, capsys):
    assert command.main(["--storage", ""]) == 2
    assert served == []
    assert "the storage root is empty" in capsys.readouterr().err
