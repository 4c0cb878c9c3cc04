"""What a sweep's table shows, and what its end says, where trials have failed. No trial runs."""

from __future__ import annotations

import math

import pytest

from lt2.config import ConfigError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.engine.context import StepContext
from lt2_workflows.sweeps import step
from tests.workflows.conftest import FAKE_STEPS


@pytest.fixture
def context(tmp_path):
    workflow = sweep_workflow(f"{FAKE_STEPS}:chain", ["sweep.retry=1"], ["second.lines=[2, 3]"], None, {})
    return StepContext(Storage(str(tmp_path)), workflow, workflow.steps["sweep"], lambda values: None)


def trial(label, state, **metrics):
    record = {"name": label, "label": label, "group": "", "seed": None, "state": state, "metrics": metrics}
    return record | {"parameters": None, "error": "no pack", "log": None, "last": None, "run": None}


@pytest.mark.parametrize("failed_first", [True, False])
def test_the_table_has_the_numbers_that_any_configuration_has(context, failed_first):
    """A recipe without perplexity and the paper's eight tasks: the columns are what its trials say."""
    ended = [trial("a", "done", speed=2.5), trial("b", "done", speed=3.5, size=1.5)]
    records = [trial("f", "failed"), *ended] if failed_first else [*ended, trial("f", "failed")]
    lines = step.write_table(context.step.config, records, context)["text"].splitlines()
    (head,) = (line for line in lines if line.startswith("configuration"))
    assert head.split() == ["configuration", "seeds", "failed", "speed", "size"]
    rows = {line.split()[0]: line.split()[1:] for line in lines if line[:2] in ("a ", "b ")}
    assert rows == {"a": ["1", "2.500"], "b": ["1", "3.500", "1.500"]}


def test_of_other_numbers_six_are_shown_and_counts_without_a_fraction(context):
    metrics = {"n_max": 16} | {f"speed{n}": n + 0.5 for n in range(6)}
    lines = step.write_table(context.step.config, [trial("a", "done", **metrics)], context)["text"].splitlines()
    head, _, row = (line.split() for line in lines[3:6])
    assert head == ["configuration", "seeds", "n_max", *(f"speed{n}" for n in range(5))]
    assert row == ["a", "1", "16", *(f"{n}.500" for n in range(5))]


def test_what_became_of_the_others_is_told_below_the_table(context):
    stopped = [trial("s", "stopped") | {"last": {"step": 1234}}, trial("t", "stopped")]
    failed = trial("f", "failed") | {"log": "its/log"}
    result = step.write_table(context.step.config, [trial("a", "done", speed=math.nan), *stopped, failed], context)
    *_, one, two, three, _ = result["text"].split("\n")
    assert one == "s stopped by the scheduler at step 1,234"
    assert (two, three) == ("t stopped by the scheduler", "f failed: no pack (log: its/log)")
    assert (result["trials"], result["stopped"], result["failed"]) == (4, 2, 1)
    assert b"NaN" not in context.storage.read_bytes(f"{context.step.folder}/out/sweep.json")


def test_a_sweep_without_a_trial_that_ended_says_how_to_run_them_again(context, monkeypatch):
    """Its records stay, so the same command would say the same when the pack has been put there."""
    monkeypatch.setattr(step, "_environment", lambda concurrent: {})
    monkeypatch.setattr(step, "run_shared", lambda workflows, context: None)
    records = [trial("a", "failed"), trial("b", "stopped")]
    monkeypatch.setattr(step, "run_trials", lambda *of: records)
    assert step.run_sweep(context.step.config, context)["failed"] == 1
    records[1] = trial("b", "failed")
    with pytest.raises(
        ConfigError, match=r"^all 2 trials failed \(--set sweep\.retry=2 runs them again\); a: no pack$"
    ):
        step.run_sweep(context.step.config, context)


def test_of_other_numbers_than_the_papers_the_first_are_the_runs(context):
    store = ResultsStore(context.storage)
    store.create_run("r", {}).close()
    record = trial("a", "done", **{f"speed{n}": n + 0.5 for n in range(10)}) | {"run": "r"}
    step.log_to_runs([record, trial("b", "failed")], context)
    logged = [(row["metric"], row["value"], row["label"]) for _, _, row in store.index().evals]
    assert sorted(logged) == [(f"speed{n}", n + 0.5, "a") for n in range(8)]
