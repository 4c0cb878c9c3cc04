"""The results store when a run stops, resumes or dies, files are damaged, and many write and read at once."""

from __future__ import annotations

import threading

import pytest
from botocore.exceptions import ClientError

from lt2.train.loop import PreemptedError
from lt2_platform.fence import OvertakenError
from lt2_platform.results import index as results_index
from lt2_platform.results.index import compact
from lt2_platform.results.store import RunWriter
from lt2_platform.results.tables import empty_tables
from lt2_platform.storage import Storage
from tests.platform.conftest import Clock, log_and_wait, parts, values

# What storage raises, as an OSError and as botocore says it.
AWAY = [OSError("no route to host"), ClientError({"Error": {"Message": "no route to host"}}, "PutObject")]


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


def test_tables_of_the_last_generations_stay_for_who_is_reading_them(local):
    seen = []
    for number in range(6):
        local.create_run(f"r-{number}", {}).close()
        compact(local.storage)
        newest = local.storage.list(results_index.MANIFESTS)[-1]
        seen.append(local.storage.read_json(f"{results_index.MANIFESTS}/{newest}")["tables"].values())
    there = [all(map(local.storage.exists, tables)) for tables in seen]
    gone = len(seen) - results_index.KEPT_GENERATIONS
    assert there == [False] * gone + [True] * results_index.KEPT_GENERATIONS
    assert len(local.storage.list(results_index.TABLES)) == 4 * results_index.KEPT_GENERATIONS


def test_what_file_systems_leave_in_the_folders_stops_nobody(local):
    with local.create_run("r", {}) as writer:
        writer.log(1, {"loss": 2.0})
    local.log_event("r", "note", {})
    numbered = (results_index.TABLES, results_index.MANIFESTS)
    for folder in (*numbered, results_index.JOURNAL, "runs/r/metrics", "runs/r/events"):
        for name in (".DS_Store", ".nfs000000000001", *(["Thumbs.db"] if folder in numbered else [])):
            local.storage.write_bytes(f"{folder}/{name}", b"\0\1")
    for _ in range(results_index.KEPT_GENERATIONS + 1):
        compact(local.storage)
    assert len(local.storage.list(results_index.TABLES)) == 4 * results_index.KEPT_GENERATIONS + 1
    assert len(local.events("r")) == 1
    assert (local.index().skipped, local.curves("r").skipped) == ((), ())


def test_a_compactor_that_was_overtaken_leaves_nothing_behind(local):
    assert results_index.publish(local.storage, empty_tables(), 1, [])
    tables = local.storage.list(results_index.TABLES)
    assert not results_index.publish(local.storage, empty_tables(), 1, [])
    assert local.storage.list(results_index.TABLES) == tables


def test_compacting_leaves_damaged_evaluations_where_they_are(local):
    local.create_run("r", {}).close()
    for value in (1.0, 2.0):
        local.log_eval("r", "validation", [{"metric": "loss", "value": value}])
    whole, cut = (f"results/journal/{name}" for name in local.storage.list("results/journal") if "~" in name)
    kept = local.storage.read_bytes(cut)
    local.storage.write_bytes(cut, kept[:-9])
    compact(local.storage)
    assert not local.storage.exists(whole)
    assert local.index().skipped[0].startswith(cut)
    local.storage.write_bytes(cut, kept)  # somebody restored it
    assert [row["value"] for _, _, row in local.index().evals] == [1.0, 2.0]


@pytest.mark.parametrize("error", AWAY)
def test_storage_failure_while_training_is_survived_and_written_later(local, monkeypatch, caplog, error):
    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    with monkeypatch.context() as broken:

        def fail(*_):
            raise error

        broken.setattr(Storage, "write_bytes", fail)
        clock.now += 100
        log_and_wait(writer, 0, {"loss": 1.0})
        assert "no route to host" in caplog.text
        with pytest.raises(type(error), match="no route"):
            writer.close()
    writer.log(1, {"loss": 2.0})
    writer.close()
    assert values(local, "r", "loss") == {0: 1.0, 1: 2.0}


def test_a_store_that_hangs_does_not_hold_up_the_log_and_loses_nothing(local, monkeypatch):
    answers, write = threading.Event(), Storage.write_bytes

    def writing(storage, path, data):
        assert answers.wait(30)
        write(storage, path, data)

    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    monkeypatch.setattr(Storage, "write_bytes", writing)
    for step in range(5):
        clock.now += 100
        writer.log(step, {"loss": 1.0 + step})
    assert values(local, "r", "loss") == {}
    answers.set()
    writer.close()
    assert values(local, "r", "loss") == {step: 1.0 + step for step in range(5)}
    assert (local.run("r").state, local.run("r").last) == ("finished", {"loss": (4, 5.0)})


def test_what_is_no_refusal_of_the_store_ends_the_run(local, monkeypatch):
    def overtaken(*_):
        raise OvertakenError("another process took over")

    clock = Clock()
    writer = local.create_run("r", {}, clock=clock)
    monkeypatch.setattr(Storage, "write_bytes", overtaken)
    clock.now += 100
    log_and_wait(writer, 0, {"loss": 1.0})
    with pytest.raises(OvertakenError, match="took over"):
        writer.log(1, {"loss": 1.0})


def test_a_compactor_killed_before_it_deletes_counts_no_evaluation_twice(local, monkeypatch):
    local.create_run("r", {}).close()
    local.log_eval("r", "core", [{"task": "t", "metric": "acc", "value": 0.5}])
    with monkeypatch.context() as killed:
        killed.setattr(Storage, "delete", lambda *_: None)
        compact(local.storage)
    assert len(local.index().evals) == 1
    local.log_eval("r", "core", [{"task": "u", "metric": "acc", "value": 0.25}])
    compact(local.storage)
    assert sorted(row["task"] for _, _, row in local.index().evals) == ["t", "u"]
    assert local.storage.list(results_index.JOURNAL) == []


def test_a_run_that_is_resumed_and_ends_while_its_failure_is_folded_is_finished(local, monkeypatch):
    local.create_run("a", {}).close(state="failed")
    local.create_run("b", {}).close()
    publish = results_index.publish

    def meanwhile(*arguments):
        published = publish(*arguments)
        local.create_run("a", {}).close({"loss": 1.0})
        return published

    monkeypatch.setattr(results_index, "publish", meanwhile)
    compact(local.storage)
    assert (local.run("a").state, local.run("a").summary) == ("finished", {"loss": 1.0})
    assert local.storage.list("results/journal") == ["a.json"]  # what is folded as it is has left the journal


def test_the_longest_names_there_may_be(local):
    run_id, name = "r" * 128, "e" * 128
    local.create_run(run_id, {}).close()
    local.log_eval(run_id, name, [{"value": 1.0}])
    assert local.index().evals == [(run_id, name, {"value": 1.0})]


def test_a_clock_that_is_set_back_silences_nobody(local):
    clock = Clock(10_000.0)
    writer = local.create_run("r", {}, clock=clock)
    clock.now -= 3_600
    log_and_wait(writer, 0, {"loss": 1.0})
    assert values(local, "r", "loss") == {0: 1.0}


@pytest.mark.parametrize("error", AWAY)
def test_storage_that_is_away_hides_no_error_of_the_block(local, monkeypatch, caplog, error):
    def fail(*_):
        raise error

    writer = local.create_run("r", {})
    monkeypatch.setattr(Storage, "write_bytes", fail)

    def work():
        with writer:
            writer.log(0, {"loss": 1.0})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        work()
    assert f"r: its last metrics are not written ({error})" in caplog.text


def test_exception_in_the_block_marks_the_run_failed(local):
    def work():
        with local.create_run("r", {}) as writer:
            writer.log(0, {"loss": 1.0})
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        work()
    assert local.run("r").state == "failed"
    assert values(local, "r", "loss") == {0: 1.0}


def test_an_exception_may_say_that_the_run_goes_on(local):
    with pytest.raises(PreemptedError), local.create_run("r", {}):
        raise PreemptedError("asked to stop")
    assert local.run("r").state == "running"


def test_silent_run_is_stalled(local):
    clock = Clock(1_000.0)
    local.create_run("r", {}, clock=clock)
    assert local.run("r").status(1_299.0) == "running"
    assert local.run("r").status(1_301.0) == "stalled"
    assert local.run("r").step == 0


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
