"""A chat template of ours in Jinja, as transformers reads it, with the very token ids of training.

Training encodes the pieces of a turn (marker, role, text) one by one; transformers encodes the rendered text at once,
where the end of one piece and the beginning of the next may become one token ("User: " + "Hi" has the token " Hi").
So the written template parts pieces by U+FDD0, a code point that no text has, and the tokenizer beside it is told to
split there and to drop it. One that puts a mark where a text begins (SentencePiece's) is told to put it before every
piece, as it did in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from lt2_platform.data.sources.documents import Piece, turn_frame, up_to_answer
from lt2_platform.data.tokenizers.tokenize import Tokenizer, encode
from lt2_platform.data.units import encode_documents

FILE = "chat_template.jinja"
CUT = "\ufdd0"
MARK = "\u2581"  # SentencePiece's for a space
ROLES = ("system", "user", "assistant")

_JINJA = """\
{#- The turns of %(name)s. U+FDD0 parts what training encodes apart; the tokenizer drops it. -#}
{%%- set around = {
%(frames)s
} -%%}
%(bos)s{%%- for message in messages -%%}
  {%%- if message["role"] not in around -%%}
    {{- raise_exception("roles are system, user and assistant, not " ~ message["role"]) -}}
  {%%- endif -%%}
  {%%- set before, after = around[message["role"]] -%%}
  {%%- set said = message["content"] -%%}
  {%%- if said is not string -%%}
    {%%- set said = said | map(attribute="text") | join -%%}
  {%%- endif -%%}
  {{- before + said + after -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}
  {{- around["assistant"][0] -}}
{%%- endif -%%}
"""

_PROBES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "What is 12 + 34?"),),
    (
        ("system", "Be brief."),
        ("user", "\n\n  def f(x):\n\treturn x\n\n"),
        ("assistant", " No. "),
        ("user", "été 東京 🙂"),
    ),
    (("user", "User: hi\n\nAssistant: "), ("assistant", "1. one\n2. two\n"), ("user", "...and?")),
)
"""Conversations whose pieces would not stay apart by themselves."""


def jinja(template: str, *, bos: bool) -> str:
    """The template's text; it begins with BOS if training does."""
    frames = []
    for role in ROLES:
        before, after = turn_frame(template, role)
        frames.append(f'  "{role}": [{json.dumps(_parted(before))}, {json.dumps(CUT + _parted(after))}],')
    begin = "{{- bos_token + " + json.dumps(CUT) + " -}}\n" if bos else ""
    return _JINJA % {"name": template, "frames": "\n".join(frames), "bos": begin}


def _parted(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text + CUT for piece in pieces)


def add_chat_template(template: str, tokenizer: Tokenizer, folder: Path) -> bool:
    """Write the template beside `<folder>/tokenizer.json`, and have that part its pieces.

    False, and nothing is changed, where the tokenizer cannot be made to give the ids of training: some drop the spaces
    around every text that they encode.
    """
    file = folder / "tokenizer.json"
    text = jinja(template, bos=tokenizer.bos_id is not None)
    expected = [trained_ids(template, tokenizer, probe) for probe in _PROBES]
    for fast in _parting(file):
        bos = {} if tokenizer.bos_id is None else {"bos_token": fast.id_to_token(tokenizer.bos_id)}
        wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=text, **bos)
        if [rendered_ids(wrapped, probe) for probe in _PROBES] == expected:
            fast.save(str(file))
            (folder / FILE).write_text(text)
            return True
    return False


def _parting(file: Path) -> Iterator[Fast]:
    """The tokenizer, told to part pieces: as it is, then as one that marks the beginning of a text."""
    yield _told(file, [], [])
    # By a normalizer (Llama 2's), before whatever is there, but not before nothing.
    leading = normalizers.Replace(Regex(rf"\A{CUT}+"), "")
    yield _told(file, [leading], [normalizers.Replace(Regex(rf"{CUT}(?!{CUT}|\z)"), CUT + MARK)])
    # By a pre-tokenizer (Metaspace), where no space is yet.
    yield _told(file, [], [normalizers.Replace(Regex(rf"{CUT}(?![{CUT}{MARK} ]|\z)"), CUT + MARK)])


def _told(file: Path, before: list[Any], after: list[Any]) -> Fast:
    """The tokenizer in `file`, told to split at CUT; before, after: normalizers to put around its own."""
    fast = Fast.from_file(str(file))
    split, own = pre_tokenizers.Split(CUT, "removed"), fast.pre_tokenizer
    fast.pre_tokenizer = split if own is None else pre_tokenizers.Sequence([split, own])
    if before or after:
        usual = [] if fast.normalizer is None else [fast.normalizer]
        fast.normalizer = normalizers.Sequence([*before, *usual, *after])
    return fast


def rendered_ids(wrapped: Any, turns: Sequence[tuple[str, str]]) -> list[int]:
    """What transformers asks a model with, after these turns (role, text)."""
    messages = [{"role": role, "content": text} for role, text in turns]
    return wrapped.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def trained_ids(template: str, tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> list[int]:
    """What a model that was trained on these turns has read when it is to answer."""
    (ids,) = encode_documents(tokenizer, [up_to_answer(template, turns)])
    return [*encode(tokenizer, ""), *ids.tolist()]
