"""What a driver says on the terminal: one line per event, and a progress line that is rewritten in place."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from lt2_platform.json_values import finite

LOG_EVERY_S = 10.0  # without a terminal, a step's progress is one line now and then


@dataclass
class Console:
    """Prints the executor's events to `stream`, from any thread."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _progress_shown: int = 0
    _last_progress: dict[str, float] = field(default_factory=dict)

    def say(self, event: dict[str, Any]) -> None:
        with self._lock:
            if event["event"] == "progress" and "notice" not in event["values"]:
                self._progress(event)
                return
            line = describe(event)
            if line:
                self.clear()
                print(line, file=self.stream, flush=True)

    def _progress(self, event: dict[str, Any]) -> None:
        line = f"{event['step']:<10} {progress_line(event['values'])}"
        if self.stream.isatty():
            self.stream.write("\r" + line.ljust(self._progress_shown))
            self.stream.flush()
            self._progress_shown = len(line)
        elif "waiting" in event["values"] or self._due(event["step"]):
            self._last_progress[event["step"]] = time.monotonic()
            print(line, file=self.stream, flush=True)

    def _due(self, step: str) -> bool:
        """Whether a line is due, for each step by itself: one that says much must not silence the others."""
        return time.monotonic() - self._last_progress.get(step, -LOG_EVERY_S) >= LOG_EVERY_S

    def clear(self) -> None:
        """Take a progress line off the terminal, before anything else is printed there."""
        if self._progress_shown:
            self.stream.write("\r" + " " * self._progress_shown + "\r")
            self._progress_shown = 0


def describe(event: dict[str, Any]) -> str | None:
    """The line for an event, or None for one not worth a line."""
    kind, step = event["event"], f"{event['step']:<10}"
    if kind == "progress":
        return f"{step} {event['values']['notice']}"  # told once, so it stays
    if kind == "started":
        again = f" (attempt {event['attempt']})" if event["attempt"] > 1 else ""
        return f"{step} started{again}"
    if kind == "done":
        return f"{step} done"
    if kind == "skipped":
        drift = f"; made with other code or packages: {', '.join(event['drift'])}" if event["drift"] else ""
        stale = f"\n{'':<10} {event['stale']}" if event.get("stale") else ""
        return f"{step} already finished, skipped{drift}{stale}"
    if kind == "waiting":
        held, silent = f"{step} is being run by {event['holder']}", f"if that stays silent for {event['ttl_s']:.0f} s"
        return (
            f"{held}: taking over {silent}" if event.get("only_looks") else f"{held}: waiting, and taking over {silent}"
        )
    if kind == "retry":
        why = "was lost" if event["infrastructure"] else "failed"
        return f"{step} attempt {event['attempt']} {why}, trying again: {event['error']}\n{'':<10} log: {event['log']}"
    if kind == "failed":
        return f"{step} failed in attempt {event['attempt']}: {event['error']}\n{'':<10} log: {event['log']}"
    if kind == "blocked":
        return f"{step} not run: {event['error']}"
    if kind == "stopping":
        return f"{step} saves a checkpoint and stops within {event['wait_s']:.0f} s; interrupt again to stop at once"
    if kind == "interrupted" and event.get("error"):
        return f"{step} interrupted: {event['error']}"
    return f"{step} {kind}"


def progress_line(values: dict[str, Any]) -> str:
    """'step 120/400  loss 3.214  4,210 tokens/s  ETA 1m20s' from whatever of it is known.

    counts: what `step` and `steps` are numbers of, where it is not the step's own training steps.
    """
    parts = []
    if "step" in values:
        parts.append(f"{values.get('counts', 'step')} {_of(values, 'step', 'steps')}")
    if values.get("loss") is not None:
        parts.append(f"loss {values['loss']:.4f}")
    if values.get("tokens_per_s") is not None:
        parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
    if values.get("eta_s") is not None:
        parts.append(f"ETA {duration(values['eta_s'])}")
    for text in ("message", "waiting"):
        if values.get(text):
            parts.append(values[text])
    for one, all_ in (("batch", "batches"), ("layer", "layers"), ("part", "parts")):
        if one in values:
            parts.append(f"{one} {_of(values, one, all_)}")
    return "  ".join(parts)


def _of(values: dict[str, Any], one: str, all_: str) -> str:
    return f"{values[one]:,}" + (f"/{values[all_]:,}" if all_ in values else "")


def duration(seconds: float) -> str:
    """'45s', '1m20s', '3h05m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def utc(seconds: float | None) -> str:
    """'2026-11-30 11:05' of unix seconds; "" for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def number(value: float) -> str:
    """A number in a table: five digits; from a thousand on with separators and at most two decimals."""
    return f"{value:,.{0 if value.is_integer() else 2}f}" if abs(value) >= 1000 else f"{value:.5g}"


def as_json(value: Any) -> str:
    """`value` for `--json`: NaN and infinities, which JSON does not have, are null."""
    return json.dumps(finite(value), indent=2, allow_nan=False)


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Aligned text columns; numbers to the right, yes and no in words."""
    if not rows:
        return "(nothing yet)"
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(title), *(len(line[i]) for line in cells)) for i, title in enumerate(columns)]
    numeric = [all(_is_number(row.get(column)) for row in rows) for column in columns]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(text.rjust(w) if right else text.ljust(w) for text, w, right in zip(line, widths, numeric)).rstrip()
        for line in lines
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | None) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict | list):
        return json.dumps(value)
    first, *more = str(value).splitlines() or [""]
    return f"{first} …" if more else first
