"""The report on what students keep, and the items they are asked."""

import numpy as np
import pytest
from matplotlib.axes import Axes

from lt2.config import ConfigError
from lt2_platform.data import prepare
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.distill.items import continuations, make_pack
from lt2_platform.distill.retention import draw, retention_rows
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.validation import held_out_rows
from lt2_platform.storage import Storage
from tests.platform.data.corpora import in_turn

ROWS = [
    {"task": "perplexity", "metric": "loss", "value": 1.0, "n_loops": 2},
    {"task": "perplexity", "metric": "perplexity", "value": 4.0, "n_loops": 2},
    {"task": "continuation", "metric": "acc", "value": 0.8, "n_loops": 2},
    {"task": "niah", "metric": "contains", "value": 0.0, "n_loops": 2},
    {"task": "niah", "metric": "context_cut", "value": 3.0, "n_loops": 2},
]


def test_retention_is_the_share_of_the_teachers_score():
    student = [row | {"value": {"perplexity": 5.0, "acc": 0.6}.get(row["metric"], 0.5)} for row in ROWS]
    found = retention_rows(ROWS, {"a": student, "b": student[:2]})
    assert [(row["task"], row["metric"]) for row in found] == [
        ("perplexity", "perplexity"),
        ("continuation", "acc"),
        ("niah", "contains"),
    ]
    shares = [row["students"].get("a", {}).get("retention") for row in found]
    assert shares[:2] == pytest.approx([0.8, 0.75])
    assert shares[2] is None  # nothing can be kept of nothing
    assert found[1]["students"].keys() == {"a"}
    inside = [{"task": "diagnostics", "metric": "rms", "value": 1.0 + n, "n_loops": 2, "layer": n} for n in range(2)]
    assert retention_rows([*ROWS, *inside], {"a": [*student, *inside]})[2:] == found[2:]  # readings are no scores
    assert draw(found, ["a", "b"], "title").startswith(b"\x89PNG")


def test_a_student_is_compared_at_the_teachers_depth():
    def at(value, n_loops, early_exit):
        return {"task": "t", "metric": "acc", "value": value, "n_loops": n_loops, "early_exit": early_exit}

    teacher = [at(0.5, 2, False), at(0.6, 4, False), at(0.8, 4, True)]
    found = retention_rows(teacher, {"a": [at(0.4, 4, True), at(0.3, 4, False), at(0.2, 1, False)]})
    assert [row["students"].get("a", {}).get("retention") for row in found] == [None, 0.5, 0.5]
    assert [row["task"] for row in found] == ["t, 2 loops", "t, 4 loops", "t, 4 loops, early exit"]
    assert [row["task"] for row in retention_rows(teacher[1:2], {})] == ["t"]


def test_bars_are_percent_of_the_teacher_beside_each_other(monkeypatch):
    bars, bar = [], Axes.bar

    def drawn(axes, at, heights, width, label):
        bars.append((label, heights))
        return bar(axes, at, heights, width, label=label)

    monkeypatch.setattr(Axes, "bar", drawn)
    kept = {"a": {"retention": 0.5, "value": 1.0}, "b": {"retention": None, "value": 0.0}}
    rows = [{"task": "t, 4 loops", "metric": "acc", "students": kept}, {"task": "u", "metric": "acc", "students": {}}]
    named, ticks = [], Axes.set_xticks
    monkeypatch.setattr(
        Axes, "set_xticks", lambda axes, at, names, **how: (named.extend(names), ticks(axes, at, names))
    )
    draw(rows, ["a", "b"], "title")
    assert bars == [("a", [50.0]), ("b", [0])]  # of what nobody has a share there is no bar
    assert named == ["t\n4 loops\nacc"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("items")
    for number in range(40):
        words = [f"{(number * 37 + place * place) % 997}" for place in range(120)]
        (root / f"{number}.txt").write_text(" ".join(words))
    config = prepare.PrepareConfig(
        source=str(root / "*.txt"), tokenizer="byte", seq_len=256, validation_fraction=0.5, shard_sequences=64
    )
    with pytest.MonkeyPatch.context() as patch:
        in_turn(patch)
        prepare.prepare(config, str(root / "data"))
    return PackedDataset(str(root / "data"), "validation")


def test_the_right_choice_is_what_follows_in_the_document(dataset):
    table = continuations(dataset, load_tokenizer("byte"), "all", 12, 60, 12, 0).to_pylist()
    assert 4 <= len(table) <= 12
    text = "".join(
        load_tokenizer("byte").decode(np.asarray(row).tolist())
        for row in dataset.batch(range(dataset.n_sequences))["tokens"][:, :-1]
    )
    for row in table:
        assert len(row["choices"]) == 4
        assert len(row["query"]) == 60
        assert row["query"] + row["choices"][row["gold"]] in text
    assert len({row["gold"] for row in table}) > 1
    assert table == continuations(dataset, load_tokenizer("byte"), "all", 12, 60, 12, 0).to_pylist()


def test_items_are_taken_from_the_asked_part_of_the_held_out_rows(dataset):
    rows = dataset.batch(held_out_rows(dataset, "report"))["tokens"][:, :-1]
    text = "".join(load_tokenizer("byte").decode(row.tolist()) for row in rows)
    items = continuations(dataset, load_tokenizer("byte"), "report", 12, 60, 12, 0).to_pylist()
    everything = continuations(dataset, load_tokenizer("byte"), "all", 12, 60, 12, 0).to_pylist()
    assert all(item["query"] in text for item in items)
    assert not all(item["query"] in text for item in everything)


def test_items_are_spread_over_all_documents(dataset):
    everything = continuations(dataset, load_tokenizer("byte"), "all", 1000, 60, 12, 0).to_pylist()
    few = continuations(dataset, load_tokenizer("byte"), "all", 4, 60, 12, 0).to_pylist()
    places = [[item["query"] for item in everything].index(item["query"]) for item in few]
    assert places == [place * len(everything) // 4 for place in range(4)]
    assert places[-1] >= len(everything) // 2


def test_a_pack_of_items_and_needles(dataset, tmp_path):
    names = make_pack(
        dataset.uri,
        str(tmp_path),
        items=5,
        context=60,
        continuation=12,
        needles=("niah_single_1_768",),
        needle_samples=2,
    )
    assert names == ["continuation", "niah_single_1_768"]
    assert packs.verify(str(tmp_path)) == []
    records = packs.read_manifest(str(tmp_path))["tasks"]
    assert {name: record["format"] for name, record in records.items()} == {
        "continuation": "choices",
        "niah_single_1_768": "needles",
    }
    assert packs.read_split(Storage(str(tmp_path)), "continuation", records["continuation"], "test").num_rows == 5
    with pytest.raises(ConfigError, match="give NAME_LENGTH"):
        make_pack(dataset.uri, str(tmp_path), needles=("niah",), context=60, continuation=12)
    with pytest.raises(ConfigError, match="0 held-out documents are of 282 tokens or more"):
        make_pack(dataset.uri, str(tmp_path), context=250)
