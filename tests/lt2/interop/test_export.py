"""Export: the certificate, what it catches, and that a refused export leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lt2.config import ConfigError
from lt2.interop import certificate, export
from lt2.interop.certificate import ParityError
from lt2.interop.export import export_checkpoint, verify_certificate
from lt2.interop.transformers import LT2ForCausalLM
from lt2.mixers import attention
from lt2.model import LoopedLM
from tests.lt2.tiny import FULL, HYBRID, WINDOW_GDN, model, tokens

LENGTHS = (19, 7, 12)
LAYOUTS = {
    "full": FULL,
    "hybrid": HYBRID,
    "window+gdn": WINDOW_GDN,
    "biases": {"type": "kept", "attention": {"type": "full", "bias": "qkvo"}, "mixer": {"type": "gdn"}, "kept": [1]},
    "loops": {"type": "loops", "mixers": [{"type": "full"}, *({"type": "window", "window": w} for w in (6, 3))]},
    "random": {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.5},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("halting", [None, {"type": "exit_gate", "threshold": 0.6, "frozen_kv": "share"}])
def test_certified_export_of_every_layout(tmp_path: Path, layout: str, halting: dict | None):
    net = model(LAYOUTS[layout], halting=halting)
    checks = export_checkpoint(net, tmp_path / "out", lengths=LENGTHS, bos_id=1, eos_id=2)
    calls = {"alone", "batched", "padded_right", "padded_left", "cached"}
    assert {(c.name, c.n_loops) for c in checks} == {(name, t) for name in calls for t in (1, 2, 3)} | {("weights", 3)}
    assert all(c.passed for c in checks)
    written = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert [c["error"] for c in written["checks"]] == [c.error for c in checks]
    assert {c["tolerance"] for c in written["checks"]} == {0.0, 1e-9}
    assert {"config.json", "model.safetensors"} <= set(written["files"])
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir()}) == 1, "whoever reads one file reads all"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model
    torch.testing.assert_close(loaded(tokens(2, 9)).hidden, net(tokens(2, 9)).hidden, rtol=1e-12, atol=1e-12)


def test_half_precision_keeps_decays_in_fp32_and_is_certified_in_fp32(tmp_path: Path):
    net = model(HYBRID).float()
    checks = export_checkpoint(net, tmp_path / "out", lengths=LENGTHS, dtype=torch.bfloat16)
    assert {c.tolerance for c in checks} == {0.0, 1e-4}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model
    kinds = {name.rpartition(".")[2]: p.dtype for name, p in loaded.named_parameters()}
    assert kinds["A_log"] == kinds["dt_bias"] == torch.float32
    assert loaded.embed.weight.dtype == loaded.rho.dtype == torch.bfloat16
    assert torch.equal(loaded.blocks[0].mixers["gdn"].A_log, net.blocks[0].mixers["gdn"].A_log)
    assert net.embed.weight.dtype == torch.float32, "the model in memory is not converted"


def test_exporting_leaves_a_training_model_in_training(tmp_path: Path):
    net = model(halting={"type": "act"}).train()
    export_checkpoint(net, tmp_path / "out", lengths=LENGTHS)
    assert net.training


def broken_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attention_decode(q, k, v, lengths - 1)  # forgets the newest token


attention_decode = attention.attention_decode


def test_a_wrong_cache_is_refused_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "attention_decode", broken_decode)
    with pytest.raises(ParityError, match=r"3 of 16 parity checks fail \(cached at 1 loop:"):
        export_checkpoint(model(FULL), tmp_path / "out", lengths=LENGTHS)
    assert list(tmp_path.iterdir()) == []


def test_a_padding_leak_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache that takes pads for tokens."""
    advance = LoopedLM.sequence_info

    def leaky(self, input_ids, doc_ids, lengths, cache):
        return advance(self, input_ids, doc_ids, None, cache)

    monkeypatch.setattr(LoopedLM, "sequence_info", leaky)
    with pytest.raises(ParityError, match="cached"):
        export_checkpoint(model(HYBRID), tmp_path / "out", lengths=LENGTHS)


def test_one_changed_weight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def flipped(folder: Path):
        wrapped = load_wrapped(folder)
        with torch.no_grad():
            wrapped.model.blocks[1].ffn.up_proj.weight[0, 0] += 1e-13
        return wrapped

    load_wrapped = export.load_wrapped
    monkeypatch.setattr(export, "load_wrapped", flipped)
    with pytest.raises(ParityError, match="1 of 16 parity checks fail .weights"):
        export_checkpoint(model(FULL), tmp_path / "out", lengths=LENGTHS)


def test_a_nan_never_passes():
    assert not certificate.Check("x", 1, float("nan"), 1e-4).passed
    net = model(FULL)
    with torch.no_grad():
        net.norm.weight[0] = float("nan")
    assert not any(c.passed for c in certificate.certify(net, LT2ForCausalLM.of(net), lengths=LENGTHS))


@pytest.mark.parametrize("row", range(3))
def test_a_nan_in_any_row_is_seen(monkeypatch: pytest.MonkeyPatch, row: int):
    def spoilt(model, rows, n_loops):
        logits = certificate.alone(model, rows, n_loops)
        logits[row][-1, 3] = float("nan")
        return logits

    monkeypatch.setitem(certificate.CALLS, "cached", spoilt)
    net = model(FULL)
    checks = certificate.certify(net, LT2ForCausalLM.of(net), lengths=LENGTHS)
    assert {check.name for check in checks if not check.passed} == {"cached"}


def test_a_file_changed_later_is_noticed(tmp_path: Path):
    export_checkpoint(model(FULL), tmp_path / "out", lengths=LENGTHS)
    assert verify_certificate(tmp_path / "out")["schema_version"] == 1
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not the file that was certified"):
        verify_certificate(tmp_path / "out")
    weights.unlink()
    with pytest.raises(ConfigError, match="certified but not there"):
        verify_certificate(tmp_path / "out")
    (tmp_path / "out" / "parity.json").write_text('{"files": {')
    with pytest.raises(ConfigError, match=r"parity\.json is not JSON .*; copy or export it again"):
        verify_certificate(tmp_path / "out")
    (tmp_path / "out" / "parity.json").write_text('{"files": []}')
    with pytest.raises(ConfigError, match=r"parity\.json names no files; export the checkpoint again"):
        verify_certificate(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no parity\.json"):
        verify_certificate(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder .*nowhere"):
        verify_certificate(tmp_path / "nowhere")


def test_an_existing_folder_is_never_touched(tmp_path: Path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        export_checkpoint(model(FULL), tmp_path / "out", lengths=LENGTHS)


def test_tokenizer_files_travel_with_the_weights(tmp_path: Path):
    source = tmp_path / "tok"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    export_checkpoint(model(FULL), tmp_path / "folder", lengths=LENGTHS, tokenizer=source)
    export_checkpoint(model(FULL), tmp_path / "file", lengths=LENGTHS, tokenizer=source / "tokenizer.json")
    assert (tmp_path / "folder" / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert (tmp_path / "file" / "tokenizer.json").read_text() == "{}"
    assert "tokenizer.json" in verify_certificate(tmp_path / "file")["files"]
    with pytest.raises(ConfigError, match="does not exist"):
        export_checkpoint(model(FULL), tmp_path / "none", lengths=LENGTHS, tokenizer=tmp_path / "missing")
    (source / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="overwrite"):
        export_checkpoint(model(FULL), tmp_path / "clash", lengths=LENGTHS, tokenizer=source)
    assert not (tmp_path / "clash").exists()


def test_rows_too_short_to_decode_are_refused():
    net = model(FULL)
    with pytest.raises(ConfigError, match="exceed 5"):
        certificate.certify(net, LT2ForCausalLM.of(net), lengths=(9, 5))


def test_a_tokenizer_of_its_own_begins_texts_as_training_does(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    for name in ("once", "twice"):  # what already begins with BOS is left alone
        source = tmp_path / "tokenizer.json" if name == "once" else tmp_path / "once" / "tokenizer.json"
        export_checkpoint(model(FULL), tmp_path / name, lengths=LENGTHS, tokenizer=source, bos_id=0, eos_id=1)
        loaded = AutoTokenizer.from_pretrained(tmp_path / name, local_files_only=True)
        assert loaded("a b").input_ids == [0, 2, 3]
        assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<s>", "</s>", "</s>")
        assert {"tokenizer.json", "tokenizer_config.json"} <= verify_certificate(tmp_path / name)["files"].keys()
