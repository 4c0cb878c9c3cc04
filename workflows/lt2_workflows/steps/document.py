"""The step that ends a workflow with its report, as Markdown and as one HTML file."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Ref, StepConfig, step_type


class DocumentStep(StepConfig):
    """Report on the steps named in `steps` and all they need. `lt2 report` does the same for a whole workflow."""

    produces: ClassVar[str] = "document"
    type: Literal["document"] = "document"
    steps: tuple[Ref, ...] = Field(min_length=1)


@step_type(DocumentStep)
def run_document(config: DocumentStep, context: StepContext) -> dict[str, Any]:
    """Writes out/report.md, out/report.html and figures; result: {"text": where they are}."""
    from lt2_workflows.report.write import write_report

    wanted = {ref.step for ref in config.steps}
    for name, step in reversed(context.workflow.steps.items()):
        if name in wanted:
            wanted.update(step.needs)
    folder = write_report(context.storage, context.workflow.id, f"{context.step.folder}/out", steps=sorted(wanted))
    return {"text": f"report: {context.storage.join(folder, 'report.html')}"}
