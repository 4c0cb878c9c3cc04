"""`lt2 generate`, as a user types it."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2.generate import generate
from lt2_platform.data.tokenize import encode, load_tokenizer
from lt2_workflows.cli import app
from lt2_workflows.commands.generate import Shown
from tests.platform.evaluate.tiny import model, save


def invoke(checkpoint: str, *arguments: str):
    return CliRunner().invoke(app, ["generate", checkpoint, "a b", "--max-new-tokens", "12", *arguments])


@pytest.mark.parametrize("loops", [None, 1])
def test_it_prints_what_the_library_gives_at_that_depth(loops, tmp_path):
    net, tokenizer = model(seed=2), load_tokenizer("byte")
    view = net if loops is None else net.at_depth(loops)
    prompt = encode(tokenizer, "a b")
    (tokens,) = generate(view, [prompt], max_new_tokens=12, temperature=0.8, eos_id=tokenizer.eos_id)
    assert len(tokens) == 12
    result = invoke(save(tmp_path, net), "--device", "cpu", *(["--loops", str(loops)] if loops else []))
    assert result.exit_code == 0, result.output
    assert result.stdout == "a b" + tokenizer.decode(tokens) + "\n"
    assert result.stderr.startswith(f"{len(tokens)} tokens, ")
    assert result.stderr.endswith("on cpu, 1 loop\n" if loops else f"on cpu, {net.depth} loops\n")


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_is_not_there(device, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = invoke(str(tmp_path), "--device", device).exception
    assert isinstance(error, ConfigError)
    assert str(error) == {"tpu": "--device tpu: choose cuda or cpu", "cuda": "--device cuda: no GPU here"}[device]


def test_text_is_shown_as_soon_as_its_characters_are_whole(capsys):
    tokenizer = load_tokenizer("byte")
    shown = Shown(tokenizer, "Ca")
    ids = tokenizer.encode_batch(["fé!"])[0].tolist()
    seen = []
    for count in range(1, len(ids) + 1):
        assert not shown(ids[:count])
        seen.append(capsys.readouterr().out)
    assert seen == ["Caf", "", "é", "!"]
    assert shown.text == "fé!"
