"""An Ouro folder as a run's checkpoint: with its tokenizer, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.distill import teacher
from lt2_platform.distill.teacher import load_teacher, store_pretrained, tokenizer_files
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.checkpoints.matching import lineage
from tests.platform.distill.stages import write_ouro
from tests.platform.train.packed import train_config

SETTINGS = json.dumps({"eos_token": "</s>", "pad_token": "<pad>"})


@pytest.fixture
def ouro(tmp_path) -> Path:
    folder = Path(write_ouro(tmp_path / "ouro"))
    words = {"a": 0, "</s>": 1, "<pad>": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(SETTINGS)
    return folder


def test_an_ouro_folder_brings_its_tokenizer_and_is_read_once(ouro, tmp_path, monkeypatch):
    out = str(tmp_path / "run")
    result = store_pretrained(str(ouro), out)
    assert result == {"step": 0, "position": 0, "tokens": 0, "loss": None}
    place = checkpoint.resolve(out)
    assert Storage(out).read_json("summary.json") == result | {"checkpoint": place}
    info = checkpoint.read_info(place).tokenizer
    found = load_tokenizer(Storage(place).join(info["file"]))
    assert (found.eos_id, found.pad_id, found.sha256) == (1, 2, info["sha256"])  # as the settings beside it say
    assert (Path(place) / "tokenizer/tokenizer_config.json").read_text() == SETTINGS
    monkeypatch.setattr(teacher, "import_pretrained", lambda *of, **how: pytest.fail("it is there"))
    assert store_pretrained(str(ouro), out) == result
    frozen = load_teacher(out, train_config(), torch.device("cpu"))
    assert not any(module.training for module in frozen.modules())


def test_the_tokenizers_file_comes_first_whatever_it_is_called(ouro, tmp_path):
    alone = tmp_path / "other.tiktoken"
    alone.write_bytes(b"YQ== 0\n")
    assert tokenizer_files(str(alone)) == {"tokenizer/other.tiktoken": b"YQ== 0\n"}
    names = ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    assert list(tokenizer_files(str(ouro / "tokenizer.json"))) == names


def test_models_of_one_config_are_told_apart_by_their_weights(ouro, tmp_path):
    def stored(name: str) -> str:
        store_pretrained(str(ouro), str(tmp_path / name))
        return lineage(checkpoint.read_info(checkpoint.resolve(str(tmp_path / name))))

    assert stored("one") == stored("again")
    weights = load_file(ouro / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, ouro / "model.safetensors")
    assert stored("another") != stored("one")
