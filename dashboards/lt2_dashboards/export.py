"""A figure as one HTML file that needs neither server nor network."""

from __future__ import annotations

import html
import json
import time
from pathlib import Path
from typing import Any

from lt2_dashboards.figures import Figure

STATIC = Path(__file__).parent / "static"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1b1f27 }}
h1 {{ font-size: 1.2rem }} #chart {{ height: 440px }} p, caption {{ color: #5b6472 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #e4e7ec }}
</style></head><body>
<h1>{title}</h1><div id="chart" role="img" aria-label="{title}"></div>{notes}
<details><summary>Table ({count} rows)</summary>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>
<p>From {origin}, {date}.</p>
<script>{echarts}</script>
<script type="module">
const figure = {figure};
{theme}
const place = document.getElementById("chart");
place.style.height = `${{Math.max(440, 230 * rowsOf(figure.option))}}px`;
const chart = echarts.init(place, null, {{ renderer: "svg" }});
chart.setOption(themed(figure.option, LIGHT, {{ width: place.clientWidth || undefined }}));
addEventListener("resize", () => chart.resize());
</script></body></html>
"""


def static_html(figure: Figure, *, origin: str) -> str:
    """The chart, its notes and its table in one file (about 1.1 MB, which is ECharts)."""
    theme = (STATIC / "theme.js").read_text().replace("export ", "")
    return _PAGE.format(
        title=html.escape(figure.title),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in [*_missing(figure), *figure.notes]),
        count=len(figure.rows),
        head="".join(f"<th>{html.escape(column)}</th>" for column in figure.columns),
        body="".join("<tr>" + "".join(f"<td>{_text(v)}</td>" for v in row) + "</tr>" for row in figure.rows),
        origin=html.escape(origin),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        echarts=(STATIC / "vendor" / "echarts.min.js").read_text().replace("</script", "<\\/script"),
        figure=_script_json({"option": figure.option}),
        theme=theme,
    )


def _missing(figure: Figure) -> list[str]:
    return [f"This store has no data for this figure yet. To produce it: {figure.produce}"] if figure.produce else []


def _text(value: Any) -> str:
    return "" if value is None else html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))


def _script_json(value: Any) -> str:
    """JSON that no HTML parser can mistake for the end of the script."""
    text = json.dumps(value, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
