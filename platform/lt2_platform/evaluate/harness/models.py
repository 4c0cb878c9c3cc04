"""Which model is evaluated, as data that a worker elsewhere can load: ours by checkpoint, any by its HF folder."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from lt2.config import ConfigError
from lt2.model import LoopedLM
from lt2_platform.data.tokenizers.tokenize import Tokenizer, load_recorded, vocabulary_sha256
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Scorer, TransformersScorer, check_vocabulary
from lt2_platform.json_values import sha256_of
from lt2_platform.machine.devices import this_device
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.checkpoint import load_model, read_info, resolve
from lt2_platform.train.checkpoints.integrity import COMPLETE


@dataclass(frozen=True)
class ModelSource:
    """A model as it is to be run.

    Attributes:
        place: a checkpoint's URI (a folder named step-…), or a folder with an HF config.json.
        n_loops: depth of a looped model; None as trained.
        early_exit: whether halting may stop tokens earlier.
        exit_threshold: at which an exit gate does; None is the model's own.
        dtype: "float32" or "bfloat16".
        max_length: tokens read at once; None takes the model's own.
        gguf: name of the GGUF file in an HF folder, if the weights are one.
    """

    place: str
    n_loops: int | None = None
    early_exit: bool = True
    exit_threshold: float | None = None
    dtype: str = "float32"
    max_length: int | None = None
    gguf: str | None = None

    @property
    def is_transformers(self) -> bool:
        return "://" not in self.place and bool(self.gguf or (Path(self.place) / "config.json").is_file())

    @property
    def is_export(self) -> bool:
        """Whether it is a folder that `lt2 export` wrote: a model of ours."""
        if not self.is_transformers or self.gguf:
            return False
        return json.loads((Path(self.place) / "config.json").read_text()).get("model_type") == "lt2"

    def load_looped(self) -> LoopedLM:
        """The model of ours that the place holds, on this process's device."""
        if self.is_export:
            model = cast(Any, self.load_transformers()).model
        else:
            model, _, _ = load_model(self.place)
        return model.to(this_device(), getattr(torch, self.dtype))

    def load_transformers(self) -> nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        import lt2.interop.transformers  # noqa: F401  registers the folders that `lt2 export` writes

        logging.disable_progress_bar()  # a second of loading; it would stand between our own lines
        options = {"gguf_file": self.gguf} if self.gguf else {}
        try:
            model = AutoModelForCausalLM.from_pretrained(self.place, dtype=getattr(torch, self.dtype), **options)
        except SafetensorError as error:
            raise ConfigError(f"the weights in {self.place} are damaged ({error}); copy or export it again") from error
        return cast(nn.Module, model).to(this_device())

    def identity(self) -> str:
        """sha256 of the weights' own record and of how they are run; equal wherever the files are."""
        if self.is_transformers:
            files = sorted(path for path in Path(self.place).iterdir() if path.is_file())
            record = [(path.name, _sha256(path)) for path in files]
        else:
            record = Storage(resolve(self.place)).read_json(COMPLETE)["files"]
        return sha256_of([record, asdict(self) | {"place": None}])

    def load_tokenizer(self) -> Tokenizer:
        if self.is_transformers:
            return FolderTokenizer.load(self.place, self.gguf)
        uri = resolve(self.place)
        return load_recorded(read_info(uri).tokenizer, Storage(uri))

    def chat_templates(self) -> list[str]:
        """The templates of ours that the checkpoint says it was trained on; a Hugging Face folder does not say."""
        return [] if self.is_transformers else read_info(resolve(self.place)).tokenizer.get("chat_templates", [])

    def end_ids(self) -> tuple[int, ...]:
        """The tokens at which an HF folder's generation_config.json says that an answer ends."""
        path = Path(self.place) / "generation_config.json"
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)


@dataclass(frozen=True)
class Loaded:
    scorer: Scorer
    tokenizer: Tokenizer


def load(source: ModelSource) -> Loaded:
    """The model on this process's device, and its tokenizer. Raises ConfigError if they do not fit each other."""
    tokenizer = source.load_tokenizer()
    if source.is_transformers and not source.is_export:
        model: Any = source.load_transformers()
        check_vocabulary(model.config.vocab_size, tokenizer.vocab_size, source.place)
        length = source.max_length or getattr(model.config, "max_position_embeddings", None)
        if length is None:
            raise ConfigError(f"{source.place}: its config names no maximum length; give max_length")
        return Loaded(TransformersScorer(model, max_length=length, eos_id=tokenizer.eos_id), tokenizer)
    model = source.load_looped()
    check_vocabulary(model.config.vocab_size, tokenizer.vocab_size, source.place)
    view = model.at_depth(
        source.n_loops or model.config.n_loops, halting=source.early_exit, exit_threshold=source.exit_threshold
    )
    return Loaded(LoopedScorer(view, max_length=source.max_length, eos_id=tokenizer.eos_id), tokenizer)


class FolderTokenizer:
    """An HF folder's tokenizer behind our interface; `bos_id` only if the tokenizer itself begins texts with it."""

    def __init__(self, tokenizer: Any, name: str):
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size = len(tokenizer)
        self.eos_id = tokenizer.eos_token_id
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_id
        self.bos_text = tokenizer.bos_token or ""
        self.prefix_id = tokenizer.bos_token_id  # stands for an empty context even where texts do not begin with it
        first = tokenizer("a").input_ids[0]
        self.bos_id = first if first == tokenizer.bos_token_id else None
        self.sha256 = self.vocabulary = vocabulary_sha256(tokenizer.get_vocab())

    @classmethod
    @functools.lru_cache(maxsize=2)
    def load(cls, folder: str, gguf: str | None) -> FolderTokenizer:
        from transformers import AutoTokenizer

        if not gguf and not any(any(Path(folder).glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
            raise ConfigError(
                f"{folder} has no tokenizer. If it is the export of a byte-level model, such as "
                "quickstart's, evaluate the run or checkpoint it was exported from: lt2 eval RUN --pack PACK"
            )
        options = {"gguf_file": gguf} if gguf else {}
        return cls(AutoTokenizer.from_pretrained(folder, **options), Path(folder).name)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False).input_ids
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def special_id(self, name: str) -> int | None:
        return self._tokenizer.get_added_vocab().get(name)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def chat_template(self) -> Any:
        """The folder's own, in Jinja; by name where it has several; None if it has none."""
        return self._tokenizer.chat_template

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """A conversation as text, by the folder's template; else going on in its last message."""
        return self._tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
