"""Cells in fresh processes, the search for the longest context that fits, and how running out of memory is told."""

import subprocess

import pytest
import torch

from benchmarks import throughput
from lt2.config import ModelConfig
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.evaluate.throughput import cells as throughput_cells
from lt2_platform.evaluate.throughput.cells import Cell, frontier, measured
from lt2_platform.evaluate.throughput.task import OutOfMemoryError, phase, rate
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.platform.evaluate.tiny import MODEL

SMALL = {"batch_size": 2, "context": 8, "decode_steps": 3, "warmups": 0, "repeats": 2}


def tiny_cell(context=8, **fields):
    sizes = ModelConfig.model_validate({"vocab_size": 64, "max_seq_len": 2 * context + 8, **MODEL})
    return Cell(model=sizes, throughput=ThroughputConfig(**{**SMALL, "context": context}), threads=1, **fields)


@pytest.mark.parametrize("limit", [1024, 1500, 8000, 100_000])
def test_the_frontier_is_found_by_doubling_and_bisection(limit):
    asked = []

    def fits(context):
        asked.append(context)
        return context <= limit

    low, high = frontier(fits, first=1024, most=65_536)
    assert low <= limit
    if limit >= 65_536:
        assert (low, high) == (65_536, None)
    else:
        assert high is not None
        assert limit < high
        assert high - low <= max(1, low // 16)
    assert len(asked) == len(set(asked))
    assert len(asked) < 14


@pytest.mark.parametrize(
    ("times", "expected"),
    [([2.0], (5, 5, 5)), ([1.0, 10.0], (1, 5.5, 10)), ([1, 2, 4, 5, 10], (1.5, 2.5, 7.5))],
)
def test_quartiles_lie_between_what_was_measured(times, expected):
    found = rate(10, times)
    assert (found["q1"], found["median"], found["q3"]) == expected


def test_nothing_fits():
    assert frontier(lambda context: False, first=1024, most=65_536) == (0, 1024)


def test_a_cell_measures_in_a_process_of_its_own_and_its_peer_too():
    found = measured(tiny_cell(peer=True))
    assert found["prefill_tokens_per_s"]["median"] > 0
    assert found["peer"]["prefill_tokens_per_s"]["median"] > 0
    assert found["threads"] == 1
    assert found["max_rss_bytes"] > 2**26
    per_layer = found["cache_bytes_per_layer"]
    assert [len(loop) for loop in per_layer] == [2, 2]
    assert sum(map(sum, per_layer)) == found["cache_bytes"]


def test_a_cell_that_does_not_fit_says_in_which_phase():
    # The KV cache alone needs 2 loops x 1 layer x 2 rows x 4M tokens x 2 x 16 numbers x 4 bytes = 2 GiB.
    assert measured(tiny_cell(context=2**22, memory_gib=1.5)) == {"out_of_memory": "cache"}


def test_a_killed_process_is_out_of_memory_where_it_was_and_another_failure_is_an_error(monkeypatch):
    def died(returncode, stdout):
        done = subprocess.CompletedProcess([], returncode, stdout, "Traceback: something else")
        monkeypatch.setattr(throughput_cells.subprocess, "run", lambda *_, **__: done)

    died(-9, '{"phase": "model"}\n{"phase": "prefill"}\n')
    assert measured(tiny_cell()) == {"out_of_memory": "prefill"}
    for returncode, stdout in ((1, '{"phase": "model"}\n'), (0, '{"phase": "model"}\n'), (0, "")):
        died(returncode, stdout)
        with pytest.raises(RuntimeError, match="something else"):
            measured(tiny_cell())


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you")],
)
def test_every_way_to_run_out_of_memory_is_one(error):
    with pytest.raises(OutOfMemoryError, match="out of memory in decode") as caught, phase("decode"):
        raise error
    assert caught.value.phase == "decode"


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), phase("decode"):
        raise RuntimeError("shapes do not match")


def test_what_the_dashboard_gets_of_a_grid(tmp_path):
    measured = {"device": "cpu", "dtype": "float32"}
    cell = {"model": "gdn", "batch": 1, "context": 1024, "q1": 9.0, "q3": 11.0, "measured": measured}
    rows = [
        {**cell, "work": "prefill", "ours": 10.0},
        {**cell, "work": "decode", "ours": 5.0},
        {"model": "gdn", "batch": 2, "context": 2048, "out_of_memory": "decode"},
        {"work": "frontier", "model": "gdn", "batch": 1, "longest": 4096, "shortest_failed": 4352, "phase": "prefill"},
        {"work": "frontier", "model": "gdn", "batch": 2, "longest": 9, "shortest_failed": None, "phase": None},
    ]
    throughput.store(str(tmp_path), "cpu", rows)
    store = ResultsStore(Storage(str(tmp_path)))
    assert [run.run_id for run in store.runs()] == ["throughput-cpu-gdn"]
    found = [(row["metric"], row["batch_size"], row["context"], row["value"]) for _, _, row in store.index().evals]
    assert found == [
        ("prefill_tokens_per_s", 1, 1024, 10.0),
        ("decode_tokens_per_s", 1, 1024, 5.0),
        ("prefill_tokens_per_s", 2, 2048, None),
        ("decode_tokens_per_s", 2, 2048, None),
        ("prefill_tokens_per_s", 1, 4352, None),
        ("decode_tokens_per_s", 1, 4352, None),
    ]


def fake_cells(monkeypatch, fits):
    """Instead of processes: full attention slows with context, and only `fits` cells have room."""

    def kept(cell, out):
        how, mixer = cell.throughput, cell.model.layout.type
        if not fits(cell):
            return {"out_of_memory": "cache", "machine": "test"}
        rate = {"median": 1e5 / how.context if mixer == "uniform" else 100.0, "q1": 1.0, "q3": 2.0}
        both = {"prefill_tokens_per_s": rate, "decode_tokens_per_s": rate}
        return {**both, "peer": {"name": "peer", **both}, "cell": {}, "n_loops": 2, "machine": "test"}

    monkeypatch.setattr(throughput, "kept", kept)


@pytest.mark.parametrize("preset", sorted(throughput.PRESETS))
def test_every_cell_of_a_preset_can_be_built_and_drawn(preset, monkeypatch, tmp_path):
    grid = throughput.PRESETS[preset]
    fake_cells(monkeypatch, lambda cell: cell.throughput.context < grid.contexts[-1])
    rows = list(throughput.throughput_rows(preset, list(grid.models), tmp_path))
    lost = [row for row in rows if "out_of_memory" in row]
    assert len(lost) == len(grid.models) * len(grid.batches)
    assert len(rows) - len(lost) == 2 * len(lost) * (len(grid.contexts) - 1)
    assert all(row["measured"]["n_loops"] == 2 and row["ratio"] == 1 for row in rows if row not in lost)
    throughput.figure(rows, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_frontier_rows_say_where_and_in_which_phase_memory_ends(monkeypatch, tmp_path):
    fake_cells(monkeypatch, lambda cell: cell.throughput.context * cell.throughput.batch_size <= 5000)
    one, two = throughput.frontier_rows("cpu", ["gdn"], tmp_path)
    assert one["longest"] <= 5000 < one["shortest_failed"] <= 5000 * 17 / 16
    assert two["longest"] <= 2500 < two["shortest_failed"]
    assert (one["phase"], one["memory_gib"]) == ("cache", 1.0)


def test_cells_that_were_measured_are_not_measured_again(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(throughput, "measured", lambda cell: asked.append(cell) or {"out_of_memory": "model"})
    cell = throughput.cell("cpu", "gdn", 1, 1024)
    assert throughput.kept(cell, tmp_path)["out_of_memory"] == "model"
    assert throughput.kept(cell, tmp_path)["cell"]["throughput"]["context"] == 1024
    throughput.kept(throughput.cell("cpu", "gdn", 1, 1024, quick=True), tmp_path)
    assert len(asked) == 2
