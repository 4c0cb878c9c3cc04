from lt2_platform.storage import Storage
from lt2_workflows.loading import load_workflow
from lt2_workflows.plan import describe_plan
from tests.ranks import ROOT


def test_every_budget_costs_its_cool_down_alone(tmp_path):
    workflow = load_workflow(f"{ROOT}/examples/budgets.py:budgets")
    text = describe_plan(workflow, Storage(str(tmp_path)))
    made = [int(line.split(" steps, ")[0].rsplit(", ", 1)[1]) for line in text.splitlines() if " steps, " in line]
    assert made == [80, 40, 120, 40, 240, 40]
    assert "after step 200 of to-200" in text
