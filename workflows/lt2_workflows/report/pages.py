"""What a report is made of, and how it is written: as Markdown and as one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lt2_workflows.console import number

MAX_ROWS = 200


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


@dataclass(frozen=True)
class Folded:
    """A long table that is opened by who wants it."""

    summary: str
    table: Table


Part = str | Table | Plot | Printed | Folded


@dataclass
class Section:
    """A heading, and under it paragraphs (str) and the rest."""

    title: str
    parts: list[Part] = field(default_factory=list)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
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
            elif isinstance(part, Folded):
                lines += ["<details>", f"<summary>{html.escape(part.summary)}</summary>", ""]
                lines += [*_markdown_table(part.table), "", "</details>"]
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
figure {{ margin: 1rem 0 }} figcaption, summary {{ color: #5b6472 }} summary {{ cursor: pointer }}
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
            elif isinstance(part, Folded):
                head = f"<summary>{html.escape(part.summary)}</summary>"
                body.append(f"<details>{head}{_html_table(part.table)}</details>")
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
