"""One model, some lm-eval tasks, one pack: rows with standard errors, scores item by item, and the tasks' hashes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt2.config import ConfigError, ModelConfig, RandomLayout
from lt2.model import LoopedLM
from lt2_platform.data.tokenize import Tokenizer
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness import packs
from lt2_platform.evaluate.harness.dispatch import Dispatcher
from lt2_platform.evaluate.harness.models import ModelSource
from lt2_platform.evaluate.harness.recall import WINDOW, cloze_text
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Scorer, check_vocabulary
from lt2_platform.evaluate.harness.suites import FORMATS, UPSTREAM, suite_tasks
from lt2_platform.evaluate.harness.votes import Voted, decided_by_vote
from lt2_platform.evaluate.tasks import TaskContext, cost
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


@dataclass(frozen=True)
class Definition:
    """An lm-eval task on its data, and the sha256 of both."""

    task: Any
    split: str
    sha256: str


def evaluate(
    config: HarnessConfig,
    source: ModelSource,
    *,
    out: str,
    scorer: Scorer,
    looped: ModelConfig | None = None,
    actors: int = 0,
    progress: Callable[[dict[str, Any]], None] = lambda values: None,
) -> list[dict[str, Any]]:
    """Rows {task, metric, value, stderr, n, split, task_sha256, …}; what could not be scored as asked has rows too.

    `<out>/samples/<task>.jsonl` gets one line per item, `<out>/batches` the answers that an interrupted evaluation
    finds again. `scorer` answers here when `actors` is 0, and says the window's length in any case. A looped model of
    random layout is evaluated by its draws' vote; its rows say how many `votes`.
    """
    from lt2_platform.evaluate.harness.lm import HarnessLM

    names = suite_tasks(config.suite, config.tasks)
    records = packs.require(config.pack, names)
    tokenizer = source.load_tokenizer()
    for name, record in records.items():
        frozen = record.get("tokenizer")
        if frozen and frozen["sha256"] != tokenizer.sha256:
            raise ConfigError(
                f"pack {config.pack}: {name} was made for tokenizer {frozen['name']!r}, {source.place} has "
                f"{tokenizer.name!r}; build {name} again with the model's tokenizer"
            )
    votes = looped.layout.votes if looped is not None and isinstance(looped.layout, RandomLayout) else 1
    dispatcher = Dispatcher(source, out, actors=actors, scorer=scorer, cpus=config.cpus_per_actor)
    rows = []
    for name, record in records.items():
        definition = define(name, record, config, tokenizer)
        if votes > 1:
            decided_by_vote(definition.task, votes)
        say = lambda values, name=name: progress({"message": name, **values})  # noqa: E731
        lm = HarnessLM(dispatcher, tokenizer, max_length=scorer.max_length, batch_size=config.batch_size, progress=say)
        rows += run_task(lm, name, definition, config, out)
    tally = dispatcher.tally
    spent: dict[str, Any] = cost(looped, tally.loops, tally.positions) if looped is not None else {}
    if votes > 1:
        spent |= {"votes": votes, "flops_per_token": spent["flops_per_token"] * votes}
    return [row | spent for row in rows]


def run_task(lm: Any, name: str, definition: Definition, config: HarnessConfig, out: str) -> list[dict[str, Any]]:
    from lm_eval import evaluator

    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # it warns about every dataset that is not a hub's
    definition.task.set_fewshot_seed(config.seed)
    found: Any = evaluator.evaluate(
        lm, {"tasks": {name: definition.task}}, limit=config.limit, bootstrap_iters=1000, log_samples=True
    )
    samples = [line for lines in found["samples"].values() for line in lines]
    items = [item_scores(sample) for sample in samples]
    text = "".join(json.dumps({"task": name, **item}) + "\n" for item in items)
    Storage(out).write_bytes(f"samples/{name}.jsonl", text.encode())
    place = {"task": name, "split": definition.split, "task_sha256": definition.sha256, "n": len(items)}
    scores = found["results"][name]
    rows = []
    for key, value in scores.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = scores.get(f"{metric}_stderr,{kind}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        label = metric if kind in ("none", "remove_whitespace") else f"{metric}/{kind}"
        rows.append({**place, "metric": label, "value": float(value), "stderr": stderr})
    return rows + [{**place, "metric": kind, "value": count} for kind, count in sorted(lm.problems.items())]


def item_scores(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What of an item is kept: its number, hashes, metrics, and the model's answers (log-likelihoods or text)."""
    numbers = {name: sample[name] for name in sample["metrics"] if isinstance(sample[name], int | float)}
    kept = {key: sample[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target_hash")}
    answers = sample["filtered_resps"]
    if any(isinstance(answer, Voted) for answer in answers):
        kept["draws"] = [getattr(answer, "draws", None) for answer in answers]
    return kept | {"scores": numbers, "answers": answers}


def define(name: str, record: Mapping[str, Any], config: HarnessConfig, tokenizer: Tokenizer) -> Definition:
    """The lm-eval task of a pack's record, its data read and checked.

    Raises:
        ConfigError: few-shot examples are wanted and the pack has no training split, or data is damaged.
    """
    import datasets
    from lm_eval.api.task import ConfigurableTask

    storage = Storage(config.pack)
    split = packs.evaluated_split(record)
    if config.num_fewshot and ("train" not in record["splits"] or split == "train"):
        raise ConfigError(
            f"{config.num_fewshot} examples are wanted for {name} but pack {config.pack} has no training split of it"
        )
    used = [split] + (["train"] if config.num_fewshot else [])
    data = {part: datasets.Dataset(packs.read_split(storage, name, record, part)) for part in used}
    if record["format"] == "cloze":
        data = {part: cut_cloze(rows, tokenizer) for part, rows in data.items()}
    if record["format"] == "choices":
        check_choices(name, config.pack, data)
    settings, texts = definition_of(name, record)
    if "max_new_tokens" in data[split].column_names:
        settings["generation_kwargs"] = settings["generation_kwargs"] | {
            "max_gen_toks": data[split][0]["max_new_tokens"]
        }
    own = settings.pop("class", None)
    settings |= {
        "task": name,
        "custom_dataset": lambda **_: data,
        "dataset_path": None,
        "dataset_name": None,
        "training_split": "train" if config.num_fewshot else None,
        "validation_split": split if split != "test" else None,
        "test_split": split if split == "test" else None,
        "fewshot_split": "train" if config.num_fewshot else None,
        "num_fewshot": config.num_fewshot,
    }
    digests = [record["splits"][part]["sha256"] for part in used]
    identity = json.dumps([texts, digests, split, config.num_fewshot, config.seed, config.limit])
    sha256 = hashlib.sha256(identity.encode()).hexdigest()
    task = ConfigurableTask(config=settings) if own is None else of_class(own, data)
    return Definition(task, split, sha256)


def check_choices(name: str, pack: str, data: Mapping[str, Any]) -> None:
    """lm-eval cannot normalise by the length of nothing, and stops where the first item has such a choice."""
    for split, rows in data.items():
        for index, choices in enumerate(rows["choices"]):
            if not choices or not all(choices):
                raise ConfigError(
                    f"pack {pack}: {name}, {split} item {index} has an empty choice {choices}; leave it out"
                )


def cut_cloze(rows: Any, tokenizer: Tokenizer) -> Any:
    return rows.add_column("query", [cloze_text(row, tokenizer, WINDOW) for row in rows])


def of_class(own: Any, data: Mapping[str, Any]) -> Any:
    """A task that lm-eval defines as a class, on our data: its own `download` would ask a hub."""

    def download(self: Any, *_: Any, **__: Any) -> None:
        self.dataset = {**data, "validation": next(iter(data.values()))}

    return type(own.__name__, (own,), {"download": download})()


def definition_of(name: str, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The task's settings, and the text of every file they come from (YAML and Python), for the hash."""
    if record["format"] != "upstream":
        settings = dict(FORMATS[record["format"]])
        return settings, [json.dumps(settings, sort_keys=True, default=lambda function: function.__qualname__)]
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(lm_eval.tasks.__file__).parent / UPSTREAM[name].yaml
    files = sorted(file for file in path.parent.iterdir() if file.suffix in (".yaml", ".py"))
    return dict(load_yaml(path)), [file.read_text() for file in files]
