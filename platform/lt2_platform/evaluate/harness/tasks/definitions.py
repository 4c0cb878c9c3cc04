"""From a pack's record to an lm-eval task on its data, with a hash of everything that determines its scores."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt2.config import ConfigError
from lt2.packages import version_of
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.chat import Chat, framing
from lt2_platform.evaluate.harness.recall import WINDOW, cut_to_window, document_and_prompt
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.harness.tasks.suites import COLUMNS, FORMATS, UPSTREAM
from lt2_platform.json_values import sha256_of
from lt2_platform.storage import Storage


@dataclass(frozen=True)
class Definition:
    """An lm-eval task on its data, and the sha256 of both.

    `length` is how many tokens its prompts and their continuations were made to fill; None where rows name no length.
    `shots` is how many examples are asked before each item, `usual_shots` how many its definition says.
    """

    task: Any
    split: str
    sha256: str
    length: int | None = None
    shots: int = 0
    usual_shots: int = 0


def define(
    name: str, record: Mapping[str, Any], config: HarnessConfig, tokenizer: Tokenizer, chat: Chat | None = None
) -> Definition:
    """The lm-eval task of a pack's record, its data read and checked; `chat` is how its items will be asked.

    Raises:
        ConfigError: few-shot examples are wanted and there are none, data is damaged, or a package is missing.
    """
    import datasets
    import lm_eval.api.task
    from lm_eval.api.task import ConfigurableTask

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every dataset that is not a hub's
    # Its bar shows how prompts are made, which takes no time, in the middle of our count of the batches.
    lm_eval.api.task.tqdm = lambda items, **_: items  # type: ignore[assignment]
    settings, texts = definition_of(name, record)
    usual = settings.get("num_fewshot") or 0
    shots = usual if config.num_fewshot is None else config.num_fewshot
    fixed = (settings.get("fewshot_config") or {}).get("samples") is not None  # examples are part of the definition
    storage = Storage(config.pack)
    split = packs.evaluated_split(record)
    if shots and not fixed and ("train" not in record["splits"] or split == "train"):
        raise ConfigError(
            f"{shots} examples are wanted for {name} but pack {config.pack} has no training split of it; build {name} "
            "again with one, or choose num_fewshot 0"
        )
    used = [split] + (["train"] if shots and not fixed else [])
    data = {part: datasets.Dataset(packs.read_split(storage, name, record, part)) for part in used}
    window = WINDOW - framing(config, chat, tokenizer)
    if record["format"] == "cloze":
        data = {part: cut_cloze(rows, tokenizer, window) for part, rows in data.items()}
    if "generation_kwargs" in settings and "max_new_tokens" in data[split].column_names:
        settings["generation_kwargs"] = settings["generation_kwargs"] | {
            "max_gen_toks": data[split][0]["max_new_tokens"]
        }
    own = settings.pop("class", None)
    examples = "train" if shots and not fixed else None
    settings |= {
        "task": name,
        "custom_dataset": lambda **_: data,
        "dataset_path": None,
        "dataset_name": None,
        "training_split": examples,
        "validation_split": split if split != "test" else None,
        "test_split": split if split == "test" else None,
        "fewshot_split": examples,
        "num_fewshot": shots,
    }
    digests = [record["splits"][part]["sha256"] for part in used]
    asked = [] if chat is None else [chat.identity, config.multiturn, config.system]
    sha256 = sha256_of([texts, digests, split, shots, config.seed, config.limit, *asked])
    task = ConfigurableTask(config=settings) if own is None else of_class(own, data, settings)
    if fixed and shots > (have := len(list(task.fewshot_docs()))):
        raise ConfigError(f"{shots} examples are wanted for {name}, whose definition has {have}")
    if record["format"] == "upstream" and UPSTREAM[name].window:
        cut_documents(task, tokenizer, window)
    if examples and "subject" in data[split].column_names:
        examples_of_subject(name, task, data, split, shots)
    sized = "max_length" in COLUMNS.get(record["format"], ())
    return Definition(task, split, sha256, max(data[split]["max_length"]) if sized else None, shots, usual)


def examples_of_subject(name: str, task: Any, data: Mapping[str, Any], split: str, shots: int) -> None:
    """Few-shot examples of an item are those of its own subject, as if each subject were a task."""
    pools = defaultdict(list)
    for row in data["train"]:
        pools[row["subject"]].append(row)
    for subject in Counter(data[split]["subject"]):
        if len(pools[subject]) < shots:
            raise ConfigError(
                f"{shots} examples are wanted for {name}, the pack has {len(pools[subject])} of {subject}"
            )
    plain = task.fewshot_context

    def fewshot_context(doc: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        task.sampler.replace_df(pools[doc["subject"]])
        return plain(doc, *args, **options)

    task.fewshot_context = fewshot_context


def cut_cloze(rows: Any, tokenizer: Tokenizer, window: int) -> Any:
    cut = [cut_to_window(row["context"], row["prompt"], row["answers"], tokenizer, window) for row in rows]
    return rows.add_column("query", cut)


def cut_documents(task: Any, tokenizer: Tokenizer, window: int) -> None:
    """Make a task ask its prompts after no more of the document than `window` tokens leave room for.

    The data stays as it is, so that items of models with different tokenizers are still known to be the same.
    """
    plain = task.doc_to_text

    def doc_to_text(doc: Mapping[str, Any]) -> str:
        document, prompt = document_and_prompt(plain(doc))
        return cut_to_window(document, prompt, [task.doc_to_target(doc)], tokenizer, window)

    task.doc_to_text = doc_to_text


def of_class(own: Any, data: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """A task that lm-eval defines as a class, on our data: its own `download` would ask a hub."""

    def download(self: Any, *_: Any, **__: Any) -> None:
        self.dataset = {**data, "validation": next(iter(data.values()))}

    task = type(own.__name__, (own,), {"download": download})()
    if "generation_kwargs" in settings:
        task.config.generation_kwargs = dict(settings["generation_kwargs"])
    return task


def definition_of(name: str, record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The task's settings, and the text of every file they come from (YAML and Python), for the hash."""
    if record["format"] != "upstream":
        settings = dict(FORMATS[record["format"]])
        return settings, [json.dumps(settings, sort_keys=True, default=lambda function: function.__qualname__)]
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    upstream = UPSTREAM[name]
    check_needs(name, upstream.needs)
    path = Path(lm_eval.tasks.__file__).parent / upstream.yaml
    files = sorted(file for file in path.parent.iterdir() if file.name.endswith(("yaml", ".py")))
    changed = [json.dumps(upstream.settings, sort_keys=True)] if upstream.settings else []
    changed += [f"window {upstream.window}"] if upstream.window else []
    return {**load_yaml(path), **upstream.settings}, [file.read_text() for file in files] + changed


def check_needs(name: str, needs: Sequence[str]) -> None:
    """lm-eval scores some tasks with packages that LT2 does not install, and with alarms, which only one thread has."""
    for need in needs:
        package, _, wanted = need.partition("==")
        found = version_of(package) or ""
        if not found or not found.startswith(wanted):
            raise ConfigError(
                f"{name} is scored with {' and '.join(needs)}, and here is {package} {found or 'not installed'}; "
                f"`pip install {' '.join(needs)}`, or leave {name} out"
            )
    if needs and threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"{name} can only be scored in a process's main thread; evaluate it by `lt2 eval`")
