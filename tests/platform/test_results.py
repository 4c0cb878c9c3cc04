"""The results store: what is written is what is read, whatever happened in between."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform import results_index
from lt2_platform.results import COMPACT_AFTER, ResultsStore, RunWriter, differences, flatten
from lt2_platform.results_curves import MAX_POINTS, ROWS, decode, downsample, encode, extend, last_written, rows_table
from lt2_platform.results_index import compact
from lt2_platform.storage import Storage


class Clock:
    """Unix seconds that a test moves by hand."""

    def __init__(self, now: float = 1_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["local", "s3"])
def storage(request, tmp_path):
    return Storage(str(tmp_path / "store") if request.param == "local" else request.getfixturevalue("s3_root"))


@pytest.fixture
def local(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path / "store")))


def values(store: ResultsStore, run_id: str, metric: str) -> dict[int, float]:
    table = store.metrics(run_id, [metric])
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist()))


def parts(store: ResultsStore, run_id: str) -> list[str]:
    return store.storage.list(f"runs/{run_id}/metrics")


def test_a_run_reads_back_as_logged(storage):
    store = ResultsStore(storage)
    with store.create_run("pretrain-1", {"config": {"train": {"lr": 1e-3}}, "git": "abc"}) as writer:
        writer.log(0, {"loss": 5.0, "lr": 0.1})
        writer.log(1, {"loss": math.nan})
        writer.log(2, {"loss": math.inf})
        writer.log_eval("perplexity", [{"task": "validation", "metric": "ppl", "value": 12.5, "tokens": 7}])
        writer.close({"tokens": 3})
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
            writer.close({"tokens": 10, "note": "x"})
    local.log_eval("r1", "ppl", [{"task": "val", "metric": "ppl", "value": 7.0, "step": 8}])
    rows = local.results()
    assert {"run": "r1", "step": 8, "metric": "loss", "value": 2.0, "config": {"train.seed": 1}} in rows
    assert {"run": "r2", "step": 8, "metric": "summary.tokens", "value": 10.0, "config": {"train.seed": 2}} in rows
    assert {"run": "r1", "step": 8, "metric": "ppl/val/ppl", "value": 7.0, "config": {"train.seed": 1}} in rows


def test_parts_are_flushed_on_time_and_size_and_at_the_end(local, monkeypatch):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    writer.log(0, {"loss": 1.0})
    assert parts(local, "r") == []
    clock.now += 2
    writer.log(1, {"loss": 1.0})
    assert len(parts(local, "r")) == 1
    clock.now += 3  # the second wait is twice the first
    writer.log(2, {"loss": 1.0})
    assert len(parts(local, "r")) == 1
    monkeypatch.setattr("lt2_platform.results.FLUSH_ROWS", 3)
    writer.log(3, {"loss": 1.0, "lr": 1.0})
    assert len(parts(local, "r")) == 2
    writer.log(4, {"loss": 1.0})
    writer.close()
    assert len(parts(local, "r")) == 3
    assert sorted(values(local, "r", "loss")) == [0, 1, 2, 3, 4]


def test_long_runs_are_flushed_about_every_minute(local):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    for step in range(3600):
        clock.now += 1
        writer.log(step, {"loss": 1.0})
    assert 60 <= len(parts(local, "r")) <= 66


def test_resumed_run_keeps_the_last_written_value(local):
    first = local.create_run("r", {"config": {"a": 1}}, clock=Clock(5_000.0))
    for step in range(10):
        first.log(step, {"loss": float(step)})
    first.flush()
    # The second machine's clock is behind: the order of writing counts, not the time.
    second = local.create_run("r", {"config": {"a": 1}}, clock=Clock(1_000.0))
    assert second.run.step == 9
    for step in range(6, 12):
        second.log(step, {"loss": 100.0 + step})
    second.close()
    expected = {step: float(step) for step in range(6)} | {step: 100.0 + step for step in range(6, 12)}
    assert values(local, "r", "loss") == expected
    curve = local.curves("r").table
    assert dict(zip(curve["step"].to_pylist(), curve["mean"].to_pylist())) == expected


def test_resuming_with_nothing_left_to_do_keeps_the_last_values(local):
    with local.create_run("r", {"config": {}}) as writer:
        writer.log(7, {"loss": 2.5})
    local.create_run("r", {"config": {}}).close()
    assert local.run("r").last == {"loss": (7, 2.5)}
    assert local.run("r").step == 7


def test_another_config_under_the_same_run_is_refused(local):
    local.create_run("r", {"config": {"train": {"lr": 0.1}}, "git": "a"}).close()
    local.create_run("r", {"config": {"train": {"lr": 0.1}}, "git": "b"}).close()
    with pytest.raises(ConfigError, match=r"run r exists with another config \(train.lr 0.1 → 0.2\)"):
        local.create_run("r", {"config": {"train": {"lr": 0.2}}})
    assert local.storage.read_json("runs/r/run.json")["git"] == "a"


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


def test_secrets_are_not_stored(local):
    info = {
        "config": {"s3": {"secret_access_key": "hush", "tokens": 5}, "list": [{"api_key": "hush"}]},
        "hf_token": "hush",
    }
    local.create_run("r", info).close({"password": "hush"})
    stored = b"".join(local.storage.read_bytes(p) for p in local.storage.glob("**/*.json"))
    assert b"hush" not in stored
    assert local.run("r").config["s3"]["tokens"] == 5


def test_damaged_parts_are_named_and_skipped(local, caplog):
    writer = local.create_run("r", {})
    for step in range(4):
        writer.log(step, {"loss": float(step)})
        writer.flush()
    names = parts(local, "r")
    folder = "runs/r/metrics"
    whole = local.storage.read_bytes(f"{folder}/{names[1]}")
    local.storage.write_bytes(f"{folder}/{names[1]}", whole[: len(whole) // 2])
    local.storage.write_bytes(f"{folder}/{names[2]}", b"")
    local.storage.write_bytes(f"{folder}/part-0001-zzzzzz-000000.parquet", b"PAR1 not really PAR1")
    assert sorted(values(local, "r", "loss")) == [0, 3]
    assert names[1] in caplog.text
    curves = local.curves("r")
    assert curves.table["step"].to_pylist() == [0, 3]
    assert [problem.split(":")[0].rsplit("/", 1)[-1] for problem in curves.skipped] == [
        names[1],
        names[2],
        "part-0001-zzzzzz-000000.parquet",
    ]
    writer.close()  # and a damaged part does not stop the writer
    assert local.curves("r").skipped == curves.skipped


def test_damaged_curves_are_rebuilt_from_the_parts(local, caplog):
    with local.create_run("r", {}) as writer:
        writer.log(3, {"loss": 1.5})
    local.storage.write_bytes("runs/r/curves.parquet", b"garbage")
    curves = local.curves("r")
    assert curves.table["last"].to_pylist() == [1.5]
    assert curves.skipped == ()  # nothing is lost, but the log names the file
    assert "runs/r/curves.parquet: skipped" in caplog.text


def test_damaged_index_files_are_named_and_never_lose_runs(local):
    with local.create_run("a", {}) as writer:
        writer.log(0, {"loss": 1.0})
    compact(local.storage)
    local.create_run("b", {}).close()
    local.storage.write_bytes(f"{results_index.JOURNAL}/c.json", b'{"run_id": "c", "crea')
    local.storage.write_bytes(f"{results_index.JOURNAL}/d.json", b'["not a run"]')
    index = local.index()
    assert set(index.runs) == {"a", "b"}
    assert len(index.skipped) == 2
    table = next(name for name in local.storage.list(results_index.TABLES) if name.startswith("runs"))
    local.storage.write_bytes(f"{results_index.TABLES}/{table}", b"junk")
    assert set(local.index().runs) == {"b"}
    with pytest.raises(OSError, match="would be forgotten"):
        compact(local.storage)
    assert "b.json" in local.storage.list(results_index.JOURNAL)


def test_storage_failure_while_training_is_survived_and_written_later(local, monkeypatch, caplog):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    with monkeypatch.context() as broken:

        def fail(*_):
            raise OSError("no route to host")

        broken.setattr(Storage, "write_bytes", fail)
        clock.now += 100
        writer.log(0, {"loss": 1.0})
        assert "no route to host" in caplog.text
        with pytest.raises(OSError, match="no route"):
            writer.close()
    writer.log(1, {"loss": 2.0})
    writer.close()
    assert values(local, "r", "loss") == {0: 1.0, 1: 2.0}


def test_exception_in_the_block_marks_the_run_failed(local):
    def work():
        with local.create_run("r", {}) as writer:
            writer.log(0, {"loss": 1.0})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        work()
    assert local.run("r").state == "failed"
    assert values(local, "r", "loss") == {0: 1.0}


def test_silent_run_is_stalled(local):
    clock = Clock(1_000.0)
    local.create_run("r", {}, clock=clock)
    assert local.run("r").status(1_299.0) == "running"
    assert local.run("r").status(1_301.0) == "stalled"
    assert local.run("r").step == 0


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


def test_compactors_and_writers_in_parallel_lose_nothing(local):
    errors: list[BaseException] = []

    def guarded(function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            errors.append(error)

    def write(worker: int) -> None:
        for number in range(6):
            with local.create_run(f"w{worker}-{number}", {"config": {"worker": worker}}) as writer:
                writer.log(1, {"loss": 1.0})
            local.log_eval(f"w{worker}-{number}", "e", [{"metric": "m", "value": 1.0}])

    def fold() -> None:
        for _ in range(6):
            compact(local.storage)
            local.index()

    threads = [threading.Thread(target=guarded, args=(write, n)) for n in range(3)]
    threads += [threading.Thread(target=guarded, args=(fold,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    index = local.index()
    assert len(index.runs) == 18
    assert {run for run, _, _ in index.evals} == set(index.runs)
    assert len(index.evals) == 18
    assert index.skipped == ()


# The pure part


def table(points: dict[str, list[tuple[int, float]]]) -> pa.Table:
    return rows_table((s, float(s), m, v) for m, series in points.items() for s, v in series)


def test_short_series_pass_through_downsampling_exactly():
    series = [(step, 0.1 * step) for step in range(MAX_POINTS)]
    curve = downsample(table({"loss": series}))
    for name in ("min", "mean", "max", "last"):
        assert curve[name].to_pylist() == [value for _, value in series]
    assert set(curve["width"].to_pylist()) == {1}


def test_buckets_hold_min_mean_max_of_their_steps():
    rng = np.random.default_rng(0)
    steps = np.arange(100_000)
    data = rng.normal(size=len(steps))
    curve = downsample(table({"loss": list(zip(steps.tolist(), data.tolist())), "val": [(0, 1.0), (99_999, 2.0)]}))
    loss = curve.filter(pa.compute.field("metric") == "loss")
    assert loss.num_rows <= MAX_POINTS
    width = loss["width"][0].as_py()
    assert width == 64  # the smallest power of two with at most 2,000 buckets
    bucket = data[5 * width : 6 * width]
    row = loss.slice(5, 1).to_pylist()[0]
    assert (row["min"], row["max"], row["last"], row["count"]) == (bucket.min(), bucket.max(), bucket[-1], width)
    assert row["mean"] == pytest.approx(bucket.mean(), rel=1e-12)
    val = curve.filter(pa.compute.field("metric") == "val")
    assert val["step"].to_pylist() == [0, 99_999]  # a sparse metric keeps its own width


def test_nonfinite_values_are_counted_and_do_not_hide_the_others():
    series = [(s, 1.0) for s in range(4000)]
    series[10] = (10, math.nan)
    series[11] = (11, math.inf)
    curve = downsample(table({"loss": series}))
    assert sum(curve["nonfinite"].to_pylist()) == 2
    assert all(np.isfinite(curve["mean"].to_numpy()[np.array(curve["count"]) > 0]))
    assert sum(curve["count"].to_pylist()) == 3998


@pytest.mark.parametrize("cuts", [[100], [2_000], [1, 2, 3], [500, 4_000, 4_001, 9_999], list(range(250, 20_000, 250))])
def test_extending_equals_downsampling_everything(cuts):
    rng = np.random.default_rng(1)
    points = [(step, float(rng.normal())) for step in range(20_000)]
    points[77] = (77, math.nan)
    edges = [0, *cuts, len(points)]
    curve = downsample(table({"loss": points[: edges[1]]}))
    for start, stop in zip(edges[1:], edges[2:]):
        curve = extend(curve, table({"loss": points[start:stop], "val": [(start, 1.0)]}))
        assert curve is not None
    whole = downsample(table({"loss": points, "val": [(e, 1.0) for e in edges[1:-1]]}))
    for name in whole.column_names:
        np.testing.assert_allclose(
            whole[name].to_numpy(), curve[name].to_numpy(), rtol=1e-12
        ) if name != "metric" else None
    assert whole["metric"].to_pylist() == curve["metric"].to_pylist()


def test_replayed_steps_cannot_extend_a_curve():
    curve = downsample(table({"loss": [(0, 1.0), (1, 1.0)]}))
    assert extend(curve, table({"loss": [(1, 2.0)]})) is None
    assert extend(curve, ROWS.empty_table()) is curve


def test_last_written_keeps_one_row_per_metric_and_step():
    rows = rows_table([(1, 0.0, "b", 1.0), (0, 0.0, "b", 2.0), (1, 1.0, "b", 3.0), (1, 2.0, "a", 4.0)])
    assert last_written(rows).to_pylist() == [
        {"step": 1, "time": 2.0, "metric": "a", "value": 4.0},
        {"step": 0, "time": 0.0, "metric": "b", "value": 2.0},
        {"step": 1, "time": 1.0, "metric": "b", "value": 3.0},
    ]


def test_decode_refuses_other_files():
    other = encode(pa.table({"x": [1]}))
    with pytest.raises(ValueError, match="step"):
        decode(other, ROWS)
    with pytest.raises(ValueError, match=r"\S"):
        decode(b"PAR1", ROWS)
    rows, metadata = decode(encode(table({"a": [(1, 2.0)]}), {"covered": {"w": 3}}), ROWS)
    assert metadata == {"covered": {"w": 3}}
    assert rows.schema == ROWS


def test_differences_and_flatten():
    configs = {"a": {"x": {"y": 1, "z": [1]}, "same": 0}, "b": {"x": {"y": 2, "z": [1]}, "same": 0, "new": True}}
    assert differences(configs) == {"a": {"new": None, "x.y": 1}, "b": {"new": True, "x.y": 2}}
    assert flatten({"a": {"b": {"c": 1}}, "d": []}) == {"a.b.c": 1, "d": []}
    assert json.dumps(differences({})) == "{}"


def test_writer_is_readable_while_it_writes(local):
    """A reader in another thread sees only whole prefixes of what was logged."""
    done = threading.Event()
    seen: list[list[int]] = []

    def read() -> None:
        while not done.is_set():
            seen.append(local.curves("r").table["step"].to_pylist())

    writer: RunWriter = local.create_run("r", {})
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(120):
        writer.log(step, {"loss": 1.0})
        writer.flush()
    done.set()
    reader.join()
    assert len(seen) > 1
    assert all(steps == list(range(len(steps))) for steps in seen)
    assert [len(steps) for steps in seen] == sorted(len(steps) for steps in seen)
    writer.close()
    assert local.curves("r").table.num_rows == 120


def test_evaluation_rows_may_have_different_keys(local):
    local.create_run("r", {"config": {}}).close()
    local.log_eval("r", "mixed", [{"metric": "a", "value": 1.0}, {"metric": "b", "value": 2.0, "note": "late"}])
    (path,) = local.storage.list("runs/r/evals")
    with local.storage.open(f"runs/r/evals/{path}") as file:
        assert pq.read_table(file).to_pylist()[1] == {"metric": "b", "value": 2.0, "note": "late"}
