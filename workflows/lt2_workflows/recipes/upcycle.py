"""A transformer that others pretrained, made into a looped one and then into an LT2-hybrid.

The paper distils from a transformer that was trained looped (Ouro). A plain one of the Llama kind can take that
place once it was trained at several depths; it is a looped model of one loop to begin with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lt2.config import ConfigError, ModelConfig, UniformLayout
from lt2.distill.select import uniform_layers
from lt2.mixer_configs import FullConfig, SoftmaxConfig
from lt2.train.config import TrainConfig
from lt2.train.objectives import AlignConfig, DistillConfig, NextTokenConfig
from lt2_platform.data.sources.configs import DclmConfig
from lt2_platform.distill.run import NEW_MIXER
from lt2_platform.evaluate.config import PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import StepConfig, Workflow
from lt2_workflows.recipes.distill import retention
from lt2_workflows.steps import (
    CheckpointRef,
    DatasetRef,
    DistillStep,
    EvaluateStep,
    ImportModelStep,
    PrepareStep,
    PretrainStep,
    TrainResources,
)

SEQ_LEN = 2048
N_LOOPS = 4
SMOLLM2 = "SmolLM2-135M"
SMOLLM2_135M = ModelConfig(  # its config.json (Ben Allal et al. 2025)
    vocab_size=49_152,
    dim=576,
    n_layers=30,
    n_loops=1,
    num_heads=9,
    layout=UniformLayout(mixer=FullConfig(num_kv_heads=3, head_dim=64)),
    ffn_hidden=1536,
    rope_theta=1e5,
    norm_eps=1e-5,
    tie_embeddings=True,
    loop_residual=False,
    max_seq_len=8192,
)


def upcycle(folder: str = SMOLLM2) -> Workflow:
    """A pretrained transformer (upcycle:FOLDER, of Llama, Mistral or Qwen) to a looped one, to a hybrid, on 2B tokens.

    1B tokens at 1, 2 and 4 loops in turn; then its attention is distilled into GDN in three of four layers (alignment,
    then logits). Each stage is evaluated beside what it came from.
    """
    base = ImportModelStep(folder=folder, expected=SMOLLM2_135M if folder == SMOLLM2 else None)
    plain = base.model
    if plain is None:
        raise ConfigError(f"{folder} has no config.json; give the folder of a model, as in upcycle:models/Qwen3-0.6B")
    if plain.n_loops > 1:
        raise ConfigError(f"{folder} has a model that is looped already; distil from it as distill_ouro_14b does")
    if not isinstance(plain.layout, UniformLayout):
        raise ConfigError(
            f"{folder} has a model with windows in some of its layers; only one with the same attention in every layer "
            "can be distilled from"
        )
    assert isinstance(plain.layout.mixer, SoftmaxConfig)
    head_dim = plain.layout.mixer.heads(plain.dims)[2]
    mixer = NEW_MIXER.model_copy(update={"head_dim": head_dim})  # it begins as the attention's projections
    kept = uniform_layers(plain.n_layers, max(plain.n_layers // 4, 1))
    data, looped = DatasetRef(step="prepare"), CheckpointRef(step="looped")
    gpus = TrainResources(num_workers=8, use_gpu=True)
    train: dict[str, Any] = {
        "global_batch_size": 256, "micro_batch_size": 8, "warmup_steps": 100, "checkpoint_every": 200,
        "activation_checkpoint": True, "weight_decay": 0.1, "grad_clip": 1.0,
    }  # fmt: skip
    stage: dict[str, Any] = {"teacher": looped, "data": data, "resources": gpus}
    steps: dict[str, StepConfig] = {
        "base": base,
        "prepare": PrepareStep(
            source=DclmConfig(path="dclm"),
            tokenizer=str(Path(folder, "tokenizer.json")),
            seq_len=SEQ_LEN,
            validation_fraction=0.001,
        ),
        "looped": PretrainStep(
            data=data,
            start=CheckpointRef(step="base"),
            model=PretrainModel.of(plain.model_copy(update={"n_loops": N_LOOPS, "loop_residual": True})),
            train=TrainConfig(objective=NextTokenConfig(loops=(1, 2, 4)), steps=2_000, lr=3e-4, **train),
            resources=gpus,
        ),
        "align": DistillStep(
            mixer=mixer, train=TrainConfig(objective=AlignConfig(), steps=200, lr=1e-3, **train), **stage
        ),
        "hybrid": DistillStep(
            student=CheckpointRef(step="align"),
            kept=kept,
            train=TrainConfig(objective=DistillConfig(k=64, rest_lr_scale=0.07), steps=1_700, lr=1e-4, **train),
            **stage,
        ),
    }
    tasks = (PerplexityConfig(batch_size=4, max_sequences=512, held_out="report"),)
    for name in ("base", "looped", "hybrid"):
        steps[f"evaluate-{name}"] = EvaluateStep(
            checkpoint=CheckpointRef(step=name),
            data=data,
            tasks=tasks,
            loops={"base": (1,), "looped": (1, 2, N_LOOPS), "hybrid": (N_LOOPS,)}[name],
        )
    names = {"looped": "looped", "base": "pretrained", "hybrid": "hybrid"}
    steps["retention"] = retention(names, ["looped", "align", "hybrid"], title="Upcycling")
    return Workflow("upcycle", steps)
