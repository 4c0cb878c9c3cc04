"""`lt2 export` of models that were trained on conversations, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2.interop.export import verify_certificate
from lt2_platform.data.tokenizers.chat_template import FILE
from lt2_platform.data.tokenizers.tokenize import describe, load_tokenizer
from lt2_platform.evaluate.checkpoints import evaluate_anything
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.tasks import packs
from lt2_workflows.cli import app
from tests.platform import chats
from tests.platform.evaluate.items import choices, write
from tests.platform.evaluate.test_formats import hub_folder, sums
from tests.platform.evaluate.tiny import model, save


def checkpoint(folder: Path, file: str, *templates: str) -> str:
    tokenizer = load_tokenizer(file)
    record = {**describe(tokenizer), "file": "tokenizer/tokenizer.json", "chat_templates": list(templates)}
    net = model(seed=2, vocab_size=tokenizer.vocab_size)
    return save(folder / "run", net, tokenizer=record, files={record["file"]: Path(file).read_bytes()})


def export(place: str, folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["export", place, str(folder), *options])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("template", chats.MARKERS)
def test_transformers_asks_as_the_model_was_trained_and_stops_where_its_answers_end(tmp_path, template, bos):
    file = chats.tokenizer_file(tmp_path / "tokenizer", *chats.MARKERS[template], bos=bos)
    ours = load_tokenizer(file)
    place = checkpoint(tmp_path, file, template)
    said = export(place, tmp_path / "out")
    assert f"{FILE} is the template {template}, with the token ids of the training" in said
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    turns = [("system", "\nBe brief."), ("user", "What is 3 + 4?"), ("assistant", " It is 7.\n")]
    messages = [{"role": role, "content": text} for role, text in turns]
    ids = theirs.apply_chat_template(messages, return_dict=False)
    assert [*ids, ours.eos_id] == chats.trained_on(template, ours, turns)
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    if template == "plain":
        assert ends == ours.eos_id
        assert r"give generate() stop_strings=['\n\nUser: '] and the tokenizer" in said
    else:
        assert ends == [ours.eos_id, ours.special_id(chats.MARKERS[template][-1])]
    assert theirs.eos_token == "</s>"
    certificate = verify_certificate(tmp_path / "out")
    assert {FILE, "tokenizer.json", "tokenizer_config.json"} <= certificate["files"].keys()
    assert certificate["source"]["checkpoint"] == place
    assert certificate["source"].keys() == {"checkpoint", "step", "tokens", "data"}


def test_a_copy_is_checked_against_its_certificate(tmp_path):
    folder = tmp_path / "out"
    export(save(tmp_path / "run", model()), folder)
    shown = CliRunner().invoke(app, ["export", "--verify", str(folder)])
    assert (shown.exit_code, shown.output) == (0, f"{folder}: all 3 files are the certified ones\n")
    (folder / "notes.txt").write_text("of somebody")
    shown = CliRunner().invoke(app, ["export", "--verify", str(folder)])
    assert shown.exit_code == 0
    assert "not certified, and there as well: notes.txt" in shown.output
    (folder / "config.json").write_text("{}")
    refused = CliRunner().invoke(app, ["export", "--verify", str(folder)])
    assert (
        str(refused.exception) == f"{folder}: config.json is not the file that was certified; copy or export it again"
    )


def test_an_export_is_asked_conversations_as_its_checkpoint_is(tmp_path):
    file = chats.tokenizer_file(tmp_path / "tokenizer", *chats.MARKERS["chatml"])
    place = checkpoint(tmp_path, file, "chatml")
    export(place, tmp_path / "out")
    pack = str(tmp_path / "pack")
    sources = write(tmp_path / "data", mine=choices())
    packs.build(pack, sources | {"gsm8k": hub_folder(tmp_path / "gsm8k", train=sums(2, 5), test=sums(2))})
    config = HarnessConfig(pack=pack, tasks=("mine", "gsm8k"), chat=True, num_fewshot=0, max_length=400, system="Hi.")
    found, answers = [], []
    for name in (place, str(tmp_path / "out")):
        out = tmp_path / f"evaluated-{len(found)}"
        rows = evaluate_anything(name, [config], out=str(out)).rows
        found.append([{key: row[key] for key in row.keys() - {"chat", "task_sha256"}} for row in rows])
        lines = [json.loads(line) for path in sorted(out.rglob("samples/*")) for line in path.read_text().splitlines()]
        answers.append([(line["task"], line["doc_id"], line["answers"], line["scores"]) for line in lines])
        assert {row["chat"] for row in rows} == {"chatml" if name == place else "own"}
    assert found[0] == found[1]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4 + 2 * 2  # gsm8k has two filters


def test_which_template_is_written(tmp_path):
    file = chats.tokenizer_file(tmp_path / "tokenizer", *chats.MARKERS["chatml"])
    several = checkpoint(tmp_path / "several", file, "chatml", "plain")
    said = export(several, tmp_path / "none")
    assert "no chat template is written: it was trained on chatml, plain; --template NAME writes one" in said
    assert not (tmp_path / "none" / FILE).exists()
    export(several, tmp_path / "named", "--template", "plain")
    assert "The turns of plain" in (tmp_path / "named" / FILE).read_text()
    with pytest.raises(ConfigError, match="--template qwen: choose one of chatml, llama3, plain"):
        export(several, tmp_path / "wrong", "--template", "qwen")


def test_no_template_is_written_that_would_give_other_ids(tmp_path):
    drops = normalizers.Strip()
    file = chats.tokenizer_file(tmp_path / "tokenizer", *chats.MARKERS["chatml"], normalizer=drops)
    said = export(checkpoint(tmp_path, file, "chatml"), tmp_path / "out")
    assert "no chat template is written: transformers encodes a conversation as one text" in said
    assert "ask the checkpoint by `lt2 generate --chat`" in said
    assert not (tmp_path / "out" / FILE).exists()
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert len(ends) == 2
