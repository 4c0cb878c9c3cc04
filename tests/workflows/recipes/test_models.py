"""The paper's architectures, and that the committed table of them is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lt2.analysis import accounting
from lt2.config import ConfigError, ModelConfig
from lt2.layout import layout
from lt2_workflows.recipes.models import DEPTHS, ROWS, SCALES, paper_model


@pytest.fixture(scope="module")
def model_table() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "model_table.py"
    spec = importlib.util.spec_from_file_location("model_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_a_valid_config_of_its_scale(row: str, scale: str):
    config = paper_model(row, scale)
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert (config.vocab_size, config.num_heads, config.rope_theta, config.max_seq_len) == (128_256, 16, 1e4, 4096)
    assert (config.dim, config.ffn_dim) == {"0.6b": (1024, 2816), "1.3b": (2048, 5632)}[scale]
    assert config.n_loops == (1 if row == "transformer" else 4)


@pytest.mark.parametrize(("scale", "total"), [("0.6b", 583.9e6), ("1.3b", 1290.4e6)])
def test_the_reference_has_the_size_the_scale_is_named_for(scale: str, total: float):
    assert accounting.parameters(paper_model("looped-transformer", scale)).total == pytest.approx(total, abs=0.1e6)


@pytest.mark.parametrize("scale", SCALES)
def test_stacks_are_matched_in_parameters(scale: str):
    """Pure stacks have the depth nearest to the reference; hybrids, whose depth the paper gives, come within 10 %."""
    reference = accounting.parameters(paper_model("looped-transformer", scale)).total
    for name, row in ROWS.items():
        config = paper_model(name, scale)
        counts = accounting.parameters(config)
        if len(row.mixers) == 2:
            assert abs(counts.total / reference - 1) < 0.10, name
        elif name in DEPTHS[scale]:
            assert abs(counts.total - reference) <= counts.stack / config.n_layers / 2, name


def test_hybrids_put_attention_at_every_fifth_layer():
    for row, (attention, mixer) in {n: r.mixers for n, r in ROWS.items() if len(r.mixers) == 2}.items():
        for scale, count in (("0.6b", 21), ("1.3b", 20)):
            kinds = [spec.type for spec in layout(paper_model(row, scale))[0]]
            assert kinds == [attention if i % 5 == 4 else mixer for i in range(count)], row


def test_windows_are_the_papers():
    windows = {scale: paper_model("window", scale).layout.mixer.window for scale in SCALES}
    assert windows == {"0.6b": 256, "1.3b": 2048}


@pytest.mark.parametrize(("row", "scale"), [("gnd", "0.6b"), ("gdn", "7b")])
def test_unknown_names_list_the_known_ones(row: str, scale: str):
    with pytest.raises(ConfigError, match="choose one of"):
        paper_model(row, scale)


def test_the_committed_table_is_current(model_table: ModuleType):
    assert model_table.PAGE.read_text() == model_table.render()


def test_check_notices_a_stale_table(model_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_table, "PAGE", tmp_path / "models.md")
    monkeypatch.setattr(model_table, "SCALES", {"0.6b": SCALES["0.6b"]})
    monkeypatch.setattr(model_table, "ROWS", {"looped-transformer": ROWS["looped-transformer"]})
    assert model_table.main(["--check"]) == 1
    assert model_table.main([]) == 0
    assert model_table.main(["--check"]) == 0
    model_table.PAGE.write_text(model_table.PAGE.read_text().replace("583.9M", "584.0M"))
    assert model_table.main(["--check"]) == 1
