"""Teachers: stored checkpoints that are asked and never trained, and models of others made into such checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from lt2.config import ConfigError
from lt2.interop.pretrained import FAMILIES, import_pretrained
from lt2.interop.reading import weight_files
from lt2.model import LoopedLM
from lt2.train import parallel
from lt2.train.config import TrainConfig
from lt2.train.loop import TrainState, autocast_dtype
from lt2_platform.data.sources.listing import version_of
from lt2_platform.data.tokenizers.tokenize import describe, load_tokenizer, tokenizer_files
from lt2_platform.json_values import sha256_of
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint, integrity
from lt2_platform.train.checkpoints.weights_only import store_weights


def load_teacher(place: str, train: TrainConfig, device: torch.device, *, keep: bool = True) -> LoopedLM:
    """The newest checkpoint of `place`, frozen, for one rank of a training run: it runs every loop for every token.

    In bf16 where training runs in it, else in fp32. Sharded like the student where there are several ranks; with
    `keep` each block is gathered once for the whole run, since a teacher's weights never change.
    """
    model, config, _ = checkpoint.load_model(place)
    model = model.at_depth(config.n_loops, halting=False).requires_grad_(False)
    dtype = autocast_dtype(train.precision, device)
    if dtype is not None:
        parallel.cast_weights(model, dtype)
    model = model.to(device).eval()
    mesh = parallel.data_mesh(device.type, train.shard_workers)
    if mesh is not None:
        parallel.shard(model, mesh, param_dtype=dtype, keep=keep)
    return model


def identity(place: str) -> str:
    """What tells one model, or one folder of stored top-k, from another wherever it lies: sha256 of its own record.

    Raises:
        ConfigError: there is neither.
    """
    storage = Storage(place)
    if storage.exists("topk.json"):
        return hashlib.sha256(storage.read_bytes("topk.json")).hexdigest()
    if storage.exists("config.json") and storage.read_json("config.json").get("model_type") in FAMILIES:
        raise ConfigError(
            f"{place} is a folder in Hugging Face's format; make it a checkpoint first, with a step 'import_model'"
        )
    return hashlib.sha256(Storage(checkpoint.resolve(place)).read_bytes(integrity.COMPLETE)).hexdigest()


def store_pretrained(folder: str, out: str, *, tokenizer: str | None = None) -> dict[str, Any]:
    """Write the model in a folder of Hugging Face's format as the checkpoint of a run at `out`, in fp32, with its
    tokenizer.

    tokenizer: as `prepare.tokenizer`; None takes the folder's tokenizer.json. Returns the run's summary. Does nothing
    where the checkpoint is complete.

    Raises:
        ConfigError: what `import_pretrained` and `load_tokenizer` say, or a tokenizer with more tokens than the model.
    """
    path = Path(folder).expanduser()
    spec = tokenizer or str(path / "tokenizer.json")

    def read() -> tuple[LoopedLM, TrainState, checkpoint.About]:
        found = load_tokenizer(spec)
        model = import_pretrained(path, dtype=torch.float32)
        if found.vocab_size > model.config.vocab_size:
            raise ConfigError(
                f"tokenizer {found.name!r} has {found.vocab_size} tokens, the model in {folder} only "
                f"{model.config.vocab_size}; give the one the model was trained with"
            )
        files = tokenizer_files(spec)
        record = {**describe(found), "file": next(iter(files), None)}
        # Models of one architecture differ in their weights alone, and so do runs that begin with them (`lineage`).
        weights = sha256_of([version_of(str(file), sampled=True) for file in weight_files(path)])
        imported = {"imported": json.loads((path / "config.json").read_text()), "weights": weights}
        return model, TrainState(), checkpoint.About(model.config, record, files, imported)

    return store_weights(out, read)
