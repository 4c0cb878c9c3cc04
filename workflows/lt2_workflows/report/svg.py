"""Two charts as inline SVG: lines over steps, and dots with error bars by category. No script, no fonts, no files."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
LETTER, MAX_LABEL = 7, 32  # width of a character; characters of a category's name
COLORS = ("#2f6bd8", "#c2334d", "#2a8a57", "#b8731a", "#7a4fc0", "#14808f", "#8a5a44", "#5b6472")
DASHES = ("", "7 4", "2 3")  # of the lines that have all colours once, twice, …


@dataclass(frozen=True)
class Line:
    """`points` are (x, y), x ascending; those that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Dots:
    """One value and half length of its error bar (None: no bar) per category; a value of None draws nothing."""

    name: str
    values: Sequence[float | None]
    errors: Sequence[float | None]
    hollow: bool = False


def line_chart(lines: Sequence[Line], *, y: str) -> str:
    """All lines over their steps on one pair of axes, with a legend. Raises ValueError if no point is finite."""
    kept = [Line(line.name, [p for p in line.points if all(map(math.isfinite, p))]) for line in lines]
    points = [point for line in kept for point in line.points]
    if not points:
        raise ValueError("no finite point to draw")
    steps, values = zip(*points)
    x_axis, y_axis = Axis.of(steps, whole=all(float(step).is_integer() for step in steps)), Axis.of(values)
    parts = [*_frame(y_axis, "step", y), *_x_ticks(x_axis)]
    for index, line in enumerate(kept):
        if len(line.points) == 1:  # a line through it would not be seen
            ((a, b),) = line.points
            place = f'cx="{_x(x_axis, a):.1f}" cy="{_y(y_axis, b):.1f}"'
            parts.append(f'<circle {place} r="3" fill="{_color(index)}"/>')
            continue
        path = " ".join(f"{_x(x_axis, a):.1f},{_y(y_axis, b):.1f}" for a, b in line.points)
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(index)} stroke-width="1.6"/>')
    return _svg([*parts, *_legend([line.name for line in kept], lines=True)], HEIGHT + _legend_height(len(kept)), y)


def dot_chart(categories: Sequence[str], series: Sequence[Dots], *, y: str) -> str:
    """One column of dots per category. Raises ValueError when there is nothing to draw."""
    ends = [
        value + sign * (error or 0)
        for dots in series
        for value, error in zip(dots.values, dots.errors, strict=True)
        for sign in (-1, 1)
        if value is not None and math.isfinite(value)
    ]
    if not ends:
        raise ValueError("no value to draw")
    axis = Axis.of(ends)
    parts = _frame(axis, "", y)
    room = (WIDTH - LEFT - RIGHT) / len(categories)
    longest = min(MAX_LABEL, max(map(len, categories)))
    upright = longest * LETTER >= room  # what does not fit beside each other
    bottom = HEIGHT - BOTTOM + 12 + longest * LETTER if upright else HEIGHT
    for column, category in enumerate(categories):
        middle = LEFT + room * (column + 0.5)
        shown = category if len(category) <= MAX_LABEL else category[: MAX_LABEL - 1] + "…"
        at, below = (middle + 4, 10) if upright else (middle, 18)
        parts.append(_text(at, HEIGHT - BOTTOM + below, shown, anchor="middle", turn=upright, title=category))
        for index, dots in enumerate(series):
            value, error = dots.values[column], dots.errors[column]
            if value is None or not math.isfinite(value):
                continue
            at = middle + 9 * (index - (len(series) - 1) / 2)
            if error:
                low, high = _y(axis, value - error), _y(axis, value + error)
                parts.append(
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{_color(index)}"/>'
                )
            fill = "none" if dots.hollow else _color(index)
            label = html.escape(f"{dots.name}, {category}: {value:.4g}" + (f" ± {error:.2g}" if error else ""))
            parts.append(
                f'<circle cx="{at:.1f}" cy="{_y(axis, value):.1f}" r="4" fill="{fill}" stroke="{_color(index)}" '
                f'stroke-width="1.5"><title>{label}</title></circle>'
            )
    names = [dots.name for dots in series] if len(series) > 1 else []
    return _svg([*parts, *_legend(names, top=bottom)], bottom + _legend_height(len(names)), y)


@dataclass(frozen=True)
class Axis:
    """A linear scale from `low` to `high` with round `ticks` inside."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], *, whole: bool = False) -> Axis:
        """An axis that holds `values`; whole: of steps, of which there are no halves."""
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - margin, high + margin
        size = 10.0 ** math.floor(math.log10((high - low) / 4))
        step = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 6)
        step = max(step, 1.0) if whole else step
        first = math.ceil(low / step)
        return cls(low, high, tuple(step * n for n in range(first, math.floor(high / step) + 1)))

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.at(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.at(value) * (HEIGHT - TOP - BOTTOM)


def _frame(axis: Axis, x: str, y: str) -> list[str]:
    parts = [_text(LEFT, HEIGHT - 6, x), _text(14, TOP + 10, y, turn=True)]
    for tick in axis.ticks:
        at = _y(axis, tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e7ec"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{tick:.6g}", anchor="end"))
    return parts


def _x_ticks(axis: Axis) -> list[str]:
    return [_text(_x(axis, tick), HEIGHT - BOTTOM + 18, f"{tick:,.6g}", anchor="middle") for tick in axis.ticks]


def _legend(names: Sequence[str], *, lines: bool = False, top: int = HEIGHT) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x, y = LEFT + (index % 2) * 320, top + 14 + 18 * (index // 2)
        if lines:
            parts.append(
                f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" {_stroke(index)} stroke-width="2.4"/>'
            )
        else:
            parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_color(index)}"/>')
        text_x = x + (28 if lines else 16)
        parts.append(_text(text_x, y, name if len(name) <= 44 else name[:43] + "…", title=name))
    return parts


def _legend_height(entries: int) -> int:
    return 12 * (entries > 0) + 18 * ((entries + 1) // 2)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLORS) % len(DASHES)]
    return f'stroke="{_color(index)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _text(x: float, y: float, text: str, *, anchor: str = "start", turn: bool = False, title: str = "") -> str:
    hover = f"<title>{html.escape(title)}</title>" if title and title != text else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    if turn:  # upright, ending at the point
        place = f'transform="translate({x:.1f},{y:.1f}) rotate(-90)" text-anchor="end"'
    return f"<text {place}>{html.escape(text)}{hover}</text>"


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#3a4250"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(label)}" {style}>' + "".join(parts) + "</svg>"
    )
