"""A damaged record is named, with what to do, and hides nothing but itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.engine.record_files import UnreadableRecordError
from lt2_workflows.engine.records import list_workflows
from tests.workflows.test_cli import CHAIN, assert_one_line, lt2

ONCE = "delete it and run its recipe again, which rewrites it"
DAMAGES = {
    "steps/second-*/done.json": "delete it to run the step again",
    "steps/second-*/attempts/1/state.json": "delete it: only that attempt's own record is lost",
    "steps/second-*/attempts/1/lease.json": "delete it once no process runs this step",
    "steps/second-*/spec.json": ONCE,
    "workflows/chain-*/dag.json": ONCE,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("finished") / "s"
    for lines in (1, 2):  # two workflows
        assert lt2("run", CHAIN, "--set", f"first.lines={lines}", "--storage", str(root)).returncode == 0
    return root


@pytest.fixture
def root(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "s"))


def damage(root: Path, pattern: str, content: str) -> Path:
    """Write `content` over the first file that matches; a step with a lease or a state at fault must not be done."""
    path = sorted(root.glob(pattern))[0]
    path.write_text(content)
    if "attempts" in pattern:
        (path.parents[2] / "done.json").unlink()
    return path


@pytest.mark.parametrize(
    ("content", "why"), [("", "it is empty"), ("{", "it is not JSON"), ("{}", "missing or damaged")]
)
@pytest.mark.parametrize("pattern", DAMAGES)
def test_it_is_named_and_all_else_is_listed(root, pattern, content, why):
    path = damage(root, pattern, content)
    found = list_workflows(Storage(str(root)))
    assert len(found) == 2
    errors = [
        each["error"] for each in [*found, *(step for item in found for step in item["steps"])] if each.get("error")
    ]
    assert len(errors) == 1
    assert errors[0].startswith(f"{path} is not readable (")
    assert why in errors[0]
    assert errors[0].endswith(DAMAGES[pattern])
    states = [step["state"] for item in found for step in item["steps"]]
    assert sorted(states) == ["done"] * (3 if "dag" in pattern else 5) + ["unreadable"] * ("dag" not in pattern)


@pytest.mark.parametrize("pattern", ["steps/second-*/done.json", "workflows/chain-*/dag.json"])
def test_status_shows_one_row_and_goes_on(root, pattern):
    path = damage(root, pattern, "")
    shown = lt2("status", "--storage", str(root))
    assert shown.returncode == 0, shown.stderr
    (row,) = [line for line in shown.stdout.splitlines() if "unreadable" in line]
    assert str(path) in row
    assert shown.stdout.count(" done ") == (3 if "dag" in pattern else 5)
    assert len(json.loads(lt2("status", "--json", "--storage", str(root)).stdout)) == 2


def test_a_workflow_asked_for_by_itself_is_an_error(root):
    path = damage(root, "workflows/chain-*/dag.json", "")
    storage = Storage(str(root))
    for name in (path.parent.name, "chain"):
        with pytest.raises(UnreadableRecordError, match="is not readable"):
            list_workflows(storage, name)
    other = next(each for each in root.glob("workflows/*") if each != path.parent)
    assert len(list_workflows(storage, other.name)) == 1


def test_running_names_it_and_goes_on_once_it_is_deleted(root):
    path = damage(root, "steps/second-*/done.json", "")
    recipes = [["--set", f"first.lines={lines}"] for lines in (1, 2)]
    done = [lt2("run", CHAIN, *settings, "--storage", str(root)) for settings in recipes]
    settings = recipes[[each.returncode for each in done].index(2)]
    for command in (["run", CHAIN], ["step", CHAIN, "third"], ["plan", CHAIN]):
        assert_one_line(
            lt2(*command, *settings, "--storage", str(root)), f"lt2: {path} is not readable (it is empty); "
        )
    path.unlink()
    assert lt2("run", CHAIN, *settings, "--storage", str(root)).returncode == 0


def test_a_report_says_which_step_is_unreadable(root):
    path = damage(root, "steps/second-*/done.json", "")
    name = next(item["id"] for item in list_workflows(Storage(str(root))) if "unreadable" in str(item["steps"]))
    assert lt2("report", name, "--storage", str(root)).returncode == 0
    text = (root / f"workflows/{name}/report/report.md").read_text()
    assert f"second: {path} is not readable (it is empty); delete it to run the step again" in text


def test_a_step_whose_done_record_was_removed_waits_and_can_be_reported(root):
    sorted(root.glob("steps/second-*/done.json"))[0].unlink()
    sorted(root.glob("steps/third-*/spec.json"))[0].unlink()
    for item in list_workflows(Storage(str(root))):
        assert lt2("report", item["id"], "--storage", str(root)).returncode == 0
    states = [step["state"] for item in list_workflows(Storage(str(root))) for step in item["steps"]]
    assert sorted(states) == ["done"] * 5 + ["waiting"]
