"""`lt2 generate`, as a user types it."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2.generate import generate
from lt2_platform.data.sources.documents import Piece, end_of_answer, question, text_of
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, describe, encode, load_tokenizer
from lt2_platform.machine import memory
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


@pytest.mark.parametrize("prefix", [256, None])
def test_no_text_is_bos_also_where_texts_do_not_begin_with_it(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)
    monkeypatch.setattr(ByteTokenizer, "prefix_id", prefix)
    net, tokenizer = model(seed=2), load_tokenizer("byte")
    begin = [tokenizer.eos_id if prefix is None else prefix]
    (tokens,) = generate(net, [begin], max_new_tokens=12, temperature=0.8, eos_id=tokenizer.eos_id)
    arguments = ["generate", save(tmp_path, net), "", "--max-new-tokens", "12", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == tokenizer.decode(tokens) + "\n"


def test_an_exit_gate_at_another_threshold(tmp_path):
    net, tokenizer = model(seed=2, n_loops=4, halting={"type": "exit_gate"}), load_tokenizer("byte")
    (tokens,) = generate(
        net.at_depth(4, exit_threshold=0.3), [encode(tokenizer, "a b")], max_new_tokens=12, eos_id=tokenizer.eos_id,
        temperature=0.0,
    )  # fmt: skip
    place, greedy = save(tmp_path, net), ("--device", "cpu", "--temperature", "0")
    result = invoke(place, *greedy, "--exit-threshold", "0.3")
    assert result.stdout == "a b" + tokenizer.decode(tokens) + "\n" != invoke(place, *greedy).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exit-threshold", "0.3", "--loops", "2"], "give --loops (no early exit) or --exit-threshold, not both"),
        (["--template", "alpaca"], "--template alpaca: choose one of chatml, llama3, plain"),
    ],
)
def test_options_that_cannot_be_are_refused_before_the_model_is_loaded(tmp_path, options, message):
    assert str(invoke(str(tmp_path / "no-model"), *options).exception) == message


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


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--max-new-tokens", str(10**15)], f"--max-new-tokens {10**15} at 2 loops"),
        (["--loops", str(10**9)], f"--max-new-tokens 12 at {10**9} loops"),
    ],
)
def test_what_no_memory_holds_is_refused(tmp_path, options, asked):
    error = invoke(save(tmp_path, model()), "--device", "cpu", *options).exception
    assert isinstance(error, ConfigError)
    assert f"{asked} need a cache of " in str(error)


def test_a_container_has_less_memory_than_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "usable", lambda: 1)
    error = invoke(save(tmp_path, model()), "--device", "cpu").exception
    assert "need a cache of 0 GB, and cpu has 0 GB; ask for fewer" in str(error)


def chatting(folder, net, *templates: str) -> str:
    known = {"chat_templates": list(templates)} if templates else {}
    return save(folder, net, tokenizer={**describe(ByteTokenizer()), "file": None, **known})


@pytest.mark.parametrize(
    ("trained_on", "options", "template", "said"),
    [
        (["chatml"], ["--chat"], "chatml", ""),
        (["plain"], ["--chat"], "plain", ""),
        (["plain", "chatml"], ["--template", "chatml"], "chatml", ""),
        (["plain"], ["--template", "chatml"], "chatml", "was not trained on chatml but on plain\n"),
        ([], ["--template", "chatml"], "chatml", "on no conversations, according to its checkpoint\n"),
        (["plain"], [], None, "was trained on conversations; --chat uses their template\n"),
        ([], [], None, ""),
    ],
)
def test_a_model_is_asked_by_the_template_it_was_trained_on(tmp_path, trained_on, options, template, said):
    net, tokenizer = model(seed=2), load_tokenizer("byte")
    text = "a b" if template is None else text_of(question(template, "a b"))
    (tokens,) = generate(net, [encode(tokenizer, text)], max_new_tokens=12, temperature=0.8, eos_id=tokenizer.eos_id)
    result = invoke(chatting(tmp_path, net, *trained_on), "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == ("a b" if template is None else "") + tokenizer.decode(tokens) + "\n"
    note, _, _ = result.stderr.partition(f"{len(tokens)} tokens")
    assert note.endswith(said)
    assert bool(note) == bool(said)


def test_the_systems_turn_comes_before_the_question(tmp_path):
    net, tokenizer = model(seed=2), load_tokenizer("byte")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    (tokens,) = generate(net, [encode(tokenizer, text)], max_new_tokens=12, temperature=0.8, eos_id=tokenizer.eos_id)
    result = invoke(chatting(tmp_path, net, "chatml"), "--device", "cpu", "--chat", "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    assert result.stdout == tokenizer.decode(tokens) + "\n"


@pytest.mark.parametrize(
    ("trained_on", "options", "message"),
    [
        ([], ["--chat"], "was not trained on conversations; --template chatml|llama3|"),
        (["chatml", "plain"], ["--chat"], "on several templates; choose --template chatml|plain"),
        (["chatml"], ["--system", "Be brief."], "--system needs --chat or --template NAME"),
        (["chatml"], ["--template", "qwen"], "--template qwen: choose one of chatml, llama3, plain"),
    ],
)
def test_a_template_that_cannot_be_told(tmp_path, trained_on, options, message):
    error = invoke(chatting(tmp_path, model(), *trained_on), *options).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("template", "written", "printed"),
    [
        ("chatml", "one<|im_end|>\n", ["o", "n", "e"]),
        ("chatml", "a <|b|> c", ["a", " ", "<|b", "|", ">", " ", "c"]),
        ("plain", "a\n\nb\n\nUser: no", ["a", "\n\nb"]),
    ],
)
def test_an_answer_ends_before_what_ends_it_and_nothing_of_that_is_shown(capsys, template, written, printed):
    tokenizer = load_tokenizer("byte")
    shown, end = Shown(tokenizer, end=end_of_answer(template)), end_of_answer(template).text
    ids = tokenizer.encode_batch([written])[0].tolist()
    seen = []
    for count in range(1, len(ids) + 1):
        ended = shown(ids[:count])
        seen.append(capsys.readouterr().out)
        assert ended == (end in written[:count])
        if ended:
            break
    assert [text for text in seen if text] == printed
    assert shown.rest(ids[:count]) == ""


def test_what_could_have_become_the_end_is_shown_unless_the_document_is_over(capsys):
    tokenizer = load_tokenizer("byte")
    ids = tokenizer.encode_batch(["yes\n\n"])[0].tolist()
    for tokens, rest in ((ids, "\n\n"), ([*ids, tokenizer.eos_id], "")):
        shown = Shown(tokenizer, end=end_of_answer("plain"))
        assert [shown(tokens[:count]) for count in range(1, len(tokens) + 1)] == [False] * len(tokens)
        assert (capsys.readouterr().out, shown.rest(tokens)) == ("yes", rest)


def test_a_special_token_ends_an_answer_where_the_tokenizer_has_it(capsys):
    class Chatty(ByteTokenizer):
        def special_id(self, name):
            return 258 if name == "<|im_end|>" else None

    shown = Shown(Chatty(), end=Piece("<|im_end|>", special=True))
    ids = Chatty().encode_batch(["<|im_end|>"])[0].tolist()  # as text it ends nothing
    assert not shown(ids)
    assert shown([*ids, 258])
    assert capsys.readouterr().out == "<|im_end|>"
