from types import SimpleNamespace

from lt2_platform.storage import Storage
from lt2_workflows.steps.report import ReportStep, run_report


def test_counts_have_separators_on_the_terminal_and_are_whole_in_the_record(tmp_path):
    names = {name: {"step": name} for name in ("data", "training", "evaluation")}
    config = ReportStep.model_validate(names)
    results = {
        "data": {"splits": {"train": {"unigram_entropy": 3.2}}},
        "training": {"run": "r", "loss": 2.5, "tokens": 122880},
        "evaluation": {"run": "average-1", "rows": [], "parameters": 647344, "n_loops": 4},
    }
    trained = SimpleNamespace(configs={"training": SimpleNamespace(model_dump=dict)})
    step, storage = SimpleNamespace(folder="steps/report"), Storage(str(tmp_path))
    context = SimpleNamespace(result=lambda ref: results[ref.step], workflow=trained, step=step, storage=storage)
    text = run_report(config, context)["text"]  # pyright: ignore[reportArgumentType]
    assert "run r, evaluated as average-1\n" in text
    assert "647,344              applied 4 times" in text
    assert storage.read_json("steps/report/out/report.json")["rows"][-1]["value"] == 647344
    results["training"]["loss"] = None  # of an average, or an imported model
    assert "training loss" not in run_report(config, context)["text"]  # pyright: ignore[reportArgumentType]
