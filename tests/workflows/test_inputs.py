"""A finished step whose output is gone is named before what needs it starts, with the folder to remove."""

import re

import pytest

from lt2.config import ConfigError
from lt2_platform.remake import remaking
from lt2_platform.storage import Storage
from lt2_workflows.commands import jobs
from lt2_workflows.engine.executor import run
from lt2_workflows.inputs import check_inputs, problems
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import describe_plan

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
    assert "is gone" not in str(problems(workflow, storage, [workflow.steps[gone], workflow.steps["distill"]]))


def test_other_folders_and_stores_get_their_own_advice(tmp_path, s3_root):
    assert remaking(str(tmp_path / "steps" / "mine"), "otherwise") == "otherwise"
    step = Storage(f"{s3_root}/steps/prepare-12345678")
    step.write_json("done.json", {})
    assert f"(aws s3 rm --recursive {step.root})" in remaking(step.join("out"), "otherwise")
    step.write_json("spec.json", {"config": {"type": "prepare"}})
    assert "rm --recursive" in remaking(step.root, "otherwise", made_by=("prepare", "mine"))
    assert remaking(step.root, "otherwise", made_by=("pretrain",)) == "otherwise"  # a dataset is no lost run


def mistaken(folder, place="{}/no"):
    """A workflow of which every step but the first names something that is not there; and how each is named."""
    no = place.format(folder)
    harness = {"type": "harness", "tasks": ["piqa", "mine"]}
    train = {"steps": 4, "global_batch_size": 2}
    model = {"vocab_size": 300, "dim": 16, "n_layers": 1, "n_loops": 1, "num_heads": 2, "layout": {"type": "uniform"}}
    model["layout"]["mixer"] = {"type": "full"}
    steps = {
        "fine": {"type": "prepare", "source": "python-stdlib"},
        "text": {"type": "prepare", "source": [f"{no}/books", f"{no}/*.txt"], "tokenizer": f"{no}.json"},
        "web": {"type": "prepare", "source": {"type": "dclm", "path": f"{no}/dclm"}},
        "train": {"type": "pretrain", "data": {"step": "fine"}, "start": f"{no}/run", "model": model, "train": train},
        "topk": {"type": "teacher_topk", "data": f"{no}/data", "teacher": f"{no}/run"},
        "student": {
            "type": "distill", "data": f"{no}/data", "teacher": f"{no}/run", "topk": f"{no}/topk",
            "train": {**train, "objective": {"type": "distill"}},
        },
        "score": {
            "type": "evaluate", "checkpoint": {"step": "train"}, "data": {"step": "fine"},
            "tasks": [{**harness, "pack": f"{no}/pack"}, harness],
        },
    }  # fmt: skip
    return workflow_from_record({"workflow": "w", "steps": steps}, source="test")


def test_every_missing_input_of_every_step_is_named_at_once(tmp_path):
    storage, no = Storage(str(tmp_path / "s")), f"{tmp_path}/no"
    workflow = mistaken(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run(workflow, storage)
    assert not storage.exists("workflows")
    lines = [re.split("; ", line)[0] for line in str(refused.value).splitlines()]
    assert sorted(lines) == sorted(
        [
            f"text.tokenizer: tokenizer file {no}.json does not exist",
            f"text.source: source {no}/books does not exist",
            f"text.source: source {no}/*.txt matches no file",
            f"web.source: source {no}/dclm does not exist",
            f"topk.teacher, student.teacher, train.start: {no}/run: no complete checkpoint in it or in "
            f"{no}/run/checkpoints",
            f"topk.data, student.data: {no}/data is not a finished dataset (no manifest.json)",
            f"student.topk: {no}/topk holds no finished top-k (no topk.json)",
            f"score.tasks.0.pack: {no}/pack is not an evaluation pack (no manifest.json)",
            "score.pack: no pack is given for piqa, mine",
        ]
    )
    assert problems(workflow, storage, [workflow.steps["fine"]]) == []  # what is done needs nothing any more


@pytest.mark.parametrize("trains", ["train", "student"])
def test_packs_of_what_is_evaluated_while_training_are_looked_for(tmp_path, trains):
    record = mistaken(tmp_path).record()
    tasks = [{"type": "perplexity"}, {"type": "harness", "tasks": ["piqa"], "pack": f"{tmp_path}/no"}]
    record["steps"][trains]["resources"]["evaluation"] = {"every": 2, "tasks": [*tasks, tasks[1] | {"pack": ""}]}
    record["steps"][trains]["train"]["checkpoint_every"] = 2
    workflow = workflow_from_record(record, source="test")
    found = problems(workflow, Storage(str(tmp_path / "s")), [workflow.steps[trains]])
    field = f"{trains}.resources.evaluation.tasks"
    assert f"{field}.2.pack: no pack is given for piqa; set one (`lt2 pack build`)" in found
    missing = f"{tmp_path}/no is not an evaluation pack (no manifest.json); build it with `lt2 pack build`"
    assert f"{field}.1.pack: {missing}" in found


def test_a_plan_tells_what_is_missing_and_the_rest_all_the_same(tmp_path):
    text = describe_plan(mistaken(tmp_path), Storage(str(tmp_path / "s")))
    plan, _, missing = text.partition("\nNOT FOUND from here")
    assert "4 steps" in plan
    assert f"not known: {tmp_path}/no/data is not a finished dataset" in plan
    assert len(missing.strip().splitlines()) == 1 + 9
    assert f"\n  web.source: source {tmp_path}/no/dclm does not exist; give a file" in missing


def test_the_plan_of_what_is_done_needs_no_inputs(tmp_path):
    storage, steps = Storage(str(tmp_path / "s")), mistaken(tmp_path).record()["steps"]
    workflow = workflow_from_record({"workflow": "w", "steps": {"student": steps["student"]}}, source="test")
    (step,) = workflow.steps.values()
    storage.write_json(f"{step.folder}/done.json", {"attempt": 1, "ended": 0, "result": {}, "provenance": {}})
    said = [line.strip() for line in describe_plan(workflow, storage).splitlines()]
    assert said[1] == f"student  skip (done)  [{step.id}]"
    assert said[2].startswith(f"not known: {tmp_path}/no/data is not a finished dataset")
    assert len(said) == 3


def test_a_steps_name_where_a_reference_belongs_is_told(tmp_path):
    steps = {
        "prepare": {"type": "prepare", "source": "python-stdlib"},
        "score": {"type": "evaluate", "checkpoint": f"{tmp_path}/no", "data": "prepare"},
    }
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    run, data = sorted(problems(workflow, Storage(str(tmp_path / "s")), list(workflow.steps.values())))
    assert data.startswith("score.data: prepare is not a finished dataset")
    assert data.endswith("; to read the step of that name, refer to it: {step: prepare}")
    assert "refer to it" not in run


def test_what_is_there_is_fine(tmp_path):
    workflow = mistaken(tmp_path)
    for place, text in {
        "books/a.txt": "text", "b.txt": "text", "dclm/c.jsonl.zst": "", "run/checkpoints/step-00000001/COMPLETE": "",
        "data/manifest.json": '{"schema_version": 1}', "topk/topk.json": "{}",
        "pack/manifest.json": '{"schema_version": 1, "tasks": {"piqa": {}}}',
    }.items():  # fmt: skip
        (tmp_path / "no" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "no" / place).write_text(text)
    lines = problems(workflow, Storage(str(tmp_path / "s")), workflow.steps.values())
    assert [line.partition(";")[0] for line in lines] == [
        f"text.tokenizer: tokenizer file {tmp_path}/no.json does not exist",
        f"score.tasks.0.pack: pack {tmp_path}/no/pack has no mine",
        "score.pack: no pack is given for piqa, mine",
    ]


def test_on_another_machine_a_relative_path_means_something_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_text("text")
    for source, said in (("books", "books is relative, and a job has"), (f"{tmp_path}/books", None)):
        steps = {"prepare": {"type": "prepare", "source": source}}
        workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
        storage = Storage(str(tmp_path / "s"))
        assert problems(workflow, storage, workflow.steps.values()) == []
        lines = problems(workflow, storage, workflow.steps.values(), elsewhere=True)
        assert [line.partition(": ")[2][: len(said or "")] for line in lines] == ([said] if said else [])


def test_inputs_on_s3(tmp_path, s3_root, monkeypatch):
    workflow = mistaken(s3_root, "{}/yes")
    lines = problems(workflow, Storage(f"{s3_root}/s"), workflow.steps.values())
    assert len(lines) == 9
    place = Storage(f"{s3_root}/yes")
    for name in ("books/a.txt", "b.txt", "dclm/c.jsonl.zst", "run/checkpoints/step-00000001/COMPLETE"):
        place.write_bytes(name, b"x")
    left = [line.partition(":")[0] for line in problems(workflow, Storage(f"{s3_root}/s"), workflow.steps.values())]
    assert left == ["text.tokenizer", "topk.data, student.data", "student.topk", "score.tasks.0.pack", "score.pack"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    (line,) = problems(workflow, Storage(str(tmp_path / "s")), [workflow.steps["web"]])
    assert line.startswith(f"web.source: {s3_root}/yes/dclm cannot be read (")
    assert line.endswith("check AWS_ENDPOINT_URL and that its server answers, or give another path")


def test_trials_of_a_sweep_are_looked_at_too(tmp_path):
    steps = {"prepare": {"type": "prepare", "source": f"{tmp_path}/no"}}
    sweep = {"type": "sweep", "steps": steps, "grid": {"prepare.seq_len": [64, 128]}}
    workflow = workflow_from_record({"workflow": "w", "steps": {"sweep": sweep}}, source="test")
    storage = Storage(str(tmp_path / "s"))
    (line,) = problems(workflow, storage, workflow.steps.values())
    assert line.startswith(f"sweep.prepare.source: source {tmp_path}/no does not exist")
    for trial in workflow.configs["sweep"].expanded:
        finish(storage, trial.workflow, "prepare")
    assert problems(workflow, storage, workflow.steps.values()) == []


def test_a_submitted_job_is_warned_of_what_is_not_here(tmp_path, capsys):
    jobs._warn_of_inputs(mistaken(tmp_path), str(tmp_path / "s"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9
    assert all(line.startswith("lt2: not found from here, but the job needs it: ") for line in lines)
    (tmp_path / "file").touch()
    jobs._warn_of_inputs(mistaken(tmp_path), str(tmp_path / "file"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lt2: the inputs of steps were not checked: storage root")
