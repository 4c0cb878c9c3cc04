"""What transformers renders and encodes by a written template is what training has read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer

from lt2_platform.data.sources.documents import question
from lt2_platform.data.tokenizers.chat_template import CUT, FILE, MARK, add_chat_template
from lt2_platform.data.tokenizers.tokenize import encode
from lt2_platform.data.units import encode_documents
from tests.platform import chats

SAID = [
    [("user", "What is 3 + 4?"), ("assistant", "It is 7.")],
    [("user", "\n\nBe brief.\n "), ("assistant", "\n7\n\n"), ("user", " And\t12?"), ("assistant", "User: 12")],
    [("system", "1. one\n2. two"), ("user", "été 東京 🙂"), ("assistant", "User:"), ("user", "?"), ("assistant", "7")],
]


LLAMA2 = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
SENTENCEPIECE = {
    "llama2": {"normalizer": LLAMA2, "pre_tokenizer": None},
    "metaspace": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "words": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
    "always": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
}


def written(template: str, folder: Path, *, markers: bool, bos: bool, **kind: Any) -> tuple[Any, Any]:
    """(the tokenizer of training, that which transformers loads)."""
    made = chats.MARKERS[template] if markers else ()
    ours = chats.load_tokenizer(chats.tokenizer_file(folder, *made, bos=bos, **kind))
    assert add_chat_template(template, ours, folder)
    special = {"eos_token": "</s>"} | ({"bos_token": "<s>"} if bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    return ours, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("template", chats.MARKERS)
@pytest.mark.parametrize(
    "kind",
    [
        *({}, {"bos": False}, {"markers": False}, {"pre_tokenizer": pre_tokenizers.ByteLevel()}),
        *(kind | more for kind in SENTENCEPIECE.values() for more in ({}, {"markers": False}, {"bos": False})),
    ],
)
def test_a_conversation_has_the_token_ids_of_training(tmp_path, template, kind):
    ours, theirs = written(template, tmp_path, **{"markers": True, "bos": True, **kind})
    for turns in SAID:
        messages = [{"role": role, "content": text} for role, text in turns]
        whole = theirs.apply_chat_template(messages, return_dict=False)
        assert [*whole, ours.eos_id] == chats.trained_on(template, ours, turns)
        asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        assert asked == whole[: len(asked)]
        assert theirs.encode(theirs.apply_chat_template(messages, tokenize=False), add_special_tokens=False) == whole
        parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]
        assert theirs.apply_chat_template(parts, return_dict=False) == whole


@pytest.mark.parametrize("template", chats.MARKERS)
@pytest.mark.parametrize("system", ["", "Be brief.\n"])
def test_a_question_has_the_token_ids_of_lt2_generate(tmp_path, template, system):
    ours, theirs = written(template, tmp_path, markers=True, bos=True)
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": " How many? "}]
    (ids,) = encode_documents(ours, [question(template, " How many? ", system=system)])
    asked = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert asked == [*encode(ours, ""), *ids.tolist()]
    begun = [*messages, {"role": "assistant", "content": "So it is"}]
    going_on = theirs.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    assert going_on == [*asked, *encode(ours, "So it is", bos=False)]


@pytest.mark.parametrize("kind", [{}, *SENTENCEPIECE.values()], ids=["plain", *SENTENCEPIECE])
def test_other_text_is_encoded_as_before(tmp_path, kind):
    ours, theirs = written("plain", tmp_path, markers=True, bos=True, **kind)
    for text in (*chats.TEXTS, "User: hi", " hi", "\n", f"{MARK}hi", ""):
        assert theirs.encode(text, add_special_tokens=False) == encode(ours, text, bos=False)
    assert CUT not in theirs.decode(theirs.encode(f"a{CUT}b"))


def test_an_unknown_role_is_refused(tmp_path):
    _, theirs = written("chatml", tmp_path, markers=True, bos=True)
    with pytest.raises(Exception, match="roles are system, user and assistant, not tool"):
        theirs.apply_chat_template([{"role": "tool", "content": "7"}])


def test_a_tokenizer_that_drops_the_spaces_around_a_text_is_left_as_it_is(tmp_path):
    file = Path(chats.tokenizer_file(tmp_path, normalizer=normalizers.Strip()))
    before = file.read_bytes()
    assert not add_chat_template("plain", chats.load_tokenizer(str(file)), tmp_path)
    assert file.read_bytes() == before
    assert not (tmp_path / FILE).exists()
