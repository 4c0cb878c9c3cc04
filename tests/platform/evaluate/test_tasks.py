"""Tasks through the evaluate step: shipped ones, a user's own from a file, and tables over depth."""

import json
import math
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lt2.analysis.accounting import forward_flops
from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.checkpoints import Evaluated, evaluate_checkpoint
from lt2_platform.evaluate.config import DiagnosticsConfig, PerplexityConfig, TaskConfig, ThroughputConfig
from lt2_platform.evaluate.tasks import TaskContext, checked, depth_table, depths, named, proportion, run_tasks
from lt2_platform.evaluate.validation import check_tokens, perplexity
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.checkpoint import load_model
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.steps.evaluate import EvaluateStep, run_evaluate
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import write_dataset

OWN_TASK = """
    from typing import ClassVar, Literal
    import torch
    from lt2_platform.evaluate.config import TaskConfig
    from lt2_platform.evaluate.tasks import proportion

    class CopyConfig(TaskConfig):
        '''Does the model repeat the last byte of its prompt?'''
        module: ClassVar[str] = "copying"
        type: Literal["copying"] = "copying"
        prompts: tuple[str, ...] = ("aaa", "bbb")

    def copying(config, model, context):
        hits = 0
        for prompt in config.prompts:
            ids = torch.tensor(context.tokenizer.encode_batch([prompt])[0].tolist())[None]
            predicted = model.logits(model(ids).hidden[0, -1]).argmax()
            hits += int(predicted == ids[0, -1])
        return [proportion("accuracy", hits, len(config.prompts), loops_seen=model.depth)]
"""
TINY_THROUGHPUT = {"type": "throughput", "context": 8, "decode_steps": 2, "warmups": 0, "repeats": 2}


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / "data")


def evaluate(root, checkpoint, data, **fields):
    record = {"type": "evaluate", "checkpoint": checkpoint, "data": data, **fields}
    workflow = workflow_from_record({"workflow": "test", "steps": {"evaluate": record}}, source="test")
    context = StepContext(Storage(str(root)), workflow, workflow.steps["evaluate"], lambda values: None)
    return run_evaluate(context.step.config, context)


def context(tmp_path, data=None):
    dataset = None if data is None else PackedDataset(data, "validation")
    return TaskContext("memory", ByteTokenizer(), dataset, str(tmp_path / "out"), lambda values: None)


def test_a_task_from_a_users_file_runs_through_the_evaluate_step(tmp_path, data):
    file = tmp_path / "copying_task.py"
    file.write_text(textwrap.dedent(OWN_TASK))
    checkpoint = save(tmp_path / "run", model())
    root = tmp_path / "storage"
    own = {"type": "copying", "source": str(file), "prompts": ["xyz", "q", "hello"]}
    result = evaluate(root, checkpoint, data, tasks=[{"type": "perplexity"}, own], loops=[1, 3])
    rows = [row for row in result["rows"] if row["task"] == "copying"]
    assert [(row["n_loops"], row["loops_seen"]) for row in rows] == [(1, 1), (3, 3)]
    assert all(row["n"] == 3 for row in rows)
    assert result["step"] == 3
    stored = {row["metric"] for row in ResultsStore(Storage(str(root))).results()}
    names = ("copying/accuracy", "perplexity/loss", "perplexity/perplexity")
    assert stored == {f"depth/{name}/{depth}" for name in names for depth in ("1 loop", "3 loops")}
    evals = ResultsStore(Storage(str(root))).index().evals
    assert {name for _, name, _ in evals} == {"depth"}
    assert {(row["task"], row["n_loops"]) for _, _, row in evals} >= {("copying", 1), ("perplexity", 3)}


def test_unknown_task_types_are_named():
    with pytest.raises(ValueError, match=r"unknown task type 'perplexty'; did you mean 'perplexity'"):
        TaskConfig.read({"type": "perplexty"})
    with pytest.raises(ValueError, match=r"'type:positions' is one key; .*space after its colon, {type: positions}"):
        TaskConfig.read({"type:positions": None})


def test_the_steps_defaults_are_not_part_of_its_identity():
    step = lambda **fields: EvaluateStep(checkpoint="c", data="d", **fields)  # noqa: E731
    identity = lambda config: Workflow("w", {"evaluate": config}).steps["evaluate"].fingerprint  # noqa: E731
    assert identity(step()) == identity(step(tasks=(PerplexityConfig(), ThroughputConfig())))
    assert identity(step()) != identity(step(tasks=(PerplexityConfig(max_sequences=3),)))


def test_perplexity_of_a_part_of_the_held_out_rows(tmp_path, data):
    net, dataset = model(), PackedDataset(data, "validation")
    assert dataset.n_sequences == 4
    whole, *halves = (perplexity(net, dataset, held_out=part) for part in ("all", "selection", "report"))
    assert [found["sequences"] for found in halves] == [2, 2]
    assert sum(found["loss"] for found in halves) / 2 == pytest.approx(whole["loss"])
    (loss, _) = run_tasks([PerplexityConfig(held_out="report", max_sequences=1)], net, context(tmp_path, data))
    assert loss["data"] == dataset.manifest["fingerprint"][:12]
    tokens = torch.as_tensor(dataset.batch([2])["tokens"])
    logits = net.logits(net(tokens[:, :-1]).hidden)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss["value"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_perplexity_of_a_model_that_diverged_is_infinite_and_no_error(tmp_path, data):
    net = model()
    with torch.no_grad():
        net.head_weight.mul_(1e6)
    found = perplexity(net, PackedDataset(data, "validation"), batch_size=2)
    assert 1000 < found["loss"] < math.inf
    assert found["perplexity"] == math.inf
    checkpoint, out = save(tmp_path / "run", net), tmp_path / "out"
    rows = evaluate_checkpoint(checkpoint, [PerplexityConfig()], data=data, out=str(out)).rows
    kept = json.loads((out / "evaluation.json").read_text(), parse_constant=pytest.fail)  # told of NaN and Infinity
    assert [(row["metric"], row["value"]) for row in rows][1:] == [("perplexity", math.inf)]
    assert [row["value"] for row in kept["rows"]] == [rows[0]["value"], None]


def test_perplexity_at_a_depth_is_that_of_a_model_run_so_deep(tmp_path, data):
    net = model(n_loops=3)
    rows = run_tasks([PerplexityConfig()], net, context(tmp_path, data), loops=[1, 3, 6])
    losses = {row["n_loops"]: row["value"] for row in rows if row["metric"] == "loss"}
    assert losses[3] == perplexity(net, PackedDataset(data, "validation"))["loss"]
    tokens = torch.as_tensor(PackedDataset(data, "validation").batch([0, 1, 2, 3])["tokens"])
    for n_loops in (1, 6):
        logits = net.logits(net(tokens[:, :-1], n_loops=n_loops).hidden)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        assert losses[n_loops] == pytest.approx(expected.item(), rel=1e-5)
    flops = {row["n_loops"]: row["flops_per_token"] for row in rows}
    assert flops == {n: pytest.approx(forward_flops(net.config, 12, n_loops=n)) for n in (1, 3, 6)}
    assert net.depth == 3


def test_a_model_that_halts_gets_an_early_exit_row_with_the_loops_it_used(tmp_path, data):
    net = model(n_loops=4, halting={"type": "exit_gate", "threshold": 0.6})
    rows = run_tasks([PerplexityConfig()], net, context(tmp_path, data), loops=[1, 4])
    assert [(row["n_loops"], row["early_exit"]) for row in rows[::2]] == [(1, False), (4, False), (4, True)]
    full, early = rows[2], rows[4]
    assert full["mean_loops"] == 4
    used = net(torch.as_tensor(PackedDataset(data, "validation").batch([0, 1, 2, 3])["tokens"])[:, :-1]).loops_used
    assert used is not None
    assert early["mean_loops"] == pytest.approx(float(used.double().mean()))
    assert 1 < early["mean_loops"] < 4
    assert forward_flops(net.config, 12, n_loops=1) < early["flops_per_token"] < full["flops_per_token"]
    assert early["value"] != full["value"]


def test_an_exit_gate_is_evaluated_at_thresholds_that_are_not_its_own(tmp_path, data):
    """As the same weights with that threshold in their config: loss, loops and compute."""
    net = model(n_loops=4, halting={"type": "exit_gate", "threshold": 0.6})
    rows = run_tasks([PerplexityConfig()], net, context(tmp_path, data), exit_thresholds=[0.3, 0.9])
    assert [(row["early_exit"], row.get("exit_threshold")) for row in rows[::2]] == [
        (True, None), (True, 0.3), (True, 0.9),
    ]  # fmt: skip
    assert rows[2]["mean_loops"] < rows[0]["mean_loops"] < rows[4]["mean_loops"]
    for row in (rows[2], rows[4]):
        other = model(n_loops=4, halting={"type": "exit_gate", "threshold": row["exit_threshold"]})
        other.load_state_dict(net.state_dict())
        expected = run_tasks([PerplexityConfig()], other, context(tmp_path, data))[0]
        assert row == expected | {"exit_threshold": row["exit_threshold"]}
    assert net.config.halting.threshold == 0.6
    stored = Evaluated(rows, 3, 4, 99).evaluations()
    assert stored["validation"] == [row | {"step": 3, "parameters": 99} for row in rows[:2]]
    assert len(stored["depth"]) == 6


def test_thresholds_that_no_gate_can_have_are_refused_before_anything_runs(tmp_path, data):
    gate = model(n_loops=2, halting={"type": "exit_gate"})
    for net, asked, wrong in (
        (gate, [0.0], "above 0 and at most 1"),
        (gate, [1.5], "above 0 and at most 1"),
        (gate, [0.5, 0.5], "different"),
        (model(), [0.5], "only a model with halting.type 'exit_gate' has one"),
        (model(halting={"type": "act"}), [0.5], "only a model with halting.type 'exit_gate' has one"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            run_tasks([PerplexityConfig()], net, context(tmp_path, data), exit_thresholds=asked)


def test_throughput_rows_and_their_metadata(tmp_path):
    rows = run_tasks([TaskConfig.read(TINY_THROUGHPUT)], model(), context(tmp_path), loops=[1, 2])
    assert [row["metric"] for row in rows] == ["prefill_tokens_per_s", "decode_tokens_per_s"] * 2
    assert all(row["value"] > 0 for row in rows)
    of_one, of_two = (Storage(f"{tmp_path}/out/throughput/loops-{n}").read_json("throughput.json") for n in (1, 2))
    assert (of_one["n_loops"], of_two["n_loops"]) == (1, 2)
    assert of_two["cache_bytes"] == 2 * of_one["cache_bytes"]
    assert of_two["unrolled_parameters"] > of_one["unrolled_parameters"]


@pytest.mark.parametrize(
    ("loops", "message"), [([0], "at least 1"), ([2, 2], "different depths")], ids=["zero", "twice"]
)
def test_bad_depths(tmp_path, loops, message):
    with pytest.raises(ConfigError, match=message):
        run_tasks([PerplexityConfig()], model(), context(tmp_path), loops=loops)


def test_perplexity_says_how_far_it_is(tmp_path, data):
    shown = []
    run_tasks([PerplexityConfig(batch_size=3)], model(), replace(context(tmp_path, data), progress=shown.append))
    counted = [(values["batch"], values["batches"]) for values in shown if "batch" in values]
    assert counted == [(1, 2), (2, 2)]  # four held-out rows


def test_perplexity_without_data_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="needs packed data"):
        run_tasks([PerplexityConfig()], model(), context(tmp_path))


@pytest.mark.parametrize("task", [PerplexityConfig(), DiagnosticsConfig()])
def test_data_of_another_tokenizer_is_refused(tmp_path, data, task):
    """Its ids are all in the model's vocabulary, so there would be numbers."""
    given = context(tmp_path, data)
    other = SimpleNamespace(name="llama3", sha256="1" * 64, vocabulary="2" * 64)
    with pytest.raises(
        ConfigError, match=r"prepared with tokenizer 'byte', the model was trained with 'llama3' of ano"
    ):
        run_tasks([task], model(), replace(given, tokenizer=other))
    same = SimpleNamespace(sha256="1" * 64, vocabulary=ByteTokenizer.vocabulary)  # another file of it
    check_tokens(given.dataset, same)
    check_tokens(given.dataset, SimpleNamespace(sha256=given.dataset.manifest["tokenizer"]["sha256"]))


def test_rows_that_cannot_be_stored_are_refused(tmp_path, monkeypatch):
    for row, message in [
        ({"metric": "m"}, "a row is a dict"),
        ({"value": 1.0}, "a row is a dict"),
        ({"metric": 1, "value": 1.0}, "a row is a dict"),
        ({"metric": "m", "value": [1]}, "plain numbers"),
        ({"metric": "m", "value": None}, "plain numbers"),
        ({"metric": "m", "value": "1"}, "plain numbers"),
        ({"metric": "m", "value": 1.0, "more": [1]}, r"\['more'\] must be plain numbers"),
    ]:
        monkeypatch.setattr(PerplexityConfig, "run", lambda *_, row=row: [row])
        with pytest.raises(ConfigError, match=message):
            run_tasks([PerplexityConfig()], model(), context(tmp_path))


def test_a_value_is_stored_as_a_float():
    assert repr(checked("t", {"metric": "m", "value": True, "n": 3})) == "{'metric': 'm', 'value': 1.0, 'n': 3}"


def test_depths_have_folders_of_their_own():
    """Answers and samples of one would be taken for another's."""
    halting = model(n_loops=4, halting={"type": "exit_gate", "threshold": 0.6})
    assert [depth.name for depth in depths(halting, ())] == ["loops-4-early-exit"]
    assert [depth.name for depth in depths(halting, [1, 4])] == ["loops-1", "loops-4", "loops-4-early-exit"]
    assert [depth.name for depth in depths(halting, (), [0.5])] == ["loops-4-early-exit", "loops-4-early-exit-0.5"]
    assert [depth.name for depth in depths(model(), ())] == ["loops-2"]


def test_the_table_over_depths_is_in_their_order_whatever_was_asked_first():
    place = {"task": "t", "metric": "m", "early_exit": False}
    rows = [place | {"n_loops": n, "value": 0.5, "votes": 5, "chat": "own", "split": "test"} for n in (4, 1)]
    rows += [
        place | {"n_loops": 4, "early_exit": True, "value": 0.25},
        place | {"n_loops": 4, "early_exit": True, "value": 0.25, "exit_threshold": 0.9},
        place | {"n_loops": 4, "early_exit": True, "value": 0.25, "exit_threshold": 0.5},
        place | {"task": "s", "n_loops": 9, "value": 1.0},
    ]
    table = depth_table(rows)
    assert [(row["task"], row["n_loops"], row["early_exit"], row.get("exit_threshold")) for row in table] == [
        ("s", 9, False, None), ("t", 1, False, None), ("t", 4, False, None),
        ("t", 4, True, 0.5), ("t", 4, True, 0.9), ("t", 4, True, None),
    ]  # fmt: skip
    assert table[1] == place | {"n_loops": 1, "value": 0.5, "votes": 5, "chat": "own"} | dict.fromkeys(
        ("mean_loops", "flops_per_token", "stderr", "n")
    )
    assert table[3].keys().isdisjoint({"votes", "chat"})


def test_a_task_is_given_a_model_that_does_not_train(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(PerplexityConfig, "run", lambda config, net, context: seen.append(net) or [])
    run_tasks([PerplexityConfig()], model().train(), context(tmp_path))
    assert not any(module.training for module in seen[0].modules())


@pytest.mark.parametrize("returned", [None, "text", {"metric": "m", "value": 1.0}])
def test_a_task_that_returns_no_list_is_told_so(tmp_path, monkeypatch, returned):
    monkeypatch.setattr(PerplexityConfig, "run", lambda *_: returned)
    with pytest.raises(ConfigError, match=r"^task perplexity returned .*; give a list of rows$"):
        run_tasks([PerplexityConfig()], model(), context(tmp_path))


def test_no_two_tasks_have_one_name():
    class Own(TaskConfig):
        type: str = "own"
        name: str = ""

    tasks = [Own(name=name) for name in ("a-1", "a", "a", "", "")]
    assert [name for name, _ in named(tasks)] == ["a-1", "a", "a-2", "own", "own-1"]
    assert [task for _, task in named(tasks)] == tasks


def test_proportions_have_the_standard_error_of_a_sample_mean():
    hits = [1.0, 0.0, 1.0, 1.0]
    row = proportion("acc", 3, 4)
    assert row["stderr"] == pytest.approx(float(torch.tensor(hits, dtype=torch.float64).std() / 2))


def test_checkpoints_are_read_as_saved(tmp_path):
    net = model()
    loaded, _, _ = load_model(save(tmp_path, net))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), loaded.parameters()))
