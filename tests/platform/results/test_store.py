"""The results store: what is written is what is read."""

from __future__ import annotations

import json
import math

import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.results import index as results_index
from lt2_platform.results.curves import CURVES, decode
from lt2_platform.results.index import COMPACT_AFTER, compact
from lt2_platform.results.store import ResultsStore, differences, flatten
from lt2_platform.results.tables import as_number, total_steps
from lt2_platform.storage import Storage
from tests.platform.conftest import Clock, log_and_wait, parts, values


@pytest.fixture(params=["local", "s3"])
def storage(request, tmp_path):
    return Storage(str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_root"))


def test_a_run_reads_back_as_logged(storage):
    store = ResultsStore(storage)
    with store.create_run("pretrain-1", {"config": {"train": {"lr": 1e-3}}, "git": "abc"}) as writer:
        writer.log(0, {"loss": 5.0, "lr": 0.1})
        writer.log(1, {"loss": math.nan})
        writer.log(2, {"loss": math.inf})
        writer.close({"tokens": 3})
    store.log_eval("pretrain-1", "perplexity", [{"task": "validation", "metric": "ppl", "value": 12.5, "tokens": 7}])
    assert values(store, "pretrain-1", "lr") == {0: 0.1}
    loss = values(store, "pretrain-1", "loss")
    assert loss[0] == 5.0
    assert math.isnan(loss[1])
    assert loss[2] == math.inf
    (run,) = store.runs()
    assert (run.run_id, run.state, run.step, run.info) == ("pretrain-1", "finished", 2, {"git": "abc"})
    assert run.last == {"lr": (0, 0.1), "loss": (2, math.inf)}
    assert storage.read_json("runs/pretrain-1/summary.json") == {"tokens": 3}
    assert store.index().evals[0][2] == {"task": "validation", "metric": "ppl", "value": 12.5, "tokens": 7}


def test_compaction_changes_nothing_a_reader_sees(storage):
    store = ResultsStore(storage)
    for number in range(3):
        with store.create_run(f"run-{number}", {"config": {"seed": number}}) as writer:
            writer.log(4, {"loss": float(number)})
    live = store.create_run("live", {"config": {"seed": 9}})
    live.log(1, {"loss": 1.0})
    live.flush()
    store.log_eval("run-1", "harness", [{"task": "piqa", "metric": "acc", "value": 0.7}])
    before, version = store.index(), store.version()
    assert compact(storage) == 1
    assert store.index() == before
    assert store.version() != version
    assert storage.list(results_index.JOURNAL) == ["live.json"]
    store.log_eval("run-2", "harness", [{"task": "piqa", "metric": "acc", "value": 0.8}])
    live.close()
    assert compact(storage) == 2
    assert len(store.index().evals) == 2
    assert store.run("live").state == "finished"


def test_results_rows_name_what_differs(local):
    for seed, loss in ((1, 2.0), (2, 3.0)):
        with local.create_run(f"r{seed}", {"config": {"train": {"seed": seed, "steps": 9}}}) as writer:
            writer.log(8, {"loss": loss})
            writer.close({"tokens": 10, "note": "x", "step": 9, "position": 72})
    local.log_eval("r1", "speed", [{"task": "t", "metric": "decode", "value": 7.0, "step": 8, "unit": "tokens/s"}])
    rows = local.results()
    first, second = {"run": "r1", "step": 8}, {"run": "r2", "step": 8}
    one, two = {"config": {"train.seed": 1}, "counts": True}, {"config": {"train.seed": 2}, "counts": True}
    assert first | {"metric": "loss", "value": 2.0, "unit": "nats/token"} | one in rows
    assert second | {"metric": "summary.tokens", "value": 10.0, "unit": ""} | two in rows
    assert not {"summary.step", "summary.position"} & {row["metric"] for row in rows}  # where a training ended
    assert first | {"metric": "speed/t/decode", "value": 7.0, "unit": "tokens/s"} | one in rows
    assert {row["run"] for row in local.results(["r2"])} == {"r2"}
    assert not any(row["config"] for row in local.results(["r2"]))  # of one run alone nothing differs
    assert {row["config"]["train.seed"] for row in local.results(["r1", "r2"])} == {1, 2}
    local.create_run("their", {"config": {"evaluated": "folder"}}).close()
    local.log_eval("their", "validation", [{"task": "t", "metric": "acc", "value": 0.5}])
    local.create_run("base", {"config": {"model": {"dim": 8}, "imported": {"folder": "hub"}}}).close()
    local.log_eval("base", "validation", [{"task": "t", "metric": "acc", "value": 0.5}])
    configs = [row["config"] for row in local.results()]  # they were not trained here: the others differ as before
    assert {"train.seed": 1} in configs
    assert {"evaluated": "folder"} in configs
    assert {"imported.folder": "hub"} in configs


def test_notes_and_readings_inside_a_model_are_no_results(local):
    local.create_run("r", {}).close()
    local.log_note("r", "a good one", "me")
    local.log_eval("r", "diagnostics", [{"metric": "rms", "value": 2.0, "loop": 0, "layer": 1}])
    local.log_eval("r", "core", [{"metric": "is_done", "value": True}])
    local.log_eval("r", "core", [{"metric": "acc", "value": 0.5}])
    assert [(row["metric"], row["value"]) for row in local.results()] == [("core/acc", 0.5)]


def test_an_alignments_loss_is_no_entropy(local):
    for kind, loops in (("align", None), ("distill", None), ("next_token", [1, 4])):
        with local.create_run(kind, {"config": {"train": {"objective": {"type": kind, "loops": loops}}}}) as writer:
            writer.log(1, {"loss": 2.0, "kl": 1.0})
    units = {(row["run"], row["metric"]): row["unit"] for row in local.results()}
    assert (units["align", "loss"], units["distill", "loss"], units["distill", "kl"]) == ("", *["nats/token"] * 2)
    assert units["next_token", "loss"] == "nats/token"


def test_of_repeated_evaluations_the_newest_whole_one_counts(local):
    local.create_run("r", {}).close()
    asked = {"task": "piqa", "metric": "acc", "step": 8}
    for more in ({"value": 0.1, "limit": None}, {"value": 0.2, "limit": None}, {"value": 0.3, "limit": 10}):
        local.log_eval("r", "core", [asked | more, {"task": "copa", "metric": "acc", "value": 0.5}])
    local.log_eval("r", "other", [asked | {"value": 0.4, "limit": 10}])
    counting = [(row["metric"], row["value"]) for row in local.results() if row["counts"]]
    assert sorted(counting) == [("core/copa/acc", 0.5), ("core/piqa/acc", 0.2), ("other/piqa/acc", 0.4)]
    assert len(local.results()) == 7


def test_parts_are_flushed_on_time_and_size_and_at_the_end(local, monkeypatch):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    log_and_wait(writer, 0, {"loss": 1.0})
    assert parts(local, "r") == []
    clock.now += 2
    log_and_wait(writer, 1, {"loss": 1.0})
    assert len(parts(local, "r")) == 1
    clock.now += 3  # the second wait is twice the first
    log_and_wait(writer, 2, {"loss": 1.0})
    assert len(parts(local, "r")) == 1
    monkeypatch.setattr("lt2_platform.results.writer.FLUSH_ROWS", 3)
    log_and_wait(writer, 3, {"loss": 1.0, "lr": 1.0})
    assert len(parts(local, "r")) == 2
    log_and_wait(writer, 4, {"loss": 1.0})
    writer.close()
    assert len(parts(local, "r")) == 3
    assert sorted(values(local, "r", "loss")) == [0, 1, 2, 3, 4]


def test_readers_of_a_live_run_open_few_parts(local, monkeypatch):
    monkeypatch.setattr("lt2_platform.results.writer.PARTS_PER_CURVE", 3)
    writer = local.create_run("r", {})
    merged = []
    for step in range(7):
        writer.log(step, {"loss": 1.0})
        writer.flush()
        curves = "curves.parquet" in local.storage.list("runs/r")
        merged.append(curves and decode(local.storage.read_bytes("runs/r/curves.parquet"), CURVES)[0].num_rows)
    assert merged == [False, False, 3, 3, 3, 6, 6]
    writer.close()
    assert decode(local.storage.read_bytes("runs/r/curves.parquet"), CURVES)[0].num_rows == 7


def test_long_runs_are_flushed_about_every_minute(local):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    for step in range(3600):
        clock.now += 1
        log_and_wait(writer, step, {"loss": 1.0})
    assert 60 <= len(parts(local, "r")) <= 66


def test_another_config_under_the_same_run_is_refused(local):
    local.create_run("r", {"config": {"train": {"lr": 0.1}}, "git": "a"}).close()
    local.create_run("r", {"config": {"train": {"lr": 0.1}}, "git": "b"}).close()
    with pytest.raises(ConfigError, match=r"run r exists with another config \(train.lr 0.1 → 0.2\)"):
        local.create_run("r", {"config": {"train": {"lr": 0.2}}})
    assert local.storage.read_json("runs/r/run.json")["git"] == "a"


@pytest.mark.parametrize("content", [b"", b"{half", b"[]", b'{"created": 1.0}'])
def test_a_damaged_record_of_a_run_is_named(local, content):
    local.create_run("r", {"config": {"lr": 0.1}}).close()
    local.storage.write_bytes("runs/r/run.json", content)
    with pytest.raises(
        ConfigError, match=r"/runs/r/run\.json is not readable \(it.*\); delete it, and it is rewritten"
    ):
        local.create_run("r", {"config": {"lr": 0.1}})


def test_a_run_that_goes_on_keeps_its_place_among_the_newest_first(local):
    local.create_run("a", {"config": {}}, clock=Clock(100.0)).close()
    local.create_run("b", {"config": {}}, clock=Clock(200.0)).close()
    local.create_run("a", {"config": {}}, clock=Clock(300.0)).close()
    found = [(run.run_id, run.created, run.updated) for run in local.runs()]
    assert found == [("b", 200.0, 200.0), ("a", 100.0, 300.0)]


def test_a_setting_added_since_does_not_make_it_another_run(local):
    local.create_run("r", {"config": {"train": {"lr": 0.1}}}).close()
    local.create_run("r", {"config": {"train": {"lr": 0.1, "rollbacks": 2}}}).close()
    with pytest.raises(ConfigError, match="another config"):
        local.create_run("r", {"config": {"train": {"rollbacks": 2}}})


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", ".hidden", "a b", "x" * 129, "é", "a\n", "-rf", "a~b"])
def test_names_that_are_no_file_names_are_refused(local, name):
    with pytest.raises(ConfigError, match="run id"):
        local.create_run(name, {})
    with pytest.raises(ConfigError, match="run id"):
        local.metrics(name)
    with pytest.raises(ConfigError, match="run id"):
        local.curves(name)
    with pytest.raises(ConfigError, match="evaluation name"):
        local.log_eval("r", name, [{"value": 1}])
    with pytest.raises(ConfigError, match="run id"):
        local.log_event(name, "kind", {})
    with pytest.raises(ConfigError, match="event kind"):
        local.log_event("r", name, {})


def test_secrets_are_not_stored(local):
    info = {
        "config": {"s3": {"secret_access_key": "hush", "tokens": 5}, "list": [{"api_key": "hush"}]},
        "hf_token": "hush",
    }
    local.create_run("r", info).close({"password": "hush"})
    stored = b"".join(local.storage.read_bytes(p) for p in local.storage.glob("**/*.json"))
    assert b"hush" not in stored
    assert local.run("r").config["s3"]["tokens"] == 5


def test_unknown_run_is_one_line(local):
    with pytest.raises(ConfigError, match="no run 'nope' under"):
        local.run("nope")


def test_readers_never_list_the_runs_folder(local, monkeypatch):
    with local.create_run("r", {}) as writer:
        writer.log(0, {"loss": 1.0})
    listed = []
    original = Storage.list
    monkeypatch.setattr(Storage, "list", lambda self, path="": listed.append(path) or original(self, path))
    monkeypatch.setattr(Storage, "glob", lambda *_: pytest.fail("glob"))
    local.index(), local.version(), local.curves("r")
    assert "runs" not in listed
    assert "" not in listed


def test_journal_is_folded_before_it_grows_long(local):
    for number in range(COMPACT_AFTER + 1):
        local.create_run(f"r{number}", {}).close()
    assert len(local.storage.list(results_index.JOURNAL)) < COMPACT_AFTER
    assert len(local.runs()) == COMPACT_AFTER + 1


def test_evaluations_of_a_live_run_do_not_grow_the_journal(local):
    with local.create_run("r", {}):
        for step in range(2 * COMPACT_AFTER + 1):
            local.log_eval("r", "training", [{"metric": "loss", "value": 1.0 * step, "step": step}])
            assert len(local.storage.list(results_index.JOURNAL)) <= COMPACT_AFTER
        assert [row["step"] for _, _, row in local.index().evals] == list(range(2 * COMPACT_AFTER + 1))
        assert local.run("r").state == "running"


def test_an_evaluation_is_kept_also_when_compacting_fails(local, monkeypatch, caplog):
    monkeypatch.setattr(results_index, "COMPACT_AFTER", 1)

    def fail(storage):
        raise OSError("no route to host")

    with monkeypatch.context() as broken:
        broken.setattr(results_index, "compact", fail)
        local.log_eval("r", "core", [{"metric": "acc", "value": 0.5}])
    assert "is not compacted (no route to host)" in caplog.text
    local.log_eval("r", "core", [{"metric": "acc", "value": 0.25}])
    assert [row["value"] for _, _, row in local.index().evals] == [0.5, 0.25]
    assert local.storage.list(results_index.JOURNAL) == []


def test_a_run_is_closed_also_when_compacting_fails(local, monkeypatch, caplog):
    monkeypatch.setattr(results_index, "COMPACT_AFTER", 1)
    monkeypatch.setattr(results_index, "compact", lambda storage: (_ for _ in ()).throw(OSError("no route to host")))
    local.create_run("r", {}).close({"loss": 1.0})
    assert local.run("r").state == "finished"
    assert "is not compacted (no route to host)" in caplog.text


def test_differences_and_flatten():
    configs = {"a": {"x": {"y": 1, "z": [1]}, "same": 0}, "b": {"x": {"y": 2, "z": [1]}, "same": 0, "new": True}}
    assert differences(configs) == {"a": {"new": None, "x.y": 1}, "b": {"new": True, "x.y": 2}}
    assert flatten({"a": {"b": {"c": 1}}, "d": []}) == {"a.b.c": 1, "d": []}
    assert json.dumps(differences({})) == "{}"
    alike = {"a": {"mix": [{"x": 1, "y": 2}]}, "b": {"mix": [{"y": 2, "x": 1}]}}
    assert differences(alike) == {"a": {}, "b": {}}


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"sweep.steps": 9, "steps": 8, "train.steps": 7}, 7),
        ({"sweep.steps": 9, "steps": 8}, 8),
        ({"sweep.steps": 9, "lr": 1}, 9),
        ({"train.steps": "auto", "lr": 1}, None),
    ],
)
def test_the_steps_that_a_run_was_asked_for(config, steps):
    assert total_steps(config) == steps


def test_only_numbers_count_as_numbers():
    assert [as_number(value) for value in (3, 0.5, True, "3", None, [3])] == [3.0, 0.5, None, None, None, None]


def test_evaluation_rows_may_have_different_keys(local):
    local.create_run("r", {"config": {}}).close()
    local.log_eval("r", "mixed", [{"metric": "a", "value": 1.0}, {"metric": "b", "value": 2.0, "note": "late"}])
    (path,) = local.storage.list("runs/r/evals")
    with local.storage.open(f"runs/r/evals/{path}") as file:
        assert pq.read_table(file).to_pylist()[1] == {"metric": "b", "value": 2.0, "note": "late"}


def test_evaluation_rows_may_mean_different_kinds_of_value_by_one_name(local):
    rows = [{"metric": "a", "value": 1.0, "group": 1, "n": 2**70}, {"metric": "b", "value": 2, "group": "all", "n": 3}]
    local.log_eval("r", "mixed", rows)
    assert [row for _, _, row in local.index().evals] == rows
    (path,) = local.storage.list("runs/r/evals")
    with local.storage.open(f"runs/r/evals/{path}") as file:
        kept = pq.read_table(file).to_pylist()
    assert [(row["value"], row["group"], row["n"]) for row in kept] == [(1.0, "1", str(2**70)), (2.0, "all", "3")]
