"""A workflow's report: what ran, its numbers as tables, its curves as plots; as Markdown and as one HTML file.

    report.md     tables, and links to figure-<n>.svg beside it
    report.html   the same with everything inside

Read from storage alone, so a report can be made of a workflow that still runs, failed, or ran elsewhere.
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.evaluate import ablations
from lt2_platform.results.store import ResultsStore
from lt2_platform.results.tables import flatten
from lt2_workflows.console import duration
from lt2_workflows.engine.records import UNREADABLE, list_workflows, read_state
from lt2_workflows.svg import Dots, Line, dot_chart, line_chart

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

MAX_ROWS = 200
MAX_LINES = 16
CURVES = (("loss", "loss (nats)"), ("validation_loss", "validation loss (nats)"))


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Plot:
    svg: str
    caption: str


@dataclass(frozen=True)
class Printed:
    """What a step printed, in columns of its own."""

    text: str


Part = str | Table | Plot | Printed


@dataclass
class Section:
    """A heading, and under it paragraphs (str) and the rest."""

    title: str
    parts: list[Part] = field(default_factory=list)


def write_report(storage: Storage, workflow: str, out: str | None = None, *, steps: Sequence[str] = ()) -> str:
    """Write the report of a workflow (its id, or the name of one of which there is one); the folder, relative to root.

    `out` defaults to workflows/<id>/report. `steps` limits it to those, by name.

    Raises:
        ConfigError: no such workflow, or several of that name.
    """
    found = list_workflows(storage, workflow)
    if len(found) > 1:
        ids = ", ".join(item["id"] for item in found)
        raise ConfigError(f"{len(found)} workflows are called {workflow!r}; give the id of one: {ids}")
    item = found[0]
    folder = out or f"workflows/{item['id']}/report"
    chosen = [step for step in item["steps"] if not steps or step["name"] in steps]
    title = f"{item['name']}"
    sections = [_overview(storage, item, chosen), *_step_sections(storage, chosen)]
    figures = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    for number, figure in enumerate(figures, 1):
        storage.write_bytes(f"{folder}/figure-{number}.svg", figure.svg.encode())
    storage.write_bytes(f"{folder}/report.md", as_markdown(title, sections).encode())
    storage.write_bytes(f"{folder}/report.html", as_html(title, sections).encode())
    return folder


def _overview(storage: Storage, item: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Section:
    rows, code = [], {}
    for step in steps:
        state = read_state(storage, f"steps/{step['id']}", step["attempt"]) if step["attempt"] else {}
        seconds = state["ended"] - state["started"] if state.get("ended") else None
        rows.append([step["name"], step["state"], step["attempt"], duration(seconds) if seconds else "", step["id"]])
        code |= {"git": state["provenance"]["git"]} | state["provenance"]["packages"] if "provenance" in state else {}
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    parts: list[Part] = [f"Workflow {item['id']}, storage {storage.root}, written {made}."]
    parts.append(Table(["step", "state", "attempts", "last attempt took", "id"], rows))
    for step in steps:
        if step["error"]:
            log = f" (log: {step['log']})" if step["log"] else ""
            parts.append(f"{step['name']}: {step['error']}{log}")
    if code:
        parts.append(
            "Code and packages: " + ", ".join(f"{name} {version}" for name, version in code.items() if version) + "."
        )
    return Section("Steps", parts)


def _step_sections(storage: Storage, steps: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    store = ResultsStore(storage)
    for step in steps:
        folder = f"steps/{step['id']}"
        if step["state"] == UNREADABLE:  # its error is among the steps
            continue
        config = storage.read_json(f"{folder}/spec.json")["config"]
        result = storage.read_json(f"{folder}/done.json")["result"] if step["state"] == "done" else {}
        section = Section(step["name"])
        if config["type"] == "sweep":
            if result:
                section.parts += sweep_parts(store, storage.read_json(f"{folder}/out/sweep.json"))
        elif config["type"] != "document":
            section.parts += [*curve_parts(store, {step["name"]: step["id"]}), *result_parts(result)]
        if section.parts:
            yield section


def result_parts(result: Mapping[str, Any]) -> Iterator[Part]:
    """Whatever a step returned: what it printed, or its numbers as a table and each list of flat records as one."""
    if "text" in result:
        yield Printed(result["text"].strip("\n"))
        return
    if flat := _flat(result):
        yield Table(["", "value"], list(flat.items()))
    for value in result.values():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(name for row in value for name, each in row.items() if _plain(each)))
            yield Table(columns, [[row.get(name) for name in columns] for row in value])


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in flatten(value).items():
        if _plain(item) and item is not None:
            found[key] = item
        elif isinstance(item, list) and item and all(_plain(each) for each in item):
            found[key] = ", ".join(cell(each) for each in item)
    return found


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None)


def curve_parts(store: ResultsStore, runs: Mapping[str, str]) -> Iterator[Plot]:
    """Training and validation loss of runs of the results store, by the name to show."""
    tables = {name: store.curves(run).table.to_pylist() for name, run in list(runs.items())[:MAX_LINES]}
    for metric, label in CURVES:
        lines = [
            Line(name, [(row["step"], row["mean"]) for row in rows if row["metric"] == metric and row["count"]])
            for name, rows in tables.items()
        ]
        drawn = [line for line in lines if line.points]
        if drawn:
            left_out = f", the first {MAX_LINES} of {len(runs)}" if len(runs) > MAX_LINES else ""
            yield Plot(line_chart(drawn, x="step", y=label), f"{label} by step{left_out}")


def sweep_parts(store: ResultsStore, sweep: Mapping[str, Any]) -> Iterator[Part]:
    """The table of a sweep (see `sweep_step.write_table`), ours and the paper's perplexity as dots, and the curves."""
    # Not the rows it holds: older ones count trials that were stopped early among those that failed.
    rows, with_paper = ablations.summarize(sweep["trials"], sweep["paper"]), sweep["paper"] is not None
    labels = [" ".join((row["group"], row["label"])).strip() for row in rows]
    yield sweep["title"] + "."
    columns = ["group", "configuration", "seeds", "stopped early", "failed", "parameters"]
    columns += [name for score in ablations.SCORES for name in (score, *([f"{score}, paper"] if with_paper else []))]
    lines = []
    for row in rows:
        scores = [
            value
            for score in ablations.SCORES
            for value in (
                ablations.plus_minus(row[score], row[f"{score}_std"]),
                *([row[f"{score}_paper"]] if with_paper else []),
            )
        ]
        counts = [row["n"], row["stopped"], row["failed"], row["parameters"]]
        lines.append([row["group"], row["label"], *counts, *scores])
    yield _without_empty(Table(columns, lines))
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    if names:
        more = [
            [label] + [ablations.plus_minus(*row["metrics"].get(name, (None, None)), digits=4) for name in names]
            for label, row in zip(labels, rows, strict=True)
        ]
        yield Table(["configuration", *names], more)
    for name, unit in zip(ablations.SCORES, ("perplexity", "average of eight tasks (%)"), strict=True):
        for who, key, error in (("ours", name, f"{name}_std"), ("paper", f"{name}_paper", None)):
            values = [row[key] for row in rows]
            if any(value is not None for value in values):
                errors = [row[error] if error else None for row in rows]
                # Ours and the paper's are of other data and sizes: one axis would hide the shape of both.
                yield Plot(dot_chart(labels, [Dots(who, values, errors, who == "paper")], y=unit), f"{unit}, {who}")
    runs = {trial["name"]: trial["run"] for trial in sweep["trials"] if trial["run"]}
    yield from curve_parts(store, runs)


def _without_empty(table: Table) -> Table:
    kept = [i for i, _ in enumerate(table.columns) if any(row[i] not in ("", None, 0) for row in table.rows)]
    return Table([table.columns[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


# Rendering


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1000 else f"{value:.5g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """GitHub-flavoured; figures are links, numbered in order."""
    lines, figure = [f"# {title}"], 0
    for section in sections:
        lines += ["", f"## {section.title}"]
        for part in section.parts:
            lines.append("")
            if isinstance(part, Plot):
                figure += 1
                lines.append(f"![{part.caption}](figure-{figure}.svg)")
            elif isinstance(part, Table):
                lines += _markdown_table(part)
            elif isinstance(part, Printed):
                lines += ["```", part.text, "```"]
            else:
                lines.append(part)
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> list[str]:
    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |"

    shown = [line([cell(value) for value in row]) for row in table.rows[:MAX_ROWS]]
    return [line(table.columns), line(["---"] * len(table.columns)), *shown, *_cut(table)]


def _cut(table: Table) -> list[str]:
    return ["", f"The first {MAX_ROWS} of {len(table.rows):,} rows."] if len(table.rows) > MAX_ROWS else []


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2rem auto; padding: 0 1rem; color: #1b1f27 }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #e4e7ec }}
.wide {{ overflow-x: auto }} svg {{ width: 100%; max-width: 760px }}
figure {{ margin: 1rem 0 }} figcaption {{ color: #5b6472 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 }}
th, td {{ padding: .2rem .9rem .2rem 0; text-align: left; border-bottom: 1px solid #e4e7ec }}
td.n {{ text-align: right }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def as_html(title: str, sections: Sequence[Section]) -> str:
    """One file that needs nothing else."""
    body = []
    for section in sections:
        body.append(f"<h2>{html.escape(section.title)}</h2>")
        for part in section.parts:
            if isinstance(part, Plot):
                body.append(f"<figure>{part.svg}<figcaption>{html.escape(part.caption)}</figcaption></figure>")
            elif isinstance(part, Table):
                body.append(_html_table(part))
            elif isinstance(part, Printed):
                body.append(f'<pre class="wide">{html.escape(part.text)}</pre>')
            else:
                body.append(f"<p>{html.escape(part)}</p>")
    return PAGE.format(title=html.escape(title), body="\n".join(body))


def _html_table(table: Table) -> str:
    def one(value: Any) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"<td{' class=n' * number}>{html.escape(cell(value))}</td>"

    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(map(one, row)) + "</tr>" for row in table.rows[:MAX_ROWS])
    more = "".join(f"<p>{line}</p>" for line in _cut(table) if line)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}'
