"""A small teacher and stages of distillation from it, on the worker itself: no Ray."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, describe
from lt2_platform.distill.run import DistillRun, plan_stage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.config import PretrainConfig, Workers
from tests.lt2.interop.test_ouro import OURO, ouro_weights
from tests.platform.train.packed import MODEL, train_config, write_dataset

ALIGN = {"type": "align"}
DISTILL = {"type": "distill", "k": 6}
GDN = {"type": "gdn", "conv_size": 0}
BYTE = {**describe(ByteTokenizer()), "file": None}


def write_teacher(root: Path, **train) -> str:
    """A dataset at root/data and a looped transformer trained on it for some steps; returns the run's folder."""
    write_dataset(root / "data")
    model = MODEL | {"layout": {"type": "uniform", "mixer": {"type": "full"}}}
    config = PretrainConfig.model_validate({"model": model, "train": train_config(**train).model_dump()})
    spec = run_folder.open_run(
        config,
        data=str(root / "data"),
        out=str(root / "teacher"),
        run_id="teacher",
        storage_root=str(root),
    )
    run_folder.close_run(spec, worker.run(spec))
    return spec.out


def write_ouro(folder: Path, vocab_size: int = 320) -> str:
    """Random weights in Ouro's format."""
    weights = {name: tensor.bfloat16() for name, tensor in ouro_weights().items()}
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(vocab_size, weights[name].shape[1], generator=generator).bfloat16()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(OURO | {"vocab_size": vocab_size}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def open_stage(root: Path, name: str, objective: dict, *, teacher, student=None, topk=None, workers=1, **fields):
    """The worker's spec of one stage, in root/name."""
    run = {key: fields.pop(key) for key in ("kept", "mixer") if key in fields}
    train = train_config(objective=objective, **fields)
    stage = DistillRun.model_validate({"mixer": None if student else GDN, **run, "train": train.model_dump()})
    data = str(root / "data")
    config, sources = plan_stage(stage, teacher=teacher, data=data, student=student, topk=topk)
    return run_folder.open_run(
        config,
        data=data,
        out=str(root / name),
        run_id=name,
        storage_root=str(root),
        workers=Workers(num_workers=workers),
        sources=sources,
    )


def run_stage(root: Path, name: str, objective: dict, **fields) -> str:
    spec = open_stage(root, name, objective, **fields)
    run_folder.close_run(spec, worker.run(spec))
    return spec.out


def weights(out: str) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(out)[0].state_dict()
