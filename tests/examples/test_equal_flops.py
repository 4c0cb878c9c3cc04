import pytest

from lt2.analysis.accounting import training_flops
from lt2_workflows.commands.sweeps import sweep_workflow
from tests.ranks import ROOT


def test_a_sweep_of_ones_own_is_one_and_its_trials_cost_the_same():
    workflow = sweep_workflow(f"{ROOT}/examples/equal_flops.py:equal_flops", [], [], "3", {})
    trained = [trial.workflow.configs["pretrain"] for trial in workflow.configs["sweep"].expanded]
    assert [each.train.seed for each in trained] == [3, 3]
    flops = [
        training_flops(each.model.model_copy(update={"vocab_size": 259}), 256) * each.train.steps * 16 * 256
        for each in trained
    ]
    assert flops == pytest.approx([4e12] * 2, rel=0.01)
    assert trained[0].train.steps > 3 * trained[1].train.steps


def test_a_scaling_study_has_each_architecture_at_every_budget():
    workflow = sweep_workflow(f"{ROOT}/examples/equal_flops.py:scaling", [], [], None, {})
    spent: dict[int, list[float]] = {}
    for trial in workflow.configs["sweep"].expanded:
        pretrain = trial.workflow.configs["pretrain"]
        sized = pretrain.model.model_copy(update={"vocab_size": 259})
        flops = training_flops(sized, 256) * pretrain.train.steps * 16 * 256
        spent.setdefault(pretrain.model.n_loops, []).append(flops)
    assert spent == {n_loops: pytest.approx([1e12, 2e12, 4e12, 8e12], rel=0.02) for n_loops in (1, 4)}
