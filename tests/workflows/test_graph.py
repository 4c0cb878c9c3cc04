"""What identifies a step, and which graphs are refused."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from lt2.config import Config, ConfigError
from lt2_workflows.graph import Ref, Resources, StepConfig, Workflow, canonical


class NodeRef(Ref):
    accepts: ClassVar[str] = "node"


class Inner(Config):
    type: Literal["inner"] = "inner"
    size: int = 1
    inputs: tuple[NodeRef | str, ...] = ()


class Node(StepConfig):
    produces: ClassVar[str] = "node"
    type: Literal["node"] = "node"
    value: int = 0
    inner: Inner = Inner()
    table: dict[str, NodeRef] = {}


class Node2(Node):
    """The same step one release later: a new field, with the default that describes the old behaviour."""

    dropout: float = 0.0


class Sink(StepConfig):
    type: Literal["sink"] = "sink"
    source: NodeRef | str


class Readers(StepConfig):
    type: Literal["readers"] = "readers"
    sources: list[NodeRef]


class Reader(StepConfig):
    type: Literal["reader"] = "reader"
    source: NodeRef = NodeRef(step="a")
    pair: Inner = Inner(inputs=(NodeRef(step="b"),))


def two(first: StepConfig, **second) -> Workflow:
    return Workflow("two", {"b": Node(inner=Inner(inputs=(NodeRef(step="a"),)), **second), "a": first})


def test_dependencies_are_found_at_any_depth_and_ordered():
    workflow = Workflow(
        "deep",
        {"c": Node(table={"x": NodeRef(step="b")}), "b": Node(inner=Inner(inputs=(NodeRef(step="a"),))), "a": Node()},
    )
    assert list(workflow.steps) == ["a", "b", "c"]
    assert [workflow.steps[name].needs for name in "abc"] == [(), ("a",), ("b",)]
    listed = Readers(sources=[NodeRef(step=name) for name in "aba"])
    assert Workflow("w", {"a": Node(), "b": Node(), "c": listed}).steps["c"].needs == ("a", "b")


def test_defaults_and_new_defaulted_fields_leave_the_fingerprint_alone():
    old = two(Node(value=3)).steps
    assert two(Node(value=3, inner=Inner(size=1))).steps["a"].fingerprint == old["a"].fingerprint
    assert two(Node2(value=3)).steps["b"].fingerprint == old["b"].fingerprint
    assert two(Node2(value=3, dropout=0.1)).steps["a"].fingerprint != old["a"].fingerprint


def test_fingerprint_of_one_config_never_changes():
    # Committed: a change here would make every finished step in the world unfindable.
    assert two(Node(value=3)).steps["b"].id == "b-38ecc99e"
    assert two(Node(value=3)).id == "two-a64b9909"
    assert Workflow("w", {"a": Node()}).id != Workflow("w", {"b": Node()}).id


def test_resources_are_not_part_of_the_identity():
    assert two(Node(resources=Resources(num_workers=8, retries=9))).id == two(Node()).id


def test_what_is_upstream_changes_what_is_downstream():
    one, other = two(Node(value=1)).steps, two(Node(value=2)).steps
    assert one["b"].config == other["b"].config
    assert one["b"].fingerprint != other["b"].fingerprint


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_a_default_refers_to_is_upstream_too(name):
    nodes = {"a": Node(), "b": Node(), "c": Reader()}
    one, other = (Workflow("w", nodes | {name: Node(value=value)}).steps for value in (0, 1))
    assert set(one["c"].needs) == {"a", "b"}
    assert one["c"].fingerprint != other["c"].fingerprint


def test_fields_that_json_does_not_know_are_part_of_it_as_pydantic_writes_them():
    class Odd(StepConfig):
        type: Literal["odd"] = "odd"
        path: Path
        days: frozenset[date]

    days = [date(2026, 1, day) for day in range(1, 9)]
    one, other = (Odd(path=Path("x"), days=frozenset(order)) for order in (days, days[::-1]))
    assert canonical(one, {})["path"] == "x"
    assert set(canonical(one, {})["days"]) == {f"2026-01-0{day}" for day in range(1, 9)}
    assert canonical(one, {}) == canonical(other, {})
    assert Workflow("w", {"a": one}).id == Workflow("w", {"a": Odd.model_validate(one.model_dump(mode="json"))}).id


def test_type_tags_stay_in_the_canonical_form():
    assert canonical(Node(inner=Inner(size=2)), {}) == {"type": "node", "inner": {"type": "inner", "size": 2}}


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"a": Node(table={"x": NodeRef(step="b")})}, "a: refers to step 'b', which is not in"),
        (
            {"a": Sink(source="x"), "b": Sink(source=NodeRef(step="a"))},
            "b: needs a node, but step 'a' produces nothing",
        ),
        (
            {"a": Node(table={"x": NodeRef(step="b")}), "b": Node(table={"x": NodeRef(step="a")})},
            "steps refer to each other",
        ),
        ({"A b": Node()}, "'A b' is not a usable name"),
        ({"a/b": Node()}, "'a/b' is not a usable name"),
        ({"a": {"type": "node"}}, "step a is a dict, not a step's config"),
        ([Node()], "steps are given as a dict, name -> step"),
    ],
)
def test_bad_graphs(configs, message):
    with pytest.raises(ConfigError, match=message):
        _ = Workflow("bad", configs).steps
