"""The state-recall step through its workflow record."""

import pytest

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.engine.attempt import Interrupted
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import load_workflow, workflow_from_record
from lt2_workflows.steps.state_recall import run_state_recall


def test_a_small_curriculum_and_what_it_stores(tmp_path):
    layout = {"type": "uniform", "mixer": {"type": "full"}}
    sizes = {"dim": 16, "n_layers": 1, "num_heads": 2, "stages": [5], "batch_size": 2, "eval_examples": 4}
    record = {"type": "state_recall", "layout": layout, "max_steps": 4, "eval_every": 2, "warmup_steps": 0, **sizes}
    workflow = workflow_from_record({"workflow": "w", "steps": {"small": record}}, source="test")
    storage = Storage(str(tmp_path))
    context = StepContext(storage, workflow, workflow.steps["small"])
    result = run_state_recall(context.step.config, context)
    assert result["steps"] in (2, 4)
    stored = {row["metric"]: row["value"] for row in ResultsStore(storage).results()}
    assert stored["state_recall/state_recall/n_max"] == result["n_max"]
    (run,) = ResultsStore(storage).runs()
    assert run.config["layout"]["mixer"]["type"] == "full"
    assert next(iter(run.info.items())) == ("workflow", workflow.id)  # the first, where the dashboard's query looks
    assert run.last["accuracy"][0] == result["steps"]
    assert run.state == "finished"
    assert 0 <= stored["state_recall/state_recall_5/final"] <= 1


def test_curves_are_there_while_it_learns_and_whole_after_a_cut(tmp_path):
    layout = {"type": "uniform", "mixer": {"type": "full"}}
    sizes = {"dim": 16, "n_layers": 1, "num_heads": 2, "stages": [5], "batch_size": 2, "eval_examples": 4}
    record = {"type": "state_recall", "layout": layout, "max_steps": 6, "eval_every": 2, "warmup_steps": 0, **sizes}
    workflow = workflow_from_record({"workflow": "w", "steps": {"small": record | {"threshold": 1}}}, source="test")
    storage = Storage(str(tmp_path))

    def cut(values):
        assert [run.state for run in ResultsStore(storage).runs()] == ["running"]
        if values["step"] == 4:
            raise Interrupted("stopped by SIGTERM")

    step = workflow.steps["small"]
    with pytest.raises(Interrupted):
        run_state_recall(step.config, StepContext(storage, workflow, step, cut))
    assert [run.state for run in ResultsStore(storage).runs()] == ["running"]  # its step says that it was interrupted
    told = []
    result = run_state_recall(step.config, StepContext(storage, workflow, step, told.append))
    assert [values.get("notice", values.get("step")) for values in told] == ["resumes from step 2", 4, 6]
    curve = ResultsStore(storage).metrics(result["run"], ["accuracy"])
    assert curve["step"].to_pylist() == [2, 4, 6]


def test_the_sweep_covers_the_paper():
    trials = load_workflow("sweep_state_recall:paper").configs["sweep"].expanded
    assert len(trials) == 11 * 4
    steps = {trial.workflow.configs["recall"].model_dump_json() for trial in trials}
    assert len(steps) == 11 * 4
    assert {trial.workflow.configs["recall"].n_loops for trial in trials} == {1, 2, 4, 8}
    assert {trial.workflow.configs["recall"].max_steps for trial in trials} == {100_000}
