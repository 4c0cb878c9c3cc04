"""From a row of a source to a document: what the `module` of each shipped source does.

A function (config, row) -> document, where row maps column names to values. It returns the text, the pieces of a
document that is more than text, a Fault for a row that cannot be used, or None for one the config leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lt2_platform.data.sources.configs import ColumnSource, DclmConfig, FineWebEduConfig, OpenThoughtsConfig

SAMPLE_CHARACTERS = 200
Row = Mapping[str, Any]


class Fault(NamedTuple):
    """Why a row cannot be used, and the beginning of it (left empty, the reader fills it in)."""

    reason: str
    sample: str = ""


class Piece(NamedTuple):
    """A part of a document that is tokenised on its own.

    learned: its tokens count in the loss. special: it is the name of a special token; as ordinary text where the
    tokenizer has no such token.
    """

    text: str
    learned: bool = True
    special: bool = False


Document = str | tuple[Piece, ...]


def text_of(document: Document) -> str:
    """All of a document's text, markers included."""
    return document if isinstance(document, str) else "".join(piece.text for piece in document)


def checked(value: Any) -> str | Fault:
    """`value` if it is a text that can be trained on: a string, not blank, that UTF-8 can express."""
    if value is None:
        return Fault("null text")
    if not isinstance(value, str):
        return Fault("not a string")
    if not value.strip():
        return Fault("empty text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Fault("lone surrogate")
    return value


def column_text(config: ColumnSource | DclmConfig, row: Row) -> Document | Fault | None:
    """The text column."""
    return checked(row[config.text_column])


def educational_text(config: FineWebEduConfig, row: Row) -> Document | Fault | None:
    """The text, if its classifier score is high enough."""
    if config.min_int_score is not None:
        score = row["int_score"]
        if not isinstance(score, int):
            return Fault("no int_score")
        if score < config.min_int_score:
            return None
    return checked(row["text"])


_ROLES = {"human": "user", "gpt": "assistant"}  # the names of OpenThoughts3; the earlier releases use ours
_TOOL_ROLES = ("tool", "function", "ipython", "function_call", "observation", "tool_call", "tool_response")
_THINKING = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))


def conversation(config: OpenThoughtsConfig, row: Row) -> Document | Fault | None:
    """A rendered conversation. Its turns are {from, value} in `conversations` or {role, content} in `messages`.

    How a tool is called and answers is written differently by every model, and by none of our templates.
    """
    turns = row.get("messages") if row.get("conversations") is None else row.get("conversations")
    if turns is None:
        return Fault("no conversation")
    sample = json.dumps(turns, ensure_ascii=False, default=str)[:SAMPLE_CHARACTERS]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        return Fault("not a list of turns", sample)
    if any(_uses_tools(turn) for turn in turns):
        return Fault("tool use", sample)
    said = [(turn.get("from") or turn.get("role"), turn.get("value", turn.get("content"))) for turn in turns]
    if row.get("system"):
        said.insert(0, ("system", row["system"]))
    pieces: list[Piece] = []
    roles = []
    for name, value in said:
        role = _ROLES.get(str(name), str(name))
        if role not in ("system", "user", "assistant"):
            return Fault("unknown role", sample)
        text = _content(value)
        if isinstance(text, Fault):
            return Fault(text.reason, sample)
        if role == "assistant" and config.unterminated_think == "quarantine" and _is_unterminated(text):
            return Fault("unterminated think tag", sample)
        every = config.loss == "all"
        pieces += _turn(config.template, role, text, given=every, written=every or role == "assistant")
        roles.append(role)
    return tuple(pieces) if "assistant" in roles else Fault("no assistant turn", sample)


def _uses_tools(turn: Mapping[str, Any]) -> bool:
    calls = any(turn.get(name) for name in ("tool_calls", "function_call"))
    return calls or (turn.get("from") or turn.get("role")) in _TOOL_ROLES


def _content(value: Any) -> str | Fault:
    """What a turn says: a text, or parts {"type": "text", "text": …}, which are put together as they are."""
    if isinstance(value, list):
        if not all(_is_text_part(part) for part in value):
            return Fault("content that is not text")
        value = "".join(part["text"] for part in value)
    return checked(value)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_unterminated(text: str) -> bool:
    # Generation stopped at its length limit: the answer is missing, and a model would learn to think without end.
    return any(text.count(begin) > text.count(end) for begin, end in _THINKING)


def question(template: str, text: str, *, system: str = "") -> tuple[Piece, ...]:
    """A conversation up to where the assistant answers `text`; `system` is said before, if it is anything."""
    turns = [("system", system)] if system else []
    return up_to_answer(template, [*turns, ("user", text)])


def up_to_answer(template: str, turns: Sequence[tuple[str, str]]) -> tuple[Piece, ...]:
    """Turns (role, text) up to where the assistant speaks next: what a model that learned from them goes on from."""
    pieces = [piece for role, text in turns for piece in _turn(template, role, text, given=True, written=True)]
    before, _ = turn_frame(template, "assistant")
    return (*pieces, *before)


def end_of_answer(template: str) -> Piece:
    """What follows an answer: the marker that ends it, or the next turn's beginning where the template has none."""
    _, after = turn_frame(template, "assistant")
    before, _ = turn_frame(template, "user")
    return after[0] if after[0].special else Piece(text_of((*after, *before)))


def turn_frame(template: str, role: str) -> tuple[list[Piece], list[Piece]]:
    """What a template writes before and after the text of a turn."""
    return _frame(template, role, given=True, written=True)


def _turn(template: str, role: str, text: str, *, given: bool, written: bool) -> list[Piece]:
    before, after = _frame(template, role, given=given, written=written)
    return [*before, Piece(text, written), *after]


def _frame(template: str, role: str, *, given: bool, written: bool) -> tuple[list[Piece], list[Piece]]:
    """What is before and after a turn's text. `given` says whether the former is learned, `written` whether that which
    a model would write is: the text and its end marker."""
    if template == "chatml":
        return [
            Piece("<|im_start|>", given, special=True),
            Piece(f"{role}\n", given),
        ], [
            Piece("<|im_end|>", written, special=True),
            Piece("\n", written),  # so that the end of the document, after it, is learned too
        ]
    if template == "llama3":
        return [
            Piece("<|start_header_id|>", given, special=True),
            Piece(role, given),
            Piece("<|end_header_id|>", given, special=True),
            Piece("\n\n", given),
        ], [Piece("<|eot_id|>", written, special=True)]
    return [Piece(f"{role.capitalize()}: ", given)], [Piece("\n\n", written)]
