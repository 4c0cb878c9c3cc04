"""The steps that tell what distillation kept: test items from held-out text, and students beside their teacher.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2_platform.evaluate.config import HeldOut
from lt2_workflows.console import table
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import StepConfig, step_type
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, EvaluationRef


class ItemsStep(StepConfig):
    """A pack of test items made from a dataset's held-out text: continuations to choose among, and needles.

    Attributes:
        held_out: the part of the held-out rows that the continuations are taken from.
        items: rows of the task `continuation`: which of four pieces of text follows; three are of other documents.
        context, continuation: their lengths in tokens.
        needles: tasks as NAME_LENGTH, e.g. niah_multikey_2_512; those that hide in essays cannot be made here.
        needle_samples: of each.
    """

    produces: ClassVar[str] = "pack"
    type: Literal["items"] = "items"
    data: DatasetRef | str
    held_out: HeldOut = "all"
    items: int = Field(default=200, ge=1)
    context: int = Field(default=160, ge=1)
    continuation: int = Field(default=32, ge=1)
    needles: tuple[str, ...] = ()
    needle_samples: int = Field(default=50, ge=1)
    seed: int = 0


@step_type(ItemsStep)
def run_items(config: ItemsStep, context: StepContext) -> dict[str, Any]:
    """Result: {"tasks": names}."""
    from lt2_platform.distill.items import make_pack

    options = config.model_dump(exclude={"type", "resources", "data"})
    return {"tasks": make_pack(context.path(config.data), context.out, **options)}


class RetentionStep(StepConfig):
    """What students keep of their teacher: a table and a figure, and the loss of every stage.

    Attributes:
        teacher, students: evaluations on the same tasks; names label the columns.
        stages: training runs in order, whose losses and distances to the teacher are listed.
    """

    produces: ClassVar[str] = "report"
    type: Literal["retention"] = "retention"
    title: str = "Distillation"
    teacher: EvaluationRef
    students: dict[str, EvaluationRef] = Field(min_length=1)
    stages: dict[str, CheckpointRef] = {}


@step_type(RetentionStep)
def run_retention(config: RetentionStep, context: StepContext) -> dict[str, Any]:
    """Writes out/retention.json, .txt and .png; result: {"text": both tables, for the terminal}."""
    from lt2_platform.distill.retention import draw, retention_rows

    students = {name: context.result(ref)["rows"] for name, ref in config.students.items()}
    rows = retention_rows(context.result(config.teacher)["rows"], students)
    stages = []
    for name, ref in config.stages.items():
        found = context.result(ref)
        kept, kl = found.get("kept"), found.get("report_kl")
        stages.append(
            {
                "stage": name,
                "training loss": "" if found["loss"] is None else f"{found['loss']:.4f}",
                "tokens": f"{found['tokens']:,}",
                "KL to the teacher": "" if kl is None else f"{kl:.4f}",
                "attention kept": "" if kept is None else ", ".join(map(str, kept)) or "none",
            }
        )
    lines = [
        {
            "task": row["task"],
            "metric": row["metric"],
            "teacher": f"{row['teacher']:.4f}",
            **{name: _cell(row["students"].get(name)) for name in students},
        }
        for row in rows
    ]
    text = f"\n{config.title}: what students keep (score, and share of the teacher's)\n\n"
    text += table(lines, ["task", "metric", "teacher", *students]) + "\n"
    if stages:
        text += "\nstages (training loss: alignment's is a regression's; in nats/token, a distillation's KL and "
        text += "a pretraining's cross entropy)\n\n"
        text += table(stages, ["stage", "training loss", "tokens", "KL to the teacher", "attention kept"]) + "\n"
    out = f"{context.step.folder}/out"
    context.storage.write_json(f"{out}/retention.json", {"title": config.title, "rows": rows, "stages": stages})
    context.storage.write_bytes(f"{out}/retention.txt", text.encode())
    context.storage.write_bytes(f"{out}/retention.png", draw(rows, list(students), config.title))
    return {"text": text}


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    share = "" if found["retention"] is None else f" ({100 * found['retention']:.1f} %)"
    return f"{found['value']:.4f}{share}"
