"""The step that prints what a training run reached."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from lt2.layout import loops_text
from lt2_platform.evaluate.repeats import is_reading
from lt2_platform.results.tables import unit_of
from lt2_workflows.console import table
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import StepConfig, step_type
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, EvaluationRef


class ReportStep(StepConfig):
    """A table of what a training run reached, beside what a model without context would."""

    produces: ClassVar[str] = "report"
    type: Literal["report"] = "report"
    title: str = "Results"
    data: DatasetRef
    training: CheckpointRef
    evaluation: EvaluationRef


@step_type(ReportStep)
def run_report(config: ReportStep, context: StepContext) -> dict[str, Any]:
    """Writes out/report.json and out/report.txt; result: {"text": the table, for the terminal}."""
    splits = context.result(config.data)["splits"]
    training, evaluation = context.result(config.training), context.result(config.evaluation)
    trained = context.workflow.configs[config.training.step].model_dump()
    rows = [
        _row("unigram entropy of the corpus", splits["train"]["unigram_entropy"], "nats/token", "loss without context")
    ]
    if training["loss"] is not None:  # a mean of checkpoints and an imported model have none
        note = f"after {training['tokens']:,} tokens"
        rows.append(_row("training loss", training["loss"], unit_of("loss", trained), note))
    results = [row for row in evaluation["rows"] if not is_reading(row)]  # those are for the dashboard
    rows += [_row(_label(row), row["value"], row.get("unit", ""), _note(row)) for row in results]
    rows.append(_row("parameters", evaluation["parameters"], "", f"applied {evaluation['n_loops']} times"))
    shown = [row | {"value": float(row["value"])} for row in rows]  # a count with separators, like other numbers
    other = f", evaluated as {evaluation['run']}" if evaluation["run"] != training["run"] else ""  # its average, say
    text = f"\n{config.title}, run {training['run']}{other}\n\n{table(shown, ['metric', 'value', 'unit', 'note'])}\n"
    out = f"{context.step.folder}/out"
    context.storage.write_json(f"{out}/report.json", {"title": config.title, "run": training["run"], "rows": rows})
    context.storage.write_bytes(f"{out}/report.txt", text.encode())
    return {"text": text, "run": training["run"]}


def _label(row: dict[str, Any]) -> str:
    if row["task"] == "perplexity":
        return f"validation {row['metric']}"
    if row["task"] == "throughput":
        return f"{row['metric'].removesuffix('_tokens_per_s')} throughput"
    return f"{row['task']} {row['metric']}"


def _note(row: dict[str, Any]) -> str:
    stderr = f"± {row['stderr']:.4g}" if row.get("stderr") is not None else ""
    depth = loops_text(row["n_loops"], row["early_exit"], row.get("exit_threshold"))
    return ", ".join(part for part in (stderr, row.get("note", ""), depth) if part)


def _row(metric: str, value: float, unit: str, note: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "unit": unit, "note": note}
