"""A workflow's report: what ran, its numbers as tables, its curves as plots; as Markdown and as one HTML file.

    report.md     tables, and links to figure-<n>.svg beside it
    report.html   the same with everything inside

Read from storage alone, so a report can be made of a workflow that still runs, failed, or ran elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.evaluate import ablations
from lt2_platform.evaluate.repeats import READINGS, counting, is_reading
from lt2_platform.results.rows import result_name
from lt2_platform.results.store import ResultsStore
from lt2_platform.results.tables import flatten, objective_of, unit_of
from lt2_platform.wording import amount
from lt2_workflows.console import duration, utc
from lt2_workflows.engine.record_files import read_record
from lt2_workflows.engine.records import UNREADABLE, list_workflows, read_state
from lt2_workflows.report.pages import Folded, Part, Plot, Printed, Section, Table, as_html, as_markdown, cell
from lt2_workflows.report.svg import Dots, Line, dot_chart, line_chart

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

MAX_LINES = 16
FIRST = ("task", "n_loops", "metric", "value", "stderr", "unit", "n", "limit")  # columns of an evaluation
CURVES = {"loss": "loss", "validation_loss": "validation loss"}


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
    title = item["name"]
    sections = [_overview(storage, item, chosen), *_step_sections(storage, chosen)]
    figures = [part for section in sections for part in section.parts if isinstance(part, Plot)]
    for number, figure in enumerate(figures, 1):
        storage.write_bytes(f"{folder}/figure-{number}.svg", figure.svg.encode())
    storage.write_bytes(f"{folder}/report.md", as_markdown(title, sections).encode())
    storage.write_bytes(f"{folder}/report.html", as_html(title, sections).encode())
    return folder


def _overview(storage: Storage, item: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Section:
    rows: list[list[Any]] = []
    code: dict[str, dict[str, None]] = {}  # name: its versions, in the order of the steps
    for step in steps:
        state = read_state(storage, f"steps/{step['id']}", step["attempt"]) if step["attempt"] else {}
        seconds = state["ended"] - state["started"] if state.get("ended") else None
        rows.append([step["name"], step["state"], step["attempt"], duration(seconds) if seconds else "", step["id"]])
        for name, version in _code(state["provenance"]) if "provenance" in state else ():
            code.setdefault(name, {})[version] = None
    made = f"{utc(time.time())} UTC"
    parts: list[Part] = [f"Workflow {item['id']}, storage {storage.root}, written {made}."]
    parts.append(Table(["step", "state", "attempts", "last attempt took", "id"], rows))
    for step in steps:
        if step["error"]:
            log = f" (log: {step['log']})" if step["log"] else ""
            parts.append(f"{step['name']}: {step['error']}{log}")
    if code:
        named = (f"{name} {' and '.join(versions)}" for name, versions in code.items())
        parts.append(f"Code and packages: {', '.join(named)}.")
    return Section("Steps", parts)


def _code(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if provenance["git"]:
        changed = provenance["dirty"]
        yield "git", provenance["git"] + (f" with uncommitted changes ({changed[:6]})" if changed else "")
    yield from provenance["packages"].items()


def _step_sections(storage: Storage, steps: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    store = ResultsStore(storage)
    others = _evaluations(store, storage, steps)
    for step in steps:
        folder = f"steps/{step['id']}"
        if step["state"] == UNREADABLE:  # its error is among the steps
            continue
        spec = read_record(storage, f"{folder}/spec.json")
        if spec is None:  # removed: its recipe's next run writes it anew
            continue
        config, done = spec["config"], read_record(storage, f"{folder}/done.json")
        result = done["result"] if done else {}
        section = Section(step["name"])
        if config["type"] == "sweep":
            if result:
                section.parts += sweep_parts(store, storage.read_json(f"{folder}/out/sweep.json"))
        elif config["type"] != "document":
            section.parts += [*curve_parts(store, {step["name"]: step["id"]}), *happened(store, step["id"])]
            section.parts += [*result_parts(result), *settings_parts(config)]
            if step["id"] in others:
                section.parts += evaluation_parts(others[step["id"]])
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
            yield from _records(value)


def _records(rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    """Flat records as a table, numbers first. Readings, one per (loop, layer) or position, are folded away."""
    kinds = {"": [row for row in rows if not is_reading(row)]}
    kinds |= {by: [row for row in rows if by in row] for by in READINGS}
    for by, found in kinds.items():
        said = (name for row in found for name, each in row.items() if _plain(each) and each not in ("", None))
        names = dict.fromkeys(name for name in said if any(row.get(name) is not False for row in found))
        columns = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
        table = Table(columns, [[_short(name, row.get(name)) for name in columns] for row in found])
        if found:
            yield Folded(f"Readings by {by}: {len(found)} (the dashboard draws them)", table) if by else table


def _short(name: str, value: Any) -> Any:
    return value[:8] if name.endswith("sha256") and isinstance(value, str) else value


def settings_parts(config: Mapping[str, Any]) -> Iterator[Part]:
    """What a step that trains was asked to do, by names that `--set` takes; nothing of other steps."""
    if "train" in config:
        flat = [[key, value] for key, value in sorted(flatten(config).items()) if value is not None]
        yield Folded(f"Settings ({len(flat)} that are not null)", Table(["setting", "value"], flat))


def happened(store: ResultsStore, run: str) -> Iterator[Table]:
    """Rollbacks, preemptions and evaluations that failed while a run trained."""
    rows = []
    for event in store.events(run):
        told = event.get("message") or f"{event.get('checkpoint')} {event.get('state')}: {event.get('reason')}"
        rows.append([utc(event["time"]), event["kind"], event.get("step"), told])
    if rows:
        yield Table(["when (UTC)", "what happened", "step", ""], rows)


def _evaluations(
    store: ResultsStore, storage: Storage, steps: Sequence[Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Evaluation rows of these steps' runs, by run, that no step here returned: those of `lt2 eval`."""
    ids = {step["id"] for step in steps}
    returned: set[tuple[Any, ...]] = set()
    for step in steps:
        if step["state"] == "done":
            result = storage.read_json(f"steps/{step['id']}/done.json")["result"]
            lists = [value for value in result.values() if isinstance(value, list)] if isinstance(result, dict) else []
            returned |= {_identity(result.get("run"), row) for rows in lists for row in rows if isinstance(row, dict)}
    later = [
        ((run, result_name(name, row)), row)
        for run, name, row in store.index().evals
        if run in ids and not is_reading(row) and row.get("value") is not None and name != "sweep"
        if _identity(run, row) not in returned
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for (run, result), row in counting(later).items():
        found.setdefault(run, []).append(row | {"result": result})
    return found


def _identity(run: Any, row: Mapping[str, Any]) -> tuple[Any, ...]:
    return run, *(row.get(key) for key in ("task", "metric", "n_loops", "value"))


def evaluation_parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
    yield "Other results of this run (± is one standard error):"
    columns = ["result", "value", "loops", "items", "limit", "data", "unit"]
    lines = []
    for row in sorted(rows, key=lambda row: row["result"]):
        value = ablations.plus_minus(row["value"], row.get("stderr"), digits=4)
        lines.append([row["result"], value, *(row.get(key) for key in ("n_loops", "n", "limit", "data", "unit"))])
    yield _without_empty(Table(columns, lines))


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
    known = store.index().runs
    configs = [known[runs[name]].config for name in tables if runs[name] in known]
    for metric, label in CURVES.items():
        lines = [
            Line(name, [(row["step"], row["mean"]) for row in rows if row["metric"] == metric and row["count"]])
            for name, rows in tables.items()
        ]
        drawn = [line for line in lines if line.points]
        if drawn:
            if all(unit_of(metric, config) for config in configs):
                label += " (nats)"
            if metric == "loss" and len(kinds := sorted({objective_of(config) for config in configs})) > 1:
                label += f" of different objectives ({', '.join(kinds)})"
            left_out = f", the first {MAX_LINES} of {len(runs)}" if len(runs) > MAX_LINES else ""
            yield Plot(line_chart(drawn, y=label), f"{label} by step{left_out}")


def sweep_parts(store: ResultsStore, sweep: Mapping[str, Any]) -> Iterator[Part]:
    """A sweep's table (see sweeps/step.py), ours and the paper's perplexity as dots, and the curves."""
    # Not the rows it holds: older ones count trials that were stopped early among those that failed.
    trials = [trial | {"metrics": _numbers(trial["metrics"])} for trial in sweep["trials"]]
    rows, with_paper = ablations.summarize(trials, sweep["paper"]), sweep["paper"] is not None
    labels = [" ".join((row["group"], row["label"])).strip() for row in rows]
    yield sweep["title"] + "."
    lines = []
    for row in rows:
        line = {"group": row["group"], "configuration": row["label"], "seeds": row["n"]}
        line |= {"stopped early": row["stopped"], "failed": row["failed"], "parameters": row["parameters"]}
        line["training FLOPs"] = amount(row[ablations.FLOPS]) if row[ablations.FLOPS] is not None else ""
        lines.append(line | ablations.score_cells(row, with_paper=with_paper))
    yield _without_empty(Table(list(lines[0]), [list(line.values()) for line in lines]))
    if any(row[f"{score}_p"] is not None for row in rows for score in ablations.SCORES):
        yield ablations.P_MEANS
    if with_paper:
        yield from ablations.paper_table(sweep["paper"]).notes
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    if names:
        whole = ablations.counts(rows)
        digits = {name: 0 if name in whole else 4 for name in names}
        more = [
            [label]
            + [ablations.plus_minus(*row["metrics"].get(name, (None, None)), digits=digits[name]) for name in names]
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


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """A trial's metrics; JSON says null of one that is not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _without_empty(table: Table) -> Table:
    kept = [i for i, _ in enumerate(table.columns) if any(row[i] not in ("", None, 0) for row in table.rows)]
    return Table([table.columns[i] for i in kept], [[row[i] for i in kept] for row in table.rows])
