"""Paired comparison of two evaluations."""

import json
import math

import pytest
from scipy import stats

from lt2.config import ConfigError
from lt2_platform.evaluate.compare import asked_differently, compare, own_depth, scores, sign_test
from lt2_platform.storage import Storage


def write(folder, scores, *, task="arc_easy", metric="acc", depth="loops-2", hashes=None):
    lines = [
        json.dumps({"task": task, "doc_id": i, "doc_hash": (hashes or {}).get(i, f"h{i}"), "scores": {metric: score}})
        for i, score in scores.items()
    ]
    Storage(str(folder)).write_bytes(f"harness/{depth}/samples/{task}.jsonl", ("\n".join(lines) + "\n").encode())
    return str(folder)


def test_right_and_wrong_items_by_mcnemars_exact_test(tmp_path):
    a = [1, 1, 0, 0, 1, 0, 0, 1, 0, 0]
    b = [1, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    (row,) = compare(write(tmp_path / "a", dict(enumerate(a))), write(tmp_path / "b", dict(enumerate(b))))
    assert (row["a"], row["b"], row["n"], row["note"]) == (0.4, 0.8, 10, "")
    assert row["difference"] == pytest.approx(0.4)
    assert row["p_value"] == pytest.approx(stats.binomtest(5, 6).pvalue)
    difference = [y - x for x, y in zip(a, b)]
    assert row["stderr"] == pytest.approx(stats.sem(difference))


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
def test_the_sign_test_counts_every_outcome(n):
    for fewer in range(n // 2 + 1):
        outcomes = sum(math.comb(n, k) for k in range(n + 1) if min(k, n - k) <= fewer)
        assert sign_test(fewer, n) == outcomes / 2**n


@pytest.mark.parametrize("fewer", [0, 28_000, 29_500, 29_980, 30_000])
def test_the_sign_test_of_60_000_items(fewer):
    expected = stats.binomtest(fewer, 60_000).pvalue
    assert sign_test(fewer, 60_000) == pytest.approx(expected, rel=1e-9, abs=0)


def test_other_scores_by_students_paired_test(tmp_path):
    a, b = [0.1, 0.4, 0.5, 0.9], [0.3, 0.5, 0.4, 1.5]
    folders = [write(tmp_path / n, dict(enumerate(s)), metric="f1") for n, s in (("a", a), ("b", b))]
    (row,) = compare(*folders)
    assert row["stderr"] == pytest.approx(stats.sem([y - x for x, y in zip(a, b)]))
    assert row["p_value"] == pytest.approx(stats.ttest_rel(b, a).pvalue)


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_equal_differences_count_by_their_sign(tmp_path, n):
    """One item says nothing, and of several alike a t-test would be sure for want of a spread."""
    folders = [write(tmp_path / f"{s}", dict.fromkeys(range(n), s), metric="f1") for s in (0.3, 0.6)]
    assert compare(*folders)[0]["p_value"] == pytest.approx(2 / 2**n)
    assert compare(folders[0], folders[0])[0]["p_value"] == 1.0


def test_items_that_were_asked_with_other_examples_are_told(tmp_path):
    a, b = (write(tmp_path / name, {0: 1, 1: 0}) for name in ("a", "b"))
    for folder, asked in ((a, ("p", "q")), (b, ("p", "r"))):
        path = f"{folder}/harness/loops-2/samples/arc_easy.jsonl"
        lines = zip(Storage(folder).read_bytes(path).decode().splitlines(), asked)
        told = [json.dumps(json.loads(line) | {"prompt_hash": prompt}) for line, prompt in lines]
        Storage(folder).write_bytes(path, "\n".join(told).encode())
    (row,) = compare(a, b)
    assert (row["n"], row["note"]) == (2, "1 of the 2 in both asked by other prompts (examples, or cut elsewhere)")
    assert compare(a, a)[0]["note"] == ""


def test_a_task_asked_with_other_examples_is_compared_with_a_note(tmp_path):
    a = write(tmp_path / "a", {0: 1, 1: 0})
    for task in ("arc_easy+3-shot", "arc_easy+3-shot+chat"):
        (row,) = compare(a, write(tmp_path / task, {0: 1, 1: 1}, task=task))
        assert (row["task"], row["difference"], row["note"]) == ("arc_easy", 0.5, f"asked differently: b as {task}")


def test_only_common_items_count_and_the_rest_is_named(tmp_path):
    a = write(tmp_path / "a", {0: 1, 1: 0, 2: 1})
    b = write(tmp_path / "b", {0: 1, 1: 1, 3: 0}, hashes={0: "another document"})
    (row,) = compare(a, b)
    assert (row["n"], row["a"], row["b"], row["note"]) == (1, 0.0, 1.0, "4 items only in one")


def test_tasks_without_a_common_item_have_no_difference(tmp_path):
    (row,) = compare(write(tmp_path / "a", {0: 1.0}), write(tmp_path / "b", {1: 1.0}))
    assert row == {"task": "arc_easy", "metric": "acc", "n": 0, "note": "different items"}


def test_the_depth_that_a_run_was_trained_at():
    assert own_depth({"model": {"n_loops": 4, "halting": None}}) == own_depth({"model": {"n_loops": 4}}) == "loops-4"
    assert own_depth({"model": {"n_loops": 2, "halting": {"type": "act"}}}) == "loops-2-early-exit"
    assert own_depth({"n_loops": 3}) == "loops-3"
    assert own_depth({"train": {"steps": 4}}) is None


def test_the_newest_evaluation_of_a_task_counts(tmp_path):
    a = write(tmp_path / "a", {0: 1, 1: 1})
    write(tmp_path / "run" / "z-first", {0: 1, 1: 0, 2: 0})
    write(tmp_path / "run" / "a-second", {0: 0, 1: 0})
    (row,) = compare(a, str(tmp_path / "run"))
    assert (row["n"], row["b"], row["note"]) == (2, 0.0, "")


def test_all_items_count_before_a_quick_look_and_a_later_checkpoint_before_both(tmp_path):
    a = write(tmp_path / "a", {0: 1, 1: 1})
    for name, step, limit, found in (("whole", 5, None, {0: 1, 1: 0}), ("look", 5, 1, {0: 0})):
        folder = write(tmp_path / "run" / name, found)
        rows = [{"task": "arc_easy", "metric": "acc", "n": len(found), "limit": limit}]
        Storage(folder).write_json("evaluation.json", {"step": step, "rows": rows})
    (row,) = compare(a, str(tmp_path / "run"))
    assert (row["n"], row["b"]) == (2, 0.5)
    later = write(tmp_path / "run" / "later", {0: 0, 1: 0})
    Storage(later).write_json("evaluation.json", {"step": 6, "rows": rows})
    write(tmp_path / "run" / "whole", {0: 1, 1: 0})  # written again: still of an earlier checkpoint
    (row,) = compare(a, str(tmp_path / "run"))
    assert (row["n"], row["b"]) == (2, 0)


def test_tasks_asked_in_several_ways_are_compared_like_with_like_only():
    plain, chat, llama3 = (("gsm8k" + way, "acc") for way in ("", "+chat", "+llama3"))
    assert asked_differently([plain], [chat]) == [(plain, chat)]
    assert asked_differently([plain], [plain]) == []
    assert asked_differently([plain, llama3], [chat]) == []
    assert asked_differently([plain], [chat, llama3]) == []
    assert asked_differently([plain], [("gsm8k+chat", "other")]) == []


def test_one_task_at_several_depths_is_not_compared_by_the_last_of_them(tmp_path):
    a = write(tmp_path / "a", {0: 1})
    write(tmp_path / "b", {0: 1}, depth="loops-1")
    write(tmp_path / "b", {0: 0}, depth="loops-2")
    with pytest.raises(ConfigError, match=r"several depths \(loops-1, loops-2\); .* such as .*b/harness/loops-1$"):
        compare(a, str(tmp_path / "b"))
    (row,) = compare(a, f"{tmp_path}/b/harness/loops-1")
    assert (row["n"], row["b"]) == (1, 1)
    assert scores(str(tmp_path / "b"), "loops-2") == {("arc_easy", "acc"): {(0, "h0"): (0.0, None, None)}}


def test_what_cannot_be_compared_is_named(tmp_path):
    a = write(tmp_path / "a", {0: 1})
    with pytest.raises(ConfigError, match="has arc_easy; .* has piqa"):
        compare(a, write(tmp_path / "b", {0: 1}, task="piqa"))
    with pytest.raises(ConfigError, match="no evaluation with samples"):
        compare(a, str(tmp_path / "c"))
    write(tmp_path / "a", {0: 1}, task="copa", depth="loops-4")
    with pytest.raises(ConfigError, match="several depths .*loops-2, loops-4"):
        compare(a, a)
    for name in ("evaluation.json", "harness/loops-2/samples/arc_easy.jsonl"):
        write(tmp_path / "d", {0: 1})
        Storage(str(tmp_path / "d")).write_bytes(name, b'{"task": "arc')
        with pytest.raises(ConfigError, match=rf"d/.*{name} is damaged \(.*\); remove its folder and run `lt2 eval`"):
            compare(a.replace("/a", "/d"), a.replace("/a", "/d"))
        (tmp_path / "d" / name).unlink()
