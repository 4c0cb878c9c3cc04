"""One model, some lm-eval tasks, one pack: rows with standard errors, scores item by item, and the tasks' hashes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from lt2.config import ConfigError, ModelConfig, RandomLayout
from lt2.model import LoopedLM
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.chat import Chat, chat_of, framing, label
from lt2_platform.evaluate.harness.dispatch import Dispatcher, Tally
from lt2_platform.evaluate.harness.models import FolderTokenizer, ModelSource
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Scorer, check_vocabulary
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.harness.tasks.definitions import Definition, define
from lt2_platform.evaluate.harness.tasks.suites import suite_tasks
from lt2_platform.evaluate.harness.votes import Voted, decided_by_vote
from lt2_platform.evaluate.tasks import TaskContext, cost
from lt2_platform.progress import Progress, silent
from lt2_platform.storage import Storage

log = logging.getLogger(__name__)

# Before `datasets` or `transformers` is imported anywhere: an evaluation must never wait for a hub.
for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_name, "1")


def harness_rows(config: HarnessConfig, model: LoopedLM, context: TaskContext) -> list[dict[str, Any]]:
    """The task "harness" of an evaluation."""
    check_vocabulary(model.config.vocab_size, context.tokenizer.vocab_size, context.checkpoint)
    weight = model.embed.weight
    source = ModelSource(
        context.checkpoint,
        n_loops=model.depth,
        early_exit=model.config.halting is not None,
        exit_threshold=getattr(model.config.halting, "threshold", None),
        dtype=str(weight.dtype).removeprefix("torch."),
        max_length=config.max_length,
    )
    scorer = LoopedScorer(model, max_length=config.max_length, eos_id=context.tokenizer.eos_id)
    return evaluate(
        config,
        source,
        out=context.out,
        scorer=scorer,
        looped=model.config,
        actors=context.actors,
        progress=context.progress,
    )


def evaluate(
    config: HarnessConfig,
    source: ModelSource,
    *,
    out: str,
    scorer: Scorer,
    looped: ModelConfig | None = None,
    actors: int = 0,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Rows {task, metric, value, stderr, n, limit, num_fewshot, split, …}; also of what could not be scored as asked.

    `<out>/samples/<task>.jsonl` gets one line per item and filter of its answer, `<out>/batches` the answers that an
    interrupted evaluation finds again. What a looped model spent is in the rows, each task's own. `scorer` answers here
    when `actors` is 0, and says the window's length in any case, except that a looped model reads needles and RULER as
    long as they were made, if `config.max_length` is not given. One of random layout is evaluated by its draws' vote;
    its rows say how many `votes`. What is asked with more or fewer examples than its definition has, or as
    conversations, is a task of another name (arc_easy+3-shot, gsm8k+chat); rows of the latter say by which `chat`
    template.
    """
    from lt2_platform.evaluate.harness.lm import HarnessLM, check_window

    names = suite_tasks(config.suite, config.tasks)
    records = packs.require(config.pack, names)
    tokenizer = source.load_tokenizer()
    _check_tokenizer(records, tokenizer, config.pack, source.place)
    chat = chat_of(config, source, tokenizer)
    votes = looped.layout.votes if looped is not None and isinstance(looped.layout, RandomLayout) else 1
    dispatcher = Dispatcher(source, out, actors=actors, scorer=scorer, cpus=config.cpus_per_actor, looped=looped)
    asked = {}
    for name, record in records.items():  # all, before the first is asked: what is refused must not come after hours
        definition = define(name, record, config, tokenizer, chat)
        if votes > 1:
            decided_by_vote(definition.task, votes)
        say = lambda values, name=name: progress({"message": name, **values})  # noqa: E731
        window = scorer.max_length
        if looped is not None and config.max_length is None:
            # Nothing in a model of ours ends at its max_seq_len, and beyond it is where needles at 8k are looked for.
            made_for = 0 if definition.length is None else definition.length + framing(config, chat, tokenizer)
            window = max(window, made_for)
        lm = HarnessLM(dispatcher, tokenizer, max_length=window, batch_size=config.batch_size, progress=say, chat=chat)
        check_window(lm, name, definition.task)
        asked[name] = lm, definition
    rows = []
    for name, (lm, definition) in asked.items():
        dispatcher.tally = Tally()
        found = run_task(lm, name, definition, config, out)
        spent = cost(looped, dispatcher.tally.loops, dispatcher.tally.positions) if looped is not None else {}
        if votes > 1:
            found = [row | {"votes": votes} for row in found]
            spent = {key: value * (votes if key == "flops_per_token" else 1) for key, value in spent.items()}
        rows += [row | spent for row in found]
    dispatcher.forget_others()
    return rows


def _check_tokenizer(records: Mapping[str, Any], tokenizer: Tokenizer | FolderTokenizer, pack: str, model: str) -> None:
    """Raise ConfigError for a task whose items were made for another tokenizer."""
    for name, record in records.items():
        frozen = record.get("tokenizer")
        if frozen and tokenizer.sha256 != frozen["sha256"] and tokenizer.vocabulary != frozen.get("vocabulary"):
            raise ConfigError(
                f"pack {pack}: {name} was made for tokenizer {frozen['name']!r} ({frozen['sha256'][:8]}), {model} has "
                f"{tokenizer.name!r} ({tokenizer.sha256[:8]}); build {name} again with the model's tokenizer"
            )


def run_task(lm: Any, name: str, definition: Definition, config: HarnessConfig, out: str) -> list[dict[str, Any]]:
    from lm_eval import evaluator

    definition.task.set_fewshot_seed(config.seed)
    found: Any = evaluator.evaluate(
        lm,
        {"tasks": {name: definition.task}},
        limit=config.limit,
        bootstrap_iters=1000,
        log_samples=True,
        system_instruction=config.system or None,
        apply_chat_template=lm.chat is not None,
        fewshot_as_multiturn=lm.chat is not None and config.multiturn,
    )
    called = label(name, config, lm.chat, shots=definition.shots, usual=definition.usual_shots)
    samples = [line for lines in found["samples"].values() for line in lines]
    items = [item_scores(sample, lm.chat) | {"cut_to": window_of(sample, lm)} for sample in samples]
    text = "".join(json.dumps({"task": called, **item}) + "\n" for item in items)
    Storage(out).write_bytes(f"samples/{called}.jsonl", text.encode())
    place = {"task": called, "split": definition.split, "task_sha256": definition.sha256}
    place |= {"n": len({item["doc_id"] for item in items}), "limit": config.limit, "num_fewshot": definition.shots}
    place |= {} if lm.chat is None else {"chat": lm.chat.name, "multiturn": config.multiturn, "system": config.system}
    scores = found["results"][name]
    rows = []
    for key, value in scores.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = scores.get(f"{metric}_stderr,{kind}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        rows.append({**place, "metric": labelled(metric, kind), "value": float(value), "stderr": stderr})
    return rows + [{**place, "metric": kind, "value": count} for kind, count in sorted(lm.problems.items())]


def labelled(metric: str, filter_: str) -> str:
    """A metric's name in rows and samples: with lm-eval's filter of the answers where a task has several."""
    return metric if filter_ in ("none", "remove_whitespace") else f"{metric}/{filter_}"


def window_of(sample: Mapping[str, Any], lm: Any) -> int:
    """Tokens of the window, where it did not hold all that the item asks (see HarnessLM.shortened); else 0."""
    return lm.max_length if any(request[0] in lm.shortened for request in sample["arguments"]) else 0


def item_scores(sample: Mapping[str, Any], chat: Chat | None = None) -> dict[str, Any]:
    """What of an item is kept: its number, hashes, metrics, and the model's answers (log-likelihoods or text)."""
    metrics = [name for name in sample["metrics"] if isinstance(sample[name], int | float)]
    numbers = {labelled(name, sample["filter"]): sample[name] for name in metrics}
    kept = {key: sample[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash")}
    if chat is not None:  # lm-eval's own is of the text with what is there for a folder's tokenizer alone
        kept["prompt_hash"] = hashlib.sha256(chat.asked(sample["arguments"][0][0]).encode()).hexdigest()
    answers = sample["filtered_resps"]
    if any(isinstance(answer, Voted) for answer in answers):
        kept["draws"] = [getattr(answer, "draws", None) for answer in answers]
    return kept | {"scores": numbers, "answers": answers}
