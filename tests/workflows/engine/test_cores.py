"""How many steps of a graph can run side by side."""

from dataclasses import dataclass

import pytest

from lt2_workflows.engine.cores import side_by_side
from lt2_workflows.loading import load_workflow


@dataclass
class Step:
    needs: tuple[str, ...] = ()


def graph(**needs: str) -> dict[str, Step]:
    return {name: Step(tuple(of.split())) for name, of in needs.items()}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (graph(a="", b="a", c="b"), {"a": 1, "b": 1, "c": 1}),
        (graph(a="", b=""), {"a": 2, "b": 2}),
        # d may run beside the longest of the chain b -> c, but never beside both.
        (graph(a="", b="a", c="b", d="a", e="c d"), {"a": 1, "b": 2, "c": 2, "d": 2, "e": 1}),
        # What is needed but not run does not count.
        (graph(b="a", c="b"), {"b": 1, "c": 1}),
        # p -> x, y and q -> y: beside x run q alone, or y; beside q run p, or x.
        (graph(p="", q="", x="p", y="p q"), {"p": 2, "q": 2, "x": 2, "y": 2}),
        (graph(root="", **{f"probe-{i}": "root" for i in range(5)}), {"root": 1} | {f"probe-{i}": 5 for i in range(5)}),
    ],
)
def test_how_many_steps_run_side_by_side(steps, expected):
    assert side_by_side(steps) == expected


def test_the_widest_set_is_found_by_brute_force_too():
    steps = load_workflow("distill_small").steps
    before: dict[str, set[str]] = {}
    for name, step in steps.items():
        before[name] = {*step.needs}.union(*(before[need] for need in step.needs))

    def widest(names: list[str]) -> int:
        if not names:
            return 0
        first, *rest = names
        apart = [name for name in rest if name not in before[first] and first not in before[name]]
        return max(1 + widest(apart), widest(rest)) if len(apart) < len(rest) else 1 + widest(rest)

    found = side_by_side(steps)
    for name in ("teacher", "probe-0", "select", "evaluate-stage3", "retention"):
        apart = [n for n in steps if n != name and n not in before[name] and name not in before[n]]
        assert found[name] == 1 + widest(apart)
