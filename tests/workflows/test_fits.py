"""What does not go with its inputs is told before anything runs, by `lt2 plan` and `lt2 run` alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.storage import Storage
from lt2_workflows.engine.executor import run
from lt2_workflows.graph import Workflow
from lt2_workflows.inputs import check_inputs
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import describe_plan
from tests.lt2.interop.test_pretrained import SIZES
from tests.platform.evaluate.tiny import MODEL, model, save

TRAIN = {"steps": 4, "global_batch_size": 2}
FULL = {"type": "uniform", "mixer": {"type": "full"}}
ASK = {"type": "harness", "tasks": ["mine"], "chat": True}


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "s"))


def made(tmp_path: Path, source: Any = "python-stdlib", tasks: Any = (ASK,), **pretrain: Any) -> Workflow:
    (tmp_path / "pack").mkdir(exist_ok=True)
    (tmp_path / "pack/manifest.json").write_text('{"schema_version": 1, "tasks": {"mine": {}}}')
    checkpoint = {"checkpoint": {"step": "pretrain"}, "data": {"step": "prepare"}, "pack": f"{tmp_path}/pack"}
    steps = {
        "prepare": {"type": "prepare", "source": source, "seq_len": 64},
        "pretrain": {"type": "pretrain", "data": {"step": "prepare"}, "model": MODEL, "train": TRAIN, **pretrain},
        "evaluate": {"type": "evaluate", **checkpoint, "tasks": list(tasks)},
    }
    return workflow_from_record({"workflow": "w", "steps": steps}, source="test")


def told(workflow: Workflow, storage: Storage) -> str:
    """What both the plan and the run say, which then has written nothing."""
    with pytest.raises(ConfigError) as planned:
        describe_plan(workflow, storage)
    with pytest.raises(ConfigError) as ran:
        run(workflow, storage)
    assert str(ran.value) == str(planned.value)
    assert not storage.exists("workflows")
    return str(ran.value)


def test_one_perplexity_does_not_hide_another_of_the_same_run(tmp_path: Path, storage: Storage):
    def both(**task: Any) -> Workflow:
        record = made(tmp_path, tasks=[{"type": "perplexity"}]).record()
        steps: Any = record["steps"]
        steps["prepare-long"] = steps["prepare"] | {"seq_len": 256}
        more = {"data": {"step": "prepare-long"}, "tasks": [{"type": "perplexity", **task}]}
        steps["evaluate-long"] = steps["evaluate"] | more
        return workflow_from_record(record, source="test")

    said = told(both(), storage)
    assert said.startswith("evaluate: tasks: step evaluate-long has a perplexity of the same run on other text")
    describe_plan(both(name="perplexity-long"), storage)
    apart = both().record()
    for name in ("evaluate", "evaluate-long"):  # of a path each step's results are its own
        apart["steps"][name]["checkpoint"] = str(tmp_path / "run")
    describe_plan(workflow_from_record(apart, source="test"), storage)


def test_spans_that_no_row_holds(tmp_path: Path, storage: Storage):
    fits, longer = ({"type": "positions", "length": length} for length in (64, 65))
    for tasks in ([fits], [{"type": "positions"}]):
        workflow = made(tmp_path, tasks=tasks)
        check_inputs(workflow, storage, workflow.steps.values())
    said = "length 65 is more than rows of the data hold, 64; prepare the documents once more with a larger seq_len"
    assert told(made(tmp_path, tasks=[fits, longer]), storage).startswith(f"evaluate: tasks.1.{said}")
    beside = {"evaluation": {"every": 2, "tasks": [longer]}}
    workflow = made(tmp_path, tasks=[fits], train=TRAIN | {"checkpoint_every": 2}, resources=beside)
    assert told(workflow, storage).startswith(f"pretrain: resources.evaluation.tasks.0.{said}")


def test_exit_thresholds_ask_for_an_exit_gate(tmp_path: Path, storage: Storage):
    def at(checkpoint: Any = None, **pretrain: Any) -> Workflow:
        record = made(tmp_path, tasks=[{"type": "perplexity"}], **pretrain).record()
        record["steps"]["evaluate"]["exit_thresholds"] = [0.5, 0.9]
        record["steps"]["evaluate"]["checkpoint"] = checkpoint or {"step": "pretrain"}
        return workflow_from_record(record, source="test")

    gate = {"halting": {"type": "exit_gate"}}
    refused = "exit threshold 0.5: only a model with halting.type 'exit_gate' has one"
    assert told(at(), storage) == f"evaluate: {refused}"
    assert told(at(save(tmp_path / "plain", model())), storage) == f"evaluate: {refused}"
    for fine in (at(model=MODEL | gate), at(save(tmp_path / "gate", model(**gate)))):
        assert "each at exit thresholds 0.5, 0.9" in describe_plan(fine, storage)
    while_training = {"evaluation": {"every": 2, "exit_thresholds": [0.5]}}
    train = TRAIN | {"checkpoint_every": 2}
    made(tmp_path, resources=while_training, train=train, model=MODEL | gate)
    with pytest.raises(ConfigError, match=refused):
        made(tmp_path, resources=while_training, train=train)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 100}, "pretrain: model.vocab_size 100 is smaller than the 259 tokens of tokenizer 'byte'"),
        ({"max_seq_len": 32}, "pretrain: model.max_seq_len 32 is shorter than the rows of 64 tokens"),
    ],
)
def test_a_model_that_does_not_go_with_the_data(tmp_path: Path, storage: Storage, fields: Any, message: str):
    assert told(made(tmp_path, tasks=[{"type": "perplexity"}], model=MODEL | fields), storage).startswith(message)


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        ({"n_layers": 4}, "pretrain: start: cannot start from this model: it has 4 layers, not 2"),
        ({"dim": 32}, "pretrain: start: cannot start from this model: rho is (2, 32) there and (2, 16) here"),
        ({"vocab_size": 300}, "pretrain: start: cannot start from this model: embed.weight is (300, 16) there"),
        ({"sandwich_norm": True}, "pretrain: start: cannot start from this model: it has blocks.0.ffn_post_norm."),
        (
            {"tie_embeddings": True},
            "pretrain: start: cannot start from this model: it has no head.weight; model.tie_embeddings is true there",
        ),
        ({"halting": {"type": "exit_gate"}}, None),
        ({"n_loops": 5, "loop_residual": False}, None),
        ({}, None),
    ],
)
def test_weights_to_start_from_that_do_not_go_with_the_model(
    tmp_path: Path, storage: Storage, begin: Any, message: Any
):
    workflow = made(tmp_path, tasks=[{"type": "perplexity"}], start=save(tmp_path / "run", model(**begin)))
    if message is None:
        check_inputs(workflow, storage, workflow.steps.values())
    else:
        assert told(workflow, storage).startswith(message)


def test_a_start_of_another_tokenizer_or_of_a_step_of_other_sizes(tmp_path: Path, storage: Storage):
    record = {"name": "other", "sha256": "0" * 64, "vocab_size": 259, "file": None}
    begun = save(tmp_path / "run", model(), tokenizer=record)
    said = told(made(tmp_path, tasks=[{"type": "perplexity"}], start=begun), storage)
    assert f"pretrain: start: the model {begun} was trained with tokenizer 'other', the data was prepared" in said
    record = made(tmp_path, tasks=[{"type": "perplexity"}]).record()
    longer = json.loads(json.dumps(record["steps"]["pretrain"]))
    record["steps"]["longer"] = longer | {"start": {"step": "pretrain"}, "model": MODEL | {"n_layers": 4}}
    workflow = workflow_from_record(record, source="test")
    assert told(workflow, storage) == "longer: start: cannot start from this model: it has 2 layers, not 4"


def tokenizer(folder: Path, text: str) -> str:
    """A byte-level tokenizer of 300 tokens."""
    made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_another_tokenizer_of_the_same_size(tmp_path: Path, storage: Storage):
    """It fits the model's sizes, so that only the step itself would refuse it, after the training before it."""
    text = "the loop reads the same weights again and again, as deep as it is asked to, and the state stays small "
    ours, other = tokenizer(tmp_path / "ours", text), tokenizer(tmp_path / "other", text[::-1])
    record: Any = made(tmp_path, tasks=[{"type": "perplexity"}]).record()
    steps = record["steps"]
    steps["prepare"]["tokenizer"] = ours
    steps["prepare-other"] = steps["prepare"] | {"tokenizer": other}

    steps["longer"] = steps["pretrain"] | {"data": {"step": "prepare-other"}, "start": {"step": "pretrain"}}
    said = told(workflow_from_record(record, source="test"), storage)
    assert said.startswith(
        "longer: start: the model pretrain was trained with tokenizer 'tokenizer.json', the data was"
    )
    del steps["longer"]

    steps["evaluate"]["data"] = {"step": "prepare-other"}
    said = told(workflow_from_record(record, source="test"), storage)
    assert said.startswith("evaluate: data: it is prepared with tokenizer 'tokenizer.json' (")
    steps["evaluate"]["tasks"] = [{"type": "harness", "tasks": ["mine"]}]  # which reads no data
    check_inputs(workflow := workflow_from_record(record, source="test"), storage, workflow.steps.values())

    frozen = load_tokenizer(other)
    for task in ({"name": "tokenizer.json", "sha256": frozen.sha256}, {"name": "b", "sha256": "0" * 64}):
        pack = {"schema_version": 1, "tasks": {"mine": {"tokenizer": task | {"vocabulary": frozen.vocabulary}}}}
        (tmp_path / "pack/manifest.json").write_text(json.dumps(pack))
        steps["prepare"]["tokenizer"] = ours
        said = told(workflow_from_record(record, source="test"), storage)
        assert said.startswith(
            f"evaluate: tasks.0: mine of pack {tmp_path}/pack was made for tokenizer '{task['name']}' ("
        )
        steps["prepare"]["tokenizer"] = other  # by its file, or at least by its vocabulary
        check_inputs(workflow := workflow_from_record(record, source="test"), storage, workflow.steps.values())


def test_an_imported_model_is_evaluated_on_data_of_its_own_tokenizer(tmp_path: Path, storage: Storage):
    ours, other = tokenizer(tmp_path / "ours", "ab " * 99), tokenizer(tmp_path / "other", "xy " * 99)
    LlamaConfig(**SIZES | {"vocab_size": 300}).save_pretrained(tmp_path / "ours")
    (tmp_path / "ours/model.safetensors").write_bytes(b"")
    record: Any = made(tmp_path, tasks=[{"type": "perplexity"}]).record()
    steps = record["steps"]
    del steps["pretrain"]
    steps["base"] = {"type": "import_model", "folder": str(tmp_path / "ours")}
    steps["evaluate"]["checkpoint"] = {"step": "base"}
    steps["prepare"]["tokenizer"] = ours
    check_inputs(workflow := workflow_from_record(record, source="test"), storage, workflow.steps.values())
    steps["prepare"]["tokenizer"] = other
    said = told(workflow_from_record(record, source="test"), storage)
    assert said.startswith("evaluate: data: it is prepared with tokenizer 'tokenizer.json' (")
    assert "the model of step base is trained with" in said


def test_a_chat_of_a_model_without_conversations(tmp_path: Path, storage: Storage):
    (tmp_path / "a.jsonl").write_text("")
    chats = [
        {"type": "openthoughts", "path": f"{tmp_path}/a.jsonl", "format": "jsonl", "template": template}
        for template in ("chatml", "plain")
    ]
    both = {"type": "mixture", "sources": [{"weight": 1, "source": chat} for chat in chats]}
    said = "evaluate: tasks.0.chat is true, and the model of step pretrain is "
    assert told(made(tmp_path), storage).startswith(said + "not trained on conversations; name a template")
    assert told(made(tmp_path, both), storage).startswith(said + "trained on several templates (chatml, plain)")
    named = made(tmp_path, tasks=[ASK | {"chat": "plain"}])
    for workflow in (named, made(tmp_path, chats[0])):
        check_inputs(workflow, storage, workflow.steps.values())


def test_what_is_asked_while_training_needs_a_template_too(tmp_path: Path, storage: Storage):
    tasks = [{"type": "perplexity"}, ASK | {"pack": f"{tmp_path}/pack"}]
    record = made(
        tmp_path,
        tasks=tasks[:1],
        train=TRAIN | {"checkpoint_every": 2},
        resources={"evaluation": {"every": 2, "tasks": tasks}},
    ).record()
    said = "resources.evaluation.tasks.1.chat is true, and the model is not trained on conversations; name a template"
    assert told(workflow_from_record(record, source="test"), storage).startswith(f"pretrain: {said}")
    trained, teacher = record["steps"].pop("pretrain"), save(tmp_path / "run", model())
    objective = {"train": trained["train"] | {"objective": {"type": "distill"}}, "teacher": teacher}
    shared = {key: trained[key] for key in ("data", "resources")}
    record["steps"]["student"] = {"type": "distill", **shared, **objective}
    record["steps"]["evaluate"]["checkpoint"] = {"step": "student"}
    assert told(workflow_from_record(record, source="test"), storage).startswith(f"student: {said}")
    shared["resources"]["evaluation"]["every"] = 3
    with pytest.raises(ConfigError, match="evaluation.every 3 is not a multiple of train.checkpoint_every 2"):
        workflow_from_record(record, source="test")


def test_a_student_that_cannot_be_made_of_its_teacher(tmp_path: Path, storage: Storage):
    """Before the teacher is trained: it takes most of the time."""

    def stages(layout: Any = FULL, **student: Any) -> Workflow:
        record = made(tmp_path, tasks=[{"type": "perplexity"}], model=MODEL | {"layout": layout}).record()
        train = TRAIN | {"objective": {"type": "distill"}}
        of = {"type": "distill", "data": {"step": "prepare"}, "teacher": {"step": "pretrain"}, "train": train}
        record["steps"]["student"] = of | student
        return workflow_from_record(record, source="test")

    for workflow, message in (
        (stages(kept=[2]), "student: kept layers [2]: give different ones of 0 to 1"),
        (stages(mixer={"type": "window"}), "mixer 'window' runs on the same weights as the teacher's"),
        (stages(MODEL["layout"]), "the teacher has layout 'hybrid'; distil from one with the same attention"),
    ):
        assert told(workflow, storage).startswith(f"student: {message}")
    fine = stages(kept=[1])
    check_inputs(fine, storage, fine.steps.values())
