"""lm-eval's view of our models: text in, numbers out. All scoring is in `scoring`, all batching in `dispatch`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.harness.chat import Chat, Conversation
from lt2_platform.evaluate.harness.dispatch import Dispatcher, Work, batched
from lt2_platform.evaluate.harness.scoring import Pair
from lt2_platform.evaluate.harness.votes import Voted
from lt2_platform.progress import Progress, silent

log = logging.getLogger(__name__)

NEVER = (float("-inf"), False)  # the score of what cannot be scored: no choice of a question is won by it


class HarnessLM(TemplateLM):
    """Requests to batches and back.

    Every text starts with BOS exactly once if the tokenizer has one, and an empty context is that BOS (else EOS). What
    cannot be scored as asked is counted in `problems` by kind, and the first of each kind is logged:

    - "empty_continuation": the continuation has no token of its own (it merges into the context's last); scored -inf;
    - "continuation_too_long": it alone exceeds the model's window; scored -inf;
    - "context_cut": context and continuation exceed the window, the context lost its beginning;
    - "not_a_number": the model's log-likelihood is NaN; scored -inf.

    `shortened` are the contexts that the window did not hold with what follows them.

    With `chat`, contexts are conversations, and answers end where the template ends the assistant's turn.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int,
        progress: Progress = silent,
        chat: Chat | None = None,
    ):
        super().__init__()
        self.dispatcher, self.text_tokenizer = dispatcher, tokenizer
        self.max_length, self.batch_size, self.progress = max_length, batch_size, progress
        self.chat = chat
        self.problems: Counter[str] = Counter()
        self.shortened: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        prefix = self.text_tokenizer.prefix_id
        return self.eot_token_id if prefix is None else prefix

    @property
    def tokenizer_name(self) -> str:
        return f"{self.text_tokenizer.name}-{self.text_tokenizer.sha256[:16]}"

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """What lm-eval asks instead of plain text when it is told to ask conversations."""
        if self.chat is None:
            raise ValueError("there is no chat template to render a conversation with")
        return self.chat.render(chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of `string`; BOS first unless it is there (a folder's chat template wrote it) or add_special_tokens is
        False."""
        if isinstance(string, Conversation):
            return [*string.begun, *self.tok_encode(string.said, add_special_tokens=False)]
        ids = self.text_tokenizer.encode_batch([string])[0].tolist()
        bos = self.text_tokenizer.bos_id
        return ids if bos is None or add_special_tokens is False or ids[:1] == [bos] else [bos, *ids]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        encoded = []
        for context, continuation in (request.args for request in requests):
            if isinstance(context, Conversation):  # its end is a piece's end: no space moves to the continuation
                before, whole = self.tok_encode(context), self.tok_encode(context.going_on(continuation))
                pair = before, whole[len(before) :]
            elif context.strip():
                pair = self._encode_pair(context, continuation)
            else:  # spaces at a context's end belong to the continuation
                pair = [self.prefix_token_id], self.tok_encode(context + continuation, add_special_tokens=False)
            encoded.append(((context, continuation), *pair))
        return self._loglikelihood_tokens(encoded)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        pairs = [self.fitted(text, context, continuation) for text, context, continuation in requests]
        scores = self.score([pair for pair in pairs if pair is not None])
        found = [NEVER if pair is None else scores[pair] for pair in pairs]
        for place, (text, _context, _continuation) in enumerate(requests):
            if math.isnan(found[place][0]):  # which lm-eval's argmax would take for the largest
                self.problem("not_a_number", text)
                found[place] = NEVER
        return found

    def fitted(self, text: Any, context: Sequence[int], continuation: Sequence[int]) -> Pair | None:
        """The pair that the model can read, or None if there is nothing to score."""
        if not continuation:
            return self.problem("empty_continuation", text)
        room = self.max_length + 1 - len(continuation)  # the last token is predicted, not read
        if len(context) <= room:
            return Pair(tuple(context), tuple(continuation))
        self.shortened.add(text[0])
        if room < 1:
            return self.problem("continuation_too_long", text)
        self.problem("context_cut", text)
        return Pair(tuple(context[-room:]), tuple(continuation))

    def problem(self, kind: str, text: Any) -> None:
        if not self.problems[kind]:
            log.warning("%s (others of its kind are only counted): %.200r", kind, text)
        self.problems[kind] += 1

    def score(self, pairs: Sequence[Pair]) -> dict[Pair, tuple[float, bool]]:
        batches = batched(pairs, self.batch_size, lambda pair: len(pair.context) + len(pair.continuation))
        answers = self.dispatcher.run([Work("loglikelihood", pairs=batch) for batch in batches], self.progress)
        found = zip((pair for batch in batches for pair in batch), (result for part in answers for result in part))
        return {pair: Voted(*result) if len(result) == 3 else (result[0], result[1]) for pair, result in found}

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: every token once, in windows of max_length, BOS (or EOS) only in the first."""
        texts = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            if not ids:
                self.problem("empty_text", text)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            texts.append([Pair(*map(tuple, make_disjoint_window(window))) for window in windows])
        scores = self.score([pair for windows in texts for pair in windows])
        return [sum(scores[pair][0] for pair in windows) for windows in texts]

    def prompt_room(self, new_tokens: int) -> int:
        """Tokens that a prompt may have before so many new ones. Raises ConfigError where the window has none left."""
        if new_tokens >= self.max_length:
            raise ConfigError(
                f"{new_tokens} tokens are to be generated in a window of {self.max_length}; give a max_length above "
                "that, or leave the task out"
            )
        return self.max_length - new_tokens

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[tuple[int, tuple[str, ...]], list[tuple[int, ...]]] = {}
        asked = []
        for context, options in (request.args for request in requests):
            settings = generation_settings(options)
            if self.chat is not None:
                settings = settings[0], (*settings[1], *self.chat.until)
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            room = self.prompt_room(settings[0])
            if len(prompt) > room:
                self.shortened.add(context)
                self.problem("context_cut", context)
            asked.append((settings, tuple(prompt[-room:])))
            groups.setdefault(settings, []).append(asked[-1][1])
        stop_ids = () if self.chat is None else self.chat.stop_ids
        works = [
            Work("generate", prompts=batch, max_new_tokens=tokens, until=until, stop_ids=stop_ids)
            for (tokens, until), prompts in sorted(groups.items())
            for batch in batched(prompts, self.batch_size, len)
        ]
        answers = self.dispatcher.run(works, self.progress)
        texts = {
            ((work.max_new_tokens, work.until), prompt): text
            for work, part in zip(works, answers)
            for prompt, text in zip(work.prompts, part)
        }
        return [texts[item] for item in asked]


def check_window(lm: HarnessLM, name: str, task: Any) -> None:
    """Raise ConfigError, with the task's name, where the window has no room for its answers."""
    if task.OUTPUT_TYPE != "generate_until":
        return
    requests = task.construct_requests(doc=next(iter(task.eval_docs)), ctx="")
    _, options = (requests[0] if isinstance(requests, list) else requests).args
    try:
        lm.prompt_room(generation_settings(options)[0])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def generation_settings(options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(most tokens, stop strings) of a request. Raises ConfigError for sampling: evaluations here are greedy."""
    if options.get("do_sample") or options.get("temperature"):
        raise ConfigError(f"generation options {options} ask for sampling; only greedy tasks can be evaluated")
    until = options.get("until") or ()
    until = (until,) if isinstance(until, str) else tuple(until)
    return int(options.get("max_gen_toks", 256)), until
