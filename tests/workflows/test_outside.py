"""What a finished step read from outside its workflow and is other now is told when the step is skipped."""

import json
import threading
from dataclasses import replace

import pyarrow as pa
import pytest

from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
from lt2_workflows.console import describe
from lt2_workflows.engine import executor
from lt2_workflows.engine.attempt import _work
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.executor import Driver
from lt2_workflows.engine.records import Events
from lt2_workflows.graph import STEP_TYPES, Workflow
from lt2_workflows.loading import load_workflow, workflow_from_record
from lt2_workflows.outside import changes, note
from lt2_workflows.plan import describe_plan
from lt2_workflows.provenance import provenance

ADVICE = ". Its result and what was made from it are used as they are; to start afresh, rename what has changed or use "

MIXER = """
from typing import ClassVar, Literal

from lt2.config import MixerConfig


class EditedConfig(MixerConfig):
    weights: ClassVar[str] = "edited"
    type: Literal["edited"] = "edited"
"""


@pytest.fixture
def place(tmp_path):
    """A pack, a run, a dataset and a model's folder, as far as steps look at them beforehand."""
    build(tmp_path, "mine", "other")
    run, data = Storage(str(tmp_path / "run")), Storage(str(tmp_path / "data"))
    run.write_bytes("checkpoints/step-00000004/COMPLETE", b"four")
    data.write_json("manifest.json", {"schema_version": 1, "fingerprint": "f"})
    (tmp_path / "ouro").mkdir()
    (tmp_path / "ouro/config.json").write_text("{}")
    (tmp_path / "ouro/model.safetensors").write_bytes(b"weights")
    return tmp_path


def build(folder, *tasks, query="q"):
    rows = {"test": pa.Table.from_pylist([{"query": query, "choices": ["a", "b"], "gold": 0}])}
    packs.add(str(folder / "pack"), dict.fromkeys(tasks, rows), dict.fromkeys(tasks, "here"))


def context_of(folder, name="score"):
    train = {"steps": 4, "global_batch_size": 2, "checkpoint_every": 2, "objective": {"type": "distill"}}
    asked = {"type": "harness", "tasks": ["mine"], "pack": f"{folder}/pack"}
    outside = {"data": f"{folder}/data", "teacher": f"{folder}/run"}
    steps = {
        "score": {
            "type": "evaluate", "checkpoint": f"{folder}/run", "data": f"{folder}/data",
            "tasks": [{**asked, "tasks": ["other"]}, {**asked, "pack": ""}], "pack": f"{folder}/pack",
        },
        "teacher": {"type": "import_ouro", "folder": f"{folder}/ouro"},
        "student": {
            "type": "distill", **outside, "train": train, "resources": {"evaluation": {"every": 2, "tasks": [asked]}},
        },
    }  # fmt: skip
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    return StepContext(Storage(str(folder / "s")), workflow, workflow.steps[name], lambda values: None)


def test_each_thing_that_was_read_and_is_other_now_is_named(place):
    noted = {name: json.loads(json.dumps(note(context_of(place, name)))) for name in ("score", "teacher", "student")}

    def told(name):
        return changes(context_of(place, name), noted[name]).removeprefix("ITS INPUT HAS CHANGED since: ")

    assert noted["score"].keys() == {f"{place}/run", f"{place}/data", f"{place}/pack"}
    assert [told(name) for name in noted] == [""] * 3
    build(place, "more")  # added to the pack: nobody asked it
    build(place, "mine")  # the same again
    assert told("score") == ""
    build(place, "mine", query="another")
    assert told("score").startswith(f"mine in {place}/pack has other content{ADVICE}")
    assert told("student") == ""  # what is evaluated while training makes no other model
    (place / "run/checkpoints/step-00000008").mkdir()
    assert "run" not in told("score")  # not complete
    (place / "run/checkpoints/step-00000008/COMPLETE").write_text("eight")
    assert told("student").startswith(f"the checkpoint in {place}/run has other content{ADVICE}")
    assert told("score").startswith(f"the checkpoint in {place}/run has other content and 1 more{ADVICE}")
    (place / "ouro/model.safetensors").write_bytes(b"weighty")
    assert told("teacher").startswith(f"model.safetensors in {place}/ouro has other content{ADVICE}")
    (place / "ouro/model.safetensors").rename(place / "ouro/model-1.safetensors")
    assert told("teacher").startswith(f"model.safetensors in {place}/ouro is gone{ADVICE}")
    for each in ("run", "pack", "ouro"):
        (place / each).rename(place / f"{each}-elsewhere")
    assert [told(name) for name in noted] == [""] * 3  # out of reach: what is finished does not need it
    assert changes(context_of(place), {}) == ""  # of a record from before


def test_a_mixer_of_ones_own_that_was_edited_is_told(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text(MIXER)
    settings = [f"pretrain.model.layout.mixer.{each}" for each in ("type=edited", f"source={file}")]
    workflow = load_workflow("quickstart", settings)
    context = StepContext(Storage(str(tmp_path / "s")), workflow, workflow.steps["pretrain"])
    noted = note(context)
    assert changes(context, noted) == ""
    file.write_text(MIXER + "# other mathematics")
    assert f"since: the code in {file} has other content{ADVICE}" in changes(context, noted)
    file.unlink()  # a job's files are gone with it
    assert changes(context, noted) == ""


def test_a_dataset_made_anew_at_its_place_is_told(place):
    noted = note(context_of(place))
    Storage(str(place / "data")).write_json("manifest.json", {"schema_version": 1, "fingerprint": "g"})
    assert f"since: the dataset in {place}/data has other content. " in changes(context_of(place), noted)


def test_a_steps_record_notes_what_it_read_and_the_driver_tells_what_changed(place, monkeypatch):
    context, said = context_of(place), []

    def run(config, context):
        build(place, "mine", query="while it runs")
        return {}

    monkeypatch.setitem(STEP_TYPES, "evaluate", replace(STEP_TYPES["evaluate"], run=run))
    made, workflow = _work(context)[2], Workflow("w", {"score": context.step.config})
    events = Events(context.storage, workflow.id)
    driver = Driver(context.storage, workflow, events, said.append, 3.0, True, {}, {}, stopping=threading.Event())
    executor._finished(driver, context.step, {"attempt": 1, "provenance": provenance(), **made}, ran=False)
    assert "ITS INPUT HAS CHANGED since: mine in" in str(describe(said[0]))
    done = {"attempt": 1, "ended": 0, "provenance": {}, **made}
    context.storage.write_json(f"{context.step.folder}/done.json", done)
    assert "  ITS INPUT HAS CHANGED since: mine in" in describe_plan(workflow, context.storage)
