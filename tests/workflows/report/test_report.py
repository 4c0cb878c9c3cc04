"""Reports hold what storage holds, in Markdown and in one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.evaluate.ablations import plus_minus
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.executor import run
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import load_workflow, workflow_from_record
from lt2_workflows.report.svg import Axis, Dots, Line, dot_chart, line_chart
from lt2_workflows.report.write import (
    Section,
    Table,
    as_html,
    as_markdown,
    curve_parts,
    result_parts,
    sweep_parts,
    write_report,
)
from lt2_workflows.sweeps.config import SweepStep
from lt2_workflows.sweeps.step import write_table
from tests.workflows.conftest import FAKE_STEPS


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "storage"))


class Balanced(HTMLParser):
    """Raises when tags do not match."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(src|href)=|<script|url\(", text), "a report needs nothing but itself"


def test_report_of_a_workflow_with_a_failed_step(storage):
    workflow = load_workflow(f"{FAKE_STEPS}:branches", ["left.fail=error"])
    run(workflow, storage)
    with ResultsStore(storage).create_run(workflow.steps["root"].id, {"config": {}}) as writer:
        for step in range(1, 6):
            writer.log(step, {"loss": 5.0 / step, "validation_loss": 4.0})
    for name, code in (("root", {"git": "abc", "dirty": "0123456789"}), ("left", {"git": "abc", "dirty": None})):
        path = f"{workflow.steps[name].folder}/attempts/1/state.json"
        state = storage.read_json(path)
        storage.write_json(path, state | {"provenance": code | {"python": "3.11", "packages": {"torch": f"of {name}"}}})
    folder = write_report(storage, "branches")
    assert folder == f"workflows/{workflow.id}/report"
    text = storage.read_bytes(f"{folder}/report.md").decode()
    made_with = re.search("Code and packages: git (.*), torch (.*)\\.\n", text)
    assert made_with is not None
    assert made_with[1].startswith("abc with uncommitted changes (012345) and abc")
    assert made_with[2].startswith("of root and of left")
    assert re.search(r"\| left \| failed \| 1 \| \d+s \| left-", text)
    assert "left: ValueError: this step fails (log: " in text
    assert "![loss (nats) by step](figure-1.svg)" in text
    digest = storage.read_json(f"{workflow.steps['root'].folder}/done.json")["result"]["digest"]
    assert f"| digest | {digest} |" in text
    page = storage.read_bytes(f"{folder}/report.html").decode()
    check_html(page)
    assert digest in page
    for number in (1, 2):
        figure = storage.read_bytes(f"{folder}/figure-{number}.svg").decode()
        ElementTree.fromstring(figure)
        assert figure in page


def test_document_step_reports_what_it_names_and_all_that_needs(storage):
    record = load_workflow(f"{FAKE_STEPS}:branches").record()
    record["steps"]["document"] = {"type": "document", "steps": [{"step": "leaf"}]}
    workflow = workflow_from_record(record, source="test")
    outcomes = run(workflow, storage)
    assert outcomes["document"].state == "done"
    text = storage.read_bytes(f"{workflow.steps['document'].folder}/out/report.md").decode()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == ["Steps", "root", "left", "leaf"]


def test_which_workflow_is_meant(storage):
    workflows = [load_workflow(f"{FAKE_STEPS}:chain", [f"first.text={text}"]) for text in ("b", "a")]
    for each in workflows:
        run(each, storage)
    older, newest = (each.id for each in workflows)
    said = CliRunner().invoke(app, ["report", "chain", "--storage", storage.root])
    assert said.stderr == f"the newest of 2 workflows 'chain'; the others: {older}\n"
    assert said.stdout == f"{storage.join('workflows', newest, 'report', 'report.html')}\n"
    with pytest.raises(ConfigError, match="2 workflows are called 'chain'; give the id of one: chain-"):
        write_report(storage, "chain")
    with pytest.raises(ConfigError, match="no workflow 'chains'"):
        write_report(storage, "chains")


def test_results_become_tables():
    parts = list(result_parts({"loss": 1.5, "splits": {"train": {"tokens": 7}}, "rows": [{"a": 1, "b": "x"}]}))
    assert [(list(part.columns), [list(row) for row in part.rows]) for part in parts] == [
        (["", "value"], [["loss", 1.5], ["splits.train.tokens", 7]]),
        (["a", "b"], [[1, "x"]]),
    ]


def test_what_a_step_printed_is_kept_as_it_is():
    (part,) = result_parts({"text": "\na  b\n1  <2>\n", "rows": [{"a": 1}]})
    section = Section("s", [part])
    assert "```\na  b\n1  <2>\n```" in as_markdown("t", [section])
    assert "a  b\n1  &lt;2&gt;</pre>" in as_html("t", [section])


def test_names_cannot_break_the_page():
    section = Section(
        "<script>alert(1)</script>",
        [
            "a & b",
            Table(
                ["x|y"],
                [
                    [
                        "<b>",
                    ],
                    ["a|b\nc"],
                ],
            ),
        ],
    )
    page = as_html("t", [section])
    check_html(page.replace("&lt;script", ""))
    assert "<b>" not in page
    assert "| a\\|b c |" in as_markdown("t", [section])


def test_sweep_has_the_papers_numbers_beside_ours(storage):
    trials = [
        {"name": f"1:4-{state}-{ppl}", "group": "", "label": "1:4", "state": state, "parameters": 1000, "run": None,
         "metrics": {"perplexity/perplexity": ppl} if ppl else {}}
        for ppl, state in ((11.5, "done"), (12.5, "done"), (None, "stopped"))
    ]  # fmt: skip
    parts = list(sweep_parts(ResultsStore(storage), {"title": "Ratio", "paper": "ratio", "trials": trials}))
    table = next(part for part in parts if isinstance(part, Table))
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "configuration": "1:4", "seeds": 2, "stopped early": 1, "parameters": 1000, "PPL": "12.00 ± 0.71", 
        "PPL, paper": 9.31, "Avg, paper": 61.39,
    }  # fmt: skip
    captions = [part.caption for part in parts if hasattr(part, "caption")]
    assert captions == ["perplexity, ours", "perplexity, paper", "average of eight tasks (%), paper"]


def test_a_sweep_whose_trials_diverged_is_json_and_reads_as_it_did(storage):
    sweep = SweepStep(steps=load_workflow(f"{FAKE_STEPS}:chain").record()["steps"], grid={"first.lines": (1, 2)})
    workflow = Workflow("w", {"sweep": sweep})
    context = StepContext(storage, workflow, workflow.steps["sweep"])
    trials = [
        {"name": label, "group": "", "label": label, "seed": None, "state": "done", "parameters": None, "run": None,
         "metrics": {"perplexity/perplexity": ppl}}
        for label, ppl in (("a", 11.5), ("b", math.inf), ("c", math.nan))
    ]  # fmt: skip
    assert "inf" in write_table(sweep, trials, context)["text"]
    text = storage.read_bytes(f"{workflow.steps['sweep'].folder}/out/sweep.json")
    kept = json.loads(text, parse_constant=pytest.fail)  # told of NaN and Infinity
    assert [trial["metrics"]["perplexity/perplexity"] for trial in kept["trials"]] == [11.5, None, None]
    older = kept | {"trials": trials}
    for whole in (kept, older):
        table = next(part for part in sweep_parts(ResultsStore(storage), whole) if isinstance(part, Table))
        assert [row[table.columns.index("PPL")] for row in table.rows][0] == "11.50"
        assert {row[table.columns.index("PPL")] for row in table.rows[1:]} <= {"nan", "inf"}


def test_charts():
    chart = line_chart([Line("a<b", [(0, 1.0), (10, 2.0), (20, float("nan"))])], y="loss")
    tree = ElementTree.fromstring(chart)
    (line,) = tree.iter("{http://www.w3.org/2000/svg}polyline")
    (x0, y0), (x1, y1) = (map(float, pair.split(",")) for pair in line.get("points").split())
    assert x0 < x1  # rightwards
    assert y0 > y1  # upwards
    dots = ElementTree.fromstring(dot_chart(["p", "q"], [Dots("ours", [1.0, None], [0.1, None])], y="PPL"))
    assert len(list(dots.iter("{http://www.w3.org/2000/svg}circle"))) == 1
    names = [f"Looped Hybrid (Full + mixer {index})" for index in range(16)]
    many = dot_chart(names, [Dots("ours", [1.0] * 16, [None] * 16)], y="PPL")
    assert all(f">{name}</text>" in many for name in names)  # upright, where they have no room beside each other
    with pytest.raises(ValueError, match="no finite point"):
        line_chart([Line("a", [(0, float("inf"))])], y="")


def test_a_single_logged_step_is_a_dot_at_a_whole_number():
    tree = ElementTree.fromstring(line_chart([Line("short", [(6, 0.5), (7, float("nan"))])], y="loss"))
    of = lambda tag: list(tree.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))  # noqa: E731
    assert (len(of("circle")), len(of("polyline"))) == (1, 0)
    ticks = [text.text for text in of("text") if text.get("text-anchor") == "middle"]
    assert ticks == ["6"]
    assert Axis.of([1, 3], whole=True).ticks == (1.0, 2.0, 3.0)


def test_tokens_per_second_have_no_ten_thousandths():
    assert plus_minus(10688.4457, 5680.9746, digits=4) == "10688 ± 5681"
    assert plus_minus(3.2298, 0.1102, digits=4) == "3.2298 ± 0.1102"


def test_each_of_the_lines_in_a_chart_looks_like_no_other_and_like_its_legend():
    chart = ElementTree.fromstring(line_chart([Line(f"r{i}", [(0, i), (1, i)]) for i in range(16)], y="loss"))
    of = lambda tag: list(chart.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))  # noqa: E731
    look = lambda element: (element.get("stroke"), element.get("stroke-dasharray"))  # noqa: E731
    lines = [look(line) for line in of("polyline")]
    assert len(set(lines)) == 16
    assert [dash for _, dash in lines[:8]] == [None] * 8
    assert [look(line) for line in of("line") if line.get("stroke-width")] == lines


@pytest.mark.parametrize("values", [(9.03, 10.02), (0.0, 0.0), (5.0, 5.0), (-1e-9, 1e-9), (1e20, 3e20)])
def test_ticks_are_round_and_inside(values):
    axis = Axis.of(values)
    assert 2 <= len(axis.ticks) <= 7
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks)
    assert axis.low < min(values) or axis.high > max(values)


def test_a_training_step_says_its_settings_what_happened_and_what_others_evaluated(storage):
    workflow = load_workflow(f"{FAKE_STEPS}:branches", [])
    run(workflow, storage)
    step = workflow.steps["root"]
    spec = storage.read_json(f"{step.folder}/spec.json")
    spec["config"] |= {"train": {"lr": 0.003, "grad_clip": None}}
    storage.write_json(f"{step.folder}/spec.json", spec)
    mine = {"task": "arc_easy", "metric": "acc", "n_loops": 2, "value": 0.25}
    done = storage.read_json(f"{step.folder}/done.json")
    done["result"] |= {"run": step.id, "rows": [mine]}
    storage.write_json(f"{step.folder}/done.json", done)
    store = ResultsStore(storage)
    store.create_run(step.id, {"config": {}}).close()
    store.log_event(step.id, "rollback", {"step": 7, "message": "step 7: loss nan"})
    store.log_event(step.id, "evaluation", {"checkpoint": "step-5", "state": "failed", "reason": "out of memory"})
    store.log_eval(step.id, "validation", [mine])  # this workflow's own: it stands among the step's results
    whole = {"task": "piqa", "metric": "acc", "n_loops": 2, "n": 1838, "limit": None, "step": 9}
    store.log_eval(step.id, "validation", [whole | {"value": 0.625, "stderr": 0.0125}])
    store.log_eval(step.id, "validation", [whole | {"value": 0.1, "n": 10, "limit": 10}])  # a quick look, later
    store.log_eval(step.id, "diagnostics", [{"metric": "rms", "value": 2.0, "loop": 0, "layer": 1}])
    text = storage.read_bytes(f"{write_report(storage, 'branches')}/report.md").decode()
    assert "| train.lr | 0.003 |" in text
    assert "grad_clip" not in text
    assert "| rollback | 7 | step 7: loss nan |" in text
    assert "| evaluation |  | step-5 failed: out of memory |" in text
    assert "Other results of this run" in text  # a stage's own distance to its teacher, too
    assert "| result | value | loops | items |" in text
    assert "| validation/piqa/acc | 0.6250 ± 0.0125 | 2 | 1,838 |" in text
    assert "validation/arc_easy" not in text
    assert text.count("0.25 |") == 1
    check_html(storage.read_bytes(f"workflows/{workflow.id}/report/report.html").decode())


def test_an_evaluation_shows_numbers_first_and_folds_readings_away():
    sha = "a" * 64
    row = {
        "task": "piqa",
        "early_exit": False,
        "flops_per_token": 6243648.0,
        "metric": "acc",
        "value": 0.0,
        "stderr": 0.1,
    }
    rows = [row | {"task_sha256": sha, "limit": None}, {"metric": "rms", "value": 1.5, "loop": 0, "layer": 3}]
    table, folded = result_parts({"rows": rows})
    assert (list(table.columns), table.rows) == (
        ["task", "metric", "value", "stderr", "flops_per_token", "task_sha256"],
        [["piqa", "acc", 0.0, 0.1, 6243648.0, "aaaaaaaa"]],
    )
    section = Section("s", [table, folded])
    text = as_markdown("t", [section])
    assert "| 6,243,648 |" in text
    assert "<summary>Readings by layer: 1 (the dashboard draws them)</summary>\n\n| metric" in text
    assert "| rms | 1.5 | 0 | 3 |" in text
    check_html(page := as_html("t", [section]))
    assert "<details><summary>Readings by layer: 1 (" in page


def test_a_loss_has_a_unit_only_where_the_objective_gives_it_one(storage):
    store = ResultsStore(storage)
    for objective in ("align", "distill"):
        with store.create_run(objective, {"config": {"train": {"objective": {"type": objective}}}}) as writer:
            writer.log(1, {"loss": 0.5})
    told = lambda *runs: [plot.caption for plot in curve_parts(store, {run: run for run in runs})]  # noqa: E731
    assert told("distill") == ["loss (nats) by step"]
    assert told("align") == ["loss by step"]
    assert told("align", "distill") == ["loss of different objectives (align, distill) by step"]
