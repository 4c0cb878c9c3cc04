"""The folder of one pretraining run, whoever launches it.

<out>/pretrain.json     resolved config, written once: Ray would resume a run with a changed config without a word
<out>/checkpoints/      see checkpoint.py
<out>/progress.json     last step, loss, speed and time left, while it trains
<out>/summary.json      written last
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from lt2.config import ConfigError, ModelConfig
from lt2.train.config import TrainConfig
from lt2_platform.data.live.on_the_fly import KEY, Listing
from lt2_platform.data.stream import PackedDataset, load_manifest
from lt2_platform.distill.teacher import identity
from lt2_platform.evaluate.validation import held_out_rows
from lt2_platform.results.store import check_name, differences
from lt2_platform.storage import Storage, absolute
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.checkpoints.checkpoint import CheckpointInfo
from lt2_platform.train.checkpoints.matching import check_continues, lineage
from lt2_platform.train.config import ONE_WORKER, PretrainConfig, Sources, Workers, check_workers, resolve_model
from lt2_platform.train.worker import WorkerSpec

CONFIG, SUMMARY = "pretrain.json", "summary.json"


def open_run(
    config: PretrainConfig,
    *,
    data: str,
    out: str,
    run_id: str,
    storage_root: str,
    workers: Workers = ONE_WORKER,
    sources: Sources | None = None,
    info: dict[str, Any] | None = None,
) -> WorkerSpec:
    """Check everything that can be checked before workers start, and bind the folder to this config.

    Raises ConfigError for what cannot work, before anything is written, and for a folder bound to another config.
    """
    data, out = absolute(data), absolute(out)
    check_name(run_id, "run id")
    manifest = load_manifest(data)
    model = resolve_model(config.model, manifest, data)
    if KEY in manifest:
        Listing.read(manifest[KEY]).check_unchanged()
    if (config.train.eval_every or math.inf) <= config.train.steps:
        held_out_rows(PackedDataset(data, "validation"), "all")
    traced = workers.profile_steps
    if traced is not None and not 0 < traced[0] <= traced[1]:
        raise ConfigError(f"profile_steps {list(traced)}: give the first and the last step, counted from 1")
    check_workers(config.train, workers.num_workers, workers.min_workers)
    storage = Storage(out)
    places = {name: absolute(place) for name, place in asdict(sources or Sources()).items() if place is not None}
    models = {name: checkpoint.read_info(checkpoint.resolve(place)) for name, place in places.items() if name != "topk"}
    # The run behind a name may still train: workers, and those that take their place, read what it means now.
    meant = places | {name: each.uri for name, each in models.items()}
    identities = {name: identity(place) for name, place in meant.items()}
    if (before := models.get("continue_from")) is not None:
        data_is = manifest.get("fingerprint")
        check_continues(before, model, config.train, manifest["tokenizer"], data_is, live=KEY in manifest)
    storage.check_writable()
    record = {
        "model": model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "data": {"fingerprint": manifest.get("fingerprint"), "tokenizer": manifest["tokenizer"]["sha256"]},
        **({"sources": identities} if identities else {}),
    }
    _bind(storage, record)
    return WorkerSpec(
        model=record["model"],
        train=record["train"],
        data=data,
        out=out,
        run_id=run_id,
        storage_root=absolute(storage_root),
        sources=meant,
        evaluate_every=None if workers.evaluation is None else workers.evaluation.every,
        profile_steps=traced,
        info=_with_origin(info or {}, manifest, models, places),
    )


def _bind(storage: Storage, record: dict[str, Any]) -> None:
    """Write the folder's config, once. Raises ConfigError where the folder has another already."""
    if storage.create_exclusive(CONFIG, json.dumps(record, indent=2).encode()):
        return
    changed = differences({"then": _as_of_now(storage.read_json(CONFIG)), "now": json.loads(json.dumps(record))})
    if keys := ", ".join(f"{key} {changed['then'][key]!r} -> {changed['now'][key]!r}" for key in changed["now"]):
        raise ConfigError(f"{storage.root} holds a run with another config ({keys}); use another output folder")


def summary(spec: WorkerSpec) -> dict[str, Any] | None:
    """The summary of a run that is over, with the checkpoint where the folder is now; None while there is work left."""
    storage = Storage(spec.out)
    if not storage.exists(SUMMARY):
        return None
    return storage.read_json(SUMMARY) | {"checkpoint": checkpoint.resolve(spec.out)}


def close_run(spec: WorkerSpec, result: dict[str, Any]) -> dict[str, Any]:
    """Write and return the summary: `result` (the final TrainState) and the URI of the last checkpoint."""
    found = result | {"checkpoint": checkpoint.resolve(spec.out)}
    Storage(spec.out).write_json(SUMMARY, found)
    return found


def _with_origin(
    info: dict[str, Any], manifest: dict[str, Any], models: Mapping[str, CheckpointInfo], places: Mapping[str, str]
) -> dict[str, Any]:
    """`info` of a run for the results store, with what it reads: runs on other data are no repeats of each other.

    Nor are runs that begin with or learn from other `models`, by what they are to it; `places` is where they lie.
    Where data and models lay is provenance: the same may lie in several places.
    """
    data = {"tokenizer": manifest["tokenizer"].get("name"), "seq_len": manifest.get("seq_len")}
    if fingerprint := manifest.get("fingerprint"):
        data["fingerprint"] = fingerprint[:12]
    source = (manifest.get("config") or {}).get("source")
    config: dict[str, Any] = {"data": data}
    more: dict[str, Any] = {"source": source}
    if models:
        config["sources"] = {name: lineage(each) for name, each in models.items()}
        more["models"] = {name: places[name] for name in models}
    if "continue_from" in models:
        more["tokens_before"] = models["continue_from"].state.tokens
    return {**info, **more, "config": {**config, **info.get("config", {})}}


def _as_of_now(record: dict[str, Any]) -> dict[str, Any]:
    """A stored record with the defaults of fields added since: a newer LT2 still resumes an older run."""
    try:
        model, train = ModelConfig.model_validate(record["model"]), TrainConfig.model_validate(record["train"])
    except ValidationError:  # a field that is gone: compare as it is, and name it
        return record
    return record | {"model": model.model_dump(mode="json"), "train": train.model_dump(mode="json")}
