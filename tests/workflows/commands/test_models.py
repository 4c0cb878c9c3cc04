"""check-mixer, export and bench mixers, by hand as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from lt2.analysis.layer_bench import crossover
from lt2.config import ConfigError
from lt2_platform.evaluate import diagnostics
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.commands.diagnosis import data_of
from lt2_workflows.commands.models import doubling, find_checkpoint
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import write_dataset


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_check_mixer_passes_a_shipped_mixer():
    result = invoke("check-mixer", "window", "--fields", '{"window": 5}')
    assert result.exit_code == 0, result.output
    assert "decode_matches_forward" in result.output
    assert "FAIL" not in result.output


def test_check_mixer_names_what_is_wrong():
    error = invoke("check-mixer", "windo").exception
    assert isinstance(error, ConfigError)
    assert "windo" in str(error)
    error = invoke("check-mixer", "window", "--fields", "{window: 5}").exception
    assert isinstance(error, ConfigError)
    assert "--fields is not JSON" in str(error)


def test_bench_mixers_reports_every_mixer_and_length(tmp_path):
    out = tmp_path / "new" / "layers-0.6b"
    result = invoke(
        "bench", "mixers", "--dim", "32", "--heads", "2", "--seq-len", "640", "--device", "cpu", "--mixers",
        '[{"type": "gdn"}, {"type": "window", "window": 8}]', "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(Path(f"{out}.json").read_text())
    assert [(row["mixer"], row["seq_len"]) for row in rows] == [
        (mixer, length) for mixer in ("full", "gdn", "window(window=8)") for length in (512, 640)
    ]
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")
    by_name = {(row["mixer"], row["seq_len"]): row for row in rows}
    assert by_name["full", 640]["cache_bytes"] == 2 * 640 * 32 * 4
    assert by_name["gdn", 640]["cache_bytes"] == by_name["gdn", 512]["cache_bytes"]
    assert by_name["window(window=8)", 640]["cache_bytes"] == 2 * 8 * 32 * 4
    # The inputs and projections of the layer are kept, whatever attention does: memory grows with the length.
    assert by_name["full", 640]["saved_bytes"] > by_name["full", 512]["saved_bytes"] > 0


def test_bench_mixers_keeps_its_rows_for_the_dashboard(tmp_path):
    options = ["--dim", "32", "--heads", "2", "--seq-len", "512", "--device", "cpu", "--mixers", "gdn"]
    result = invoke("bench", "mixers", *options, "--storage", str(tmp_path))
    assert result.exit_code == 0, result.output
    store = ResultsStore(Storage(str(tmp_path)))
    (run,) = store.runs()
    assert run.config == {"dim": 32, "num_heads": 2, "batch": 1, "device": "cpu", "dtype": "float32"}
    rows = [row for _, name, row in store.index().evals if name == "mixers"]
    assert [(row["task"], row["seq_len"], row["value"] == row["us_per_token"]) for row in rows] == [
        ("full", 512, True),
        ("gdn", 512, True),
    ]


def test_diagnose_reads_what_the_run_was_trained_on(tmp_path):
    data = write_dataset(tmp_path / "steps" / "prepare-1" / "out")
    save(tmp_path / "steps" / "train-1" / "out", model())
    storage = Storage(str(tmp_path))
    storage.write_json("steps/train-1/spec.json", {"needs": {"prepare": "prepare-1"}})
    assert data_of(storage, "train-1") == data
    error = invoke("diagnose", "train-1", "--storage", str(tmp_path)).exception
    assert isinstance(error, ConfigError)  # the documents of this dataset are short
    assert f"no held-out document of {data} has its first 16 tokens" in str(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnostics, "SHORTEST", 4)
        result = invoke("diagnose", "train-1", "--storage", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "first_token_mass" in result.output
    assert "/figures/loop_diagnostics?runs=train-1" in result.output
    rows = [row for _, name, row in ResultsStore(storage).index().evals if name == "diagnostics"]
    assert {(row["loop"], row["layer"]) for row in rows} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    error = invoke("diagnose", str(tmp_path / "steps/train-1/out"), "--storage", str(tmp_path / "other")).exception
    assert "give --data" in str(error)


def test_positions_are_shown_by_depth_and_stored(tmp_path):
    write_dataset(tmp_path / "steps" / "prepare-1" / "out")
    save(tmp_path / "steps" / "train-1" / "out", model())
    storage = Storage(str(tmp_path))
    storage.write_json("steps/train-1/spec.json", {"needs": {"prepare": "prepare-1"}})
    options = ["positions", "train-1", "--storage", str(tmp_path), "--length", "7"]
    error = invoke(*options[:5], "8").exception  # documents of 5 and 8 tokens in rows of 13
    assert "set the task's length to at most 7" in str(error)
    result = invoke(*options, "--loops", "1,2")
    assert result.exit_code == 0, result.output
    head, _, *lines = [line.split("  ") for line in result.output.splitlines() if line]
    columns = ["position", "tokens", "loss, 1 loop", "loss, 2 loops", "2 loops above 1 loop"]
    assert [cell.strip() for cell in head if cell.strip()] == columns
    *_, one, two, above = [cell.strip() for cell in lines[0] if cell.strip()]
    apart, error = map(float, above.split(" ± "))
    assert apart == pytest.approx(float(two) - float(one), abs=2e-4)
    assert 0 < error < 1
    assert [line[0].strip() for line in lines[:4]] == ["1", "2", "3 to 4", "5 to 7"]
    assert "/figures/positions?runs=train-1&task=positions-7" in result.output
    named = invoke(*options, "--name", "mine")
    assert "/figures/positions?runs=train-1&task=mine" in named.output
    rows = [row for _, name, row in ResultsStore(storage).index().evals if name == "positions"]
    places = {(row["task"], row["n_loops"], row["position"]) for row in rows}
    assert places == {
        (task, n, last) for task, n in (("positions-7", 1), ("positions-7", 2), ("mine", 2)) for last in (1, 2, 4, 7)
    }
    shown = json.loads(invoke(*options, "--json").output)
    assert len(shown) == 4
    assert "groups" not in shown[0]


def test_bench_mixers_takes_a_mixer_of_ones_own_and_measures_none_before_all_are_known(tmp_path):
    own = "examples/deltaproduct.py:DeltaProductConfig"
    options = ["bench", "mixers", "--dim", "32", "--heads", "2", "--seq-len", "128", "--device", "cpu"]
    result = invoke(*options, "--mixers", f"full,{own}")
    assert result.exit_code == 0, result.output
    assert "deltaproduct" in result.output
    with patch("lt2.analysis.layer_bench.measure", side_effect=AssertionError("too early")):
        error = invoke(*options, "--mixers", '[{"type": "gdn"}, {"type": "window", "window": -1}]').exception
    assert isinstance(error, ConfigError), error
    assert "window" in str(error)


def test_bench_mixers_refuses_a_shape_that_cannot_be_built():
    error = invoke("bench", "mixers", "--dim", "30", "--heads", "4", "--seq-len", "512", "--device", "cpu").exception
    assert isinstance(error, ConfigError)
    assert "num_heads 4 does not divide dim 30" in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mixers", '["gdn"]'], '--mixers: "gdn" is not a mixer; give objects like {"type": "gdn"}'),
        (["--mixers", '[{"window": 8}]'], '--mixers: {"window": 8} is not a mixer;'),
        (["--device", "mps"], "--device mps: choose cuda or cpu"),
        (["--out", "/dev/null/layers"], "/dev/null/layers cannot be written"),
        (["--out", "s3://bucket/layers"], "s3:/bucket/layers is no folder of this machine"),
    ],
)
def test_bench_mixers_says_what_is_wrong_before_it_measures(options, message):
    error = invoke("bench", "mixers", *options).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


def row(mixer: str, seq_len: int, train_ms: float) -> dict:
    return {"mixer": mixer, "seq_len": seq_len, "train_ms": train_ms}


def test_crossover_interpolates_where_the_curves_meet():
    full = [row("full", length, (length / 1000) ** 2) for length in (500, 2000, 8000)]
    linear = [row("gdn", length, length / 1000) for length in (500, 2000, 8000)]
    assert crossover(full + linear, "gdn") == pytest.approx(1000)
    assert crossover(full + [row("gdn", 500, 1e3), row("gdn", 8000, 1e3)], "gdn") is None
    assert crossover(full + [row("gdn", 500, 1e-3), row("gdn", 8000, 1e-3)], "gdn") == 500


def test_lengths_double_and_end_at_the_longest():
    assert doubling(512, 4096) == [512, 1024, 2048, 4096]
    assert doubling(512, 3000) == [512, 1024, 2048, 3000]
    assert doubling(300, 300) == [300]


GOLDEN = Path(__file__).parents[2] / "platform" / "train" / "golden"


def test_export_certifies_a_checkpoint_and_refuses_an_existing_folder(tmp_path):
    folder = tmp_path / "model"
    result = invoke("export", str(GOLDEN), str(folder))
    assert result.exit_code == 0, result.output
    assert "parity checks passed" in result.output
    assert {"config.json", "model.safetensors", "parity.json"} <= {file.name for file in folder.iterdir()}
    error = invoke("export", str(GOLDEN), str(folder)).exception
    assert isinstance(error, ConfigError)
    assert "exists" in str(error)


def record(storage: Storage, workflow: str, run: str, *, ended: float | None) -> None:
    """A workflow of one finished (or running) step whose output has checkpoints."""
    storage.write_json(f"workflows/{workflow}-1/dag.json", {"workflow": workflow, "ids": {"pretrain": run}})
    storage.write_bytes(f"steps/{run}/out/checkpoints/step-1/COMPLETE", b"")
    state = {"state": "running" if ended is None else "done", "ended": ended, "error": None}
    storage.write_json(f"steps/{run}/attempts/1/state.json", state)


def test_checkpoints_are_found_by_run_and_by_workflow(tmp_path, capsys):
    storage = Storage(str(tmp_path))
    record(storage, "old", "pretrain-aaa", ended=1.0)
    record(storage, "new", "pretrain-bbb", ended=2.0)
    assert find_checkpoint(storage, "pretrain-aaa") == storage.join("steps", "pretrain-aaa", "out")
    assert find_checkpoint(storage, "new") == storage.join("steps", "pretrain-bbb", "out")
    assert find_checkpoint(storage, "old-1") == storage.join("steps", "pretrain-aaa", "out")
    assert find_checkpoint(storage, "s3://bucket/run") == "s3://bucket/run"
    with pytest.raises(ConfigError, match="'odl'; those in .*: new, old, pretrain-aaa, pretrain-bbb"):
        find_checkpoint(storage, "odl")
    storage.write_bytes("runs/first/checkpoints/step-1/COMPLETE", b"")  # torchrun's
    assert find_checkpoint(storage, "first") == storage.join("runs", "first")
    assert not capsys.readouterr().err
    both = {"pretrain": "pretrain-aaa", "other": "pretrain-bbb"}
    storage.write_json("workflows/new-1/dag.json", {"workflow": "new", "ids": both})
    assert find_checkpoint(storage, "new") == storage.join("steps", "pretrain-bbb", "out")
    assert capsys.readouterr().err == "new: pretrain-bbb, the newest of 2 runs; `lt2 status new` lists them\n"
