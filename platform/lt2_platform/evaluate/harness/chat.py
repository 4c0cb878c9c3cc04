"""Items asked as conversations: by the template of a model's training, or by that of a Hugging Face folder.

lm-eval makes the messages (system, examples, question) and asks `render` for one text. Training encodes the pieces of
a turn one by one, which the text alone cannot tell; so the text of our templates carries its ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lt2.config import ConfigError
from lt2_platform.data.sources.documents import end_of_answer, text_of, up_to_answer
from lt2_platform.data.tokenizers.chat_template import CUT
from lt2_platform.data.tokenizers.tokenize import Tokenizer, encode
from lt2_platform.data.units import encode_documents
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.models import FolderTokenizer, ModelSource
from lt2_platform.json_values import sha256_of

Messages = Sequence[Mapping[str, str]]


class Conversation(str):
    """A rendered conversation: `begun` are its token ids, BOS included, up to `said`, what the assistant has said."""

    begun: tuple[int, ...]
    said: str

    def __new__(cls, text: str, begun: Sequence[int], said: str) -> Conversation:
        made = super().__new__(cls, text + said)
        made.begun, made.said = tuple(begun), said
        return made

    def going_on(self, more: str) -> Conversation:
        return Conversation(self.removesuffix(self.said), self.begun, self.said + more)


class Chat(Protocol):
    """How items are asked as conversations.

    `mark` tells tasks that are asked so from the same tasks asked otherwise, `identity` is all that the text of a
    conversation depends on; at one of `until` or `stop_ids` the assistant's turn ends.
    """

    @property
    def name(self) -> str: ...
    @property
    def mark(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def until(self) -> tuple[str, ...]: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The conversation up to the assistant's next turn, or else up to where its last message goes on."""
        ...

    def asked(self, prompt: str) -> str:
        """What a rendered prompt asks: its text, without what is written for the tokenizer alone."""
        ...


@dataclass(frozen=True)
class TrainedChat:
    """Asks by a template of ours, encoded as in training: markers are single tokens if the tokenizer has them."""

    name: str
    mark: str
    tokenizer: Tokenizer

    @property
    def identity(self) -> str:
        return self.name

    @property
    def stop_ids(self) -> tuple[int, ...]:
        end = end_of_answer(self.name)
        found = self.tokenizer.special_id(end.text) if end.special else None
        return () if found is None else (found,)

    @property
    def until(self) -> tuple[str, ...]:
        return () if self.stop_ids else (end_of_answer(self.name).text,)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> Conversation:
        said = "" if add_generation_prompt else messages[-1]["content"]
        turns = [(message["role"], message["content"]) for message in messages]
        pieces = up_to_answer(self.name, turns if add_generation_prompt else turns[:-1])
        (ids,) = encode_documents(self.tokenizer, [pieces])
        return Conversation(text_of(pieces), [*encode(self.tokenizer, ""), *ids.tolist()], said)

    def asked(self, prompt: str) -> str:
        return prompt


@dataclass(frozen=True)
class FolderChat:
    """Asks by the template of a Hugging Face folder's tokenizer, encoded as transformers and lm-eval do."""

    tokenizer: FolderTokenizer
    stop_ids: tuple[int, ...]
    name: str = "own"
    mark: str = "chat"
    until: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        return sha256_of(self.tokenizer.chat_template)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        from jinja2.exceptions import TemplateError

        try:
            return self.tokenizer.render(messages, add_generation_prompt=add_generation_prompt)
        except (TemplateError, ValueError) as error:  # ValueError: several templates, none of them the default
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"the chat template of {self.tokenizer.name} refuses turns of {roles} ({error}); fix it, or choose "
                "another by name (chat: chatml)"
            ) from error

    def asked(self, prompt: str) -> str:
        return prompt.replace(CUT, "").removeprefix(self.tokenizer.bos_text)


def chat_of(config: HarnessConfig, source: ModelSource, tokenizer: Tokenizer) -> Chat | None:
    """How the model is to be asked, None as plain text. Raises ConfigError where its template cannot be told."""
    if config.chat is False:
        return None
    known = source.chat_templates()
    if isinstance(config.chat, str):
        return TrainedChat(config.chat, "chat" if known == [config.chat] else config.chat, tokenizer)
    if isinstance(tokenizer, FolderTokenizer):
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"chat: {source.place} has no chat template (chat_template.jinja, or in tokenizer_config.json); name "
                "one (chatml, llama3 or plain), or evaluate it without"
            )
        return FolderChat(tokenizer, source.end_ids())
    if not known:
        raise ConfigError(
            f"chat: according to its checkpoint {source.place} was not trained on conversations; name a template "
            "(chatml, llama3 or plain) to use it anyway, or evaluate without chat"
        )
    if len(known) > 1:
        raise ConfigError(f"chat: {source.place} was trained on several templates; name one of {', '.join(known)}")
    return TrainedChat(known[0], "chat", tokenizer)


def label(task: str, config: HarnessConfig, chat: Chat | None, *, shots: int, usual: int) -> str:
    """What a task is called in rows and samples: one that is asked otherwise is another task, for every reader.

    shots, usual: examples before each item, and how many the task's definition says.
    """
    marks = [task] if shots == usual else [task, f"{shots}-shot"]
    if chat is None:
        return "+".join(marks)
    marks.append(chat.mark)
    if shots and not config.multiturn:
        marks.append("one-turn")
    if config.system:
        marks.append(f"system-{hashlib.sha256(config.system.encode()).hexdigest()[:6]}")
    return "+".join(marks)


def framing(config: HarnessConfig, chat: Chat | None, tokenizer: Tokenizer) -> int:
    """How many tokens more a question has when it is asked as a conversation."""
    if chat is None:
        return 0
    turns = [{"role": "system", "content": config.system}] if config.system else []
    text = chat.render([*turns, {"role": "user", "content": "a"}])
    ids = text.begun if isinstance(text, Conversation) else tokenizer.encode_batch([text])[0].tolist()
    begins = tokenizer.bos_id is not None and ids[0] == tokenizer.bos_id
    return len(ids) - len(tokenizer.encode_batch(["a"])[0]) - begins
