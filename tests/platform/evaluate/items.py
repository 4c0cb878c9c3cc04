"""Hand-made rows in the schemas of real benchmarks: few, short, and different enough that scores differ."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = [
    "river",
    "stone",
    "lamp",
    "cloud",
    "engine",
    "garden",
    "mirror",
    "window",
    "paper",
    "winter",
    "copper",
    "violin",
]


def arc(n: int = 6) -> list[dict]:
    rows = []
    for i in range(n):
        options = [WORDS[(i + j * 5) % len(WORDS)] * (1 + j % 2) for j in range(3 + i % 2)]
        labels = list("ABCD"[: len(options)])
        question = f"What is number {i} " + "so very " * (i % 3) + "called?"
        choices = {"text": options, "label": labels}
        rows.append({"id": str(i), "question": question, "choices": choices, "answerKey": labels[i % len(labels)]})
    return rows


def copa(n: int = 5) -> list[dict]:
    return [
        {
            "premise": f"The {WORDS[i]} fell.", "choice1": f"It was {WORDS[i + 1]}.", "choice2": "Someone pushed it.",
            "question": "cause" if i % 2 else "effect", "idx": i, "label": i % 2,
        }
        for i in range(n)
    ]  # fmt: skip


def piqa(n: int = 5) -> list[dict]:
    return [
        {
            "goal": f"How do you clean a {WORDS[i]}?", "sol1": f"Wipe the {WORDS[i]} with a damp cloth.",
            "sol2": f"Throw the {WORDS[i]} at the {WORDS[i + 1]}.", "label": i % 2,
        }
        for i in range(n)
    ]  # fmt: skip


def nq(n: int = 4) -> list[dict]:
    return [{"question": f"who owns the {WORDS[i]}", "answer": [WORDS[i + 1], "nobody"]} for i in range(n)]


def choices(n: int = 4) -> list[dict]:
    return [{"query": f"A {WORDS[i]} is", "choices": ["small", "rather large"], "gold": i % 2} for i in range(n)]


def write(folder: Path, **tasks: list[dict]) -> dict[str, str]:
    """task -> path of a jsonl file with its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for task, rows in tasks.items():
        path = folder / f"{task}-validation.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        places[task] = str(path)
    return places
