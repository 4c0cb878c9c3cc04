"""A finished step whose output is gone is named before what needs it starts, with the folder to remove."""

import pytest

from lt2.config import ConfigError
from lt2_platform.remake import remaking
from lt2_platform.storage import Storage
from lt2_workflows.executor import run
from lt2_workflows.inputs import check_inputs
from lt2_workflows.loading import workflow_from_record

WRITTEN = {"prepare": "manifest.json", "teacher": "checkpoints/step-00000004/COMPLETE", "topk": "topk.json"}


@pytest.fixture
def workflow():
    train = {"steps": 4, "global_batch_size": 2, "objective": {"type": "distill"}}
    data, teacher = {"data": {"step": "prepare"}}, {"teacher": {"step": "teacher"}}
    steps = {
        "prepare": {"type": "prepare", "source": "text"},
        "teacher": {"type": "import_ouro", "folder": "ouro"},
        "topk": {"type": "teacher_topk", **data, **teacher},
        "distill": {"type": "distill", "train": train, "topk": {"step": "topk"}, **data, **teacher},
    }
    return workflow_from_record({"workflow": "w", "steps": steps}, source="test")


def finish(storage, workflow, name):
    folder = workflow.steps[name].folder
    storage.write_json(f"{folder}/done.json", {"attempt": 1, "ended": 0, "result": {}, "provenance": {}})
    storage.write_json(f"{folder}/out/{WRITTEN[name]}", {})


@pytest.mark.parametrize("gone", WRITTEN)
def test_what_is_gone_is_named_before_anything_starts(tmp_path, workflow, gone):
    storage = Storage(str(tmp_path / "s"))
    for name in WRITTEN:
        finish(storage, workflow, name)
    check_inputs(workflow, storage, [workflow.steps["distill"]])
    folder = workflow.steps[gone].folder
    storage.delete(f"{folder}/out/{WRITTEN[gone]}")
    for only in (None, "distill"):
        with pytest.raises(ConfigError, match=rf"step {gone} is done, but its .* is gone .*\(rm -r \S+/{folder}\)"):
            run(workflow, storage, only=only)
    assert not storage.exists("workflows")
    check_inputs(workflow, storage, [])  # nobody needs it any more
    storage.delete(folder)  # as advised: the step will run again
    check_inputs(workflow, storage, [workflow.steps["distill"]])


def test_other_folders_and_stores_get_their_own_advice(tmp_path, s3_root):
    assert remaking(str(tmp_path / "steps" / "mine"), "otherwise") == "otherwise"
    step = Storage(f"{s3_root}/steps/prepare-12345678")
    step.write_json("done.json", {})
    assert f"(aws s3 rm --recursive {step.root})" in remaking(step.join("out"), "otherwise")
