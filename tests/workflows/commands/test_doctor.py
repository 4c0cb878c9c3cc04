"""`lt2 doctor` as a user types it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.doctor.finding import Finding
from lt2_workflows.cli import app
from lt2_workflows.commands import doctor


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_this_machine_with_a_ray_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root = tmp_path / "root"
    result = invoke("--storage", str(root), "--mixers", "window", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, found
    assert {finding["state"] for finding in found} <= {"ok", "note"}
    assert [finding["part"] for finding in found if finding["name"] == "window"] == ["kernels"]
    *_, node = found
    assert node["part"] == "ray"
    assert node["said"].endswith(f"sees {root}")
    assert not root.exists()


def test_a_problem_is_exit_code_1(monkeypatch):
    found = [Finding("machine", "cores", "ok", "2"), Finding("storage", "access", "PROBLEM", "no")]
    monkeypatch.setattr(doctor, "look", lambda *args, **kwargs: iter(found))
    result = invoke()
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "1 problem"
    assert "  PROBLEM  access" in result.stdout


def test_a_mistyped_mixer():
    error = invoke("--mixers", "gdn,windw").exception
    assert isinstance(error, ConfigError)
    assert "windw" in str(error)
