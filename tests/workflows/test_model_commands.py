"""check-mixer, export and bench mixers, by hand as a user types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2.layer_bench import crossover
from lt2_workflows.cli import app
from lt2_workflows.model_commands import doubling


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
    out = tmp_path / "layers"
    result = invoke(
        "bench", "mixers", "--dim", "32", "--heads", "2", "--seq-len", "640", "--device", "cpu", "--mixers",
        '[{"type": "gdn"}, {"type": "window", "window": 8}]', "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(out.with_suffix(".json").read_text())
    assert [(row["mixer"], row["seq_len"]) for row in rows] == [
        (mixer, length) for mixer in ("full", "gdn", "window(window=8)") for length in (512, 640)
    ]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    by_name = {(row["mixer"], row["seq_len"]): row for row in rows}
    assert by_name["full", 640]["cache_bytes"] == 2 * 640 * 32 * 4
    assert by_name["gdn", 640]["cache_bytes"] == by_name["gdn", 512]["cache_bytes"]
    assert by_name["window(window=8)", 640]["cache_bytes"] == 2 * 8 * 32 * 4
    # The inputs and projections of the layer are kept, whatever attention does: memory grows with the length.
    assert by_name["full", 640]["saved_bytes"] > by_name["full", 512]["saved_bytes"] > 0


def test_bench_mixers_refuses_a_shape_that_cannot_be_built():
    error = invoke("bench", "mixers", "--dim", "30", "--heads", "4", "--seq-len", "512", "--device", "cpu").exception
    assert isinstance(error, ConfigError)
    assert "num_heads 4 does not divide dim 30" in str(error)


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
