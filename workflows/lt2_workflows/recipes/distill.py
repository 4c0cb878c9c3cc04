"""Distilling a looped transformer into an LT2-hybrid, in three stages (paper, Sec. Distilling)."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError, ExitGate, ModelConfig, UniformLayout
from lt2.distill.select import uniform_layers
from lt2.mixer_configs import FullConfig
from lt2.train.config import TrainConfig
from lt2.train.objectives import AlignConfig, DistillConfig
from lt2_platform.data.sources.configs import DclmConfig, OpenThoughtsConfig
from lt2_platform.distill.run import NEW_MIXER
from lt2_platform.evaluate.config import HarnessConfig, PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import StepConfig, Workflow
from lt2_workflows.recipes.pretrain import suites
from lt2_workflows.steps import (
    CheckpointRef,
    DatasetRef,
    DistillStep,
    EvaluateStep,
    EvaluationRef,
    ImportOuroStep,
    ItemsStep,
    PackRef,
    PrepareStep,
    PretrainStep,
    RetentionStep,
    SelectionRef,
    SelectLayersStep,
    TrainResources,
)


def probes(n_layers: int, **step: Any) -> dict[str, StepConfig]:
    """The KL-guided selector's short stage-2 runs, `probe-0` and so on: the i-th keeps attention in layer i alone."""
    return {f"probe-{layer}": DistillStep(kept=(layer,), **step) for layer in range(n_layers)}


def select(n_layers: int, count: int) -> SelectLayersStep:
    """The choice of `count` layers by the steps of `probes`."""
    refs = tuple(CheckpointRef(step=f"probe-{layer}") for layer in range(n_layers))
    return SelectLayersStep(method="kl", count=count, n_layers=n_layers, probes=refs)


SMALL_LAYERS, SMALL_KEPT = 4, 1
SMALL_KD = DistillConfig(k=64, rest_lr_scale=0.3)
NEEDLES = ("niah_single_1_1024", "niah_multikey_2_1024", "ruler_fwe_1024")


def distill_small() -> Workflow:
    """A small looped transformer, pretrained, then distilled to Full+GDN (1 of 4 layers), with baselines, in minutes.

    Stage 2 runs four times, all else equal: with the layer chosen by KL, the one chosen by one-shot scores, the one
    that even spacing gives, and the last without stage 1. The first goes on to stage 3, at the teacher's own length,
    which is four times that of the other stages.
    """
    short, long = DatasetRef(step="prepare"), DatasetRef(step="prepare-long")
    teacher, aligned = CheckpointRef(step="teacher"), CheckpointRef(step="align")
    train: dict[str, Any] = {"log_every": 5, "checkpoint_every": 50, "weight_decay": 0.0}
    batch: dict[str, Any] = {"global_batch_size": 64, "warmup_steps": 5} | train
    text: dict[str, Any] = {"source": "python-stdlib", "tokenizer": "byte", "validation_fraction": 0.02}
    pair: dict[str, Any] = {"teacher": teacher, "data": short}
    stage: dict[str, Any] = pair | {"score_sequences": 256}

    def second(kept: SelectionRef, **start: Any) -> DistillStep:
        objective = TrainConfig(objective=SMALL_KD, steps=80, lr=3e-3, **batch)
        return DistillStep(kept=kept, train=objective, **start, **stage)

    steps: dict[str, StepConfig] = {
        "prepare": PrepareStep(seq_len=32, **text),
        "prepare-long": PrepareStep(seq_len=128, **text),
        "teacher": PretrainStep(
            data=long,
            model=PretrainModel(
                dim=64, n_layers=SMALL_LAYERS, n_loops=3, num_heads=2, layout=UniformLayout(mixer=FullConfig())
            ),
            train=TrainConfig(steps=600, global_batch_size=16, lr=4e-3, warmup_steps=30, **train),
            resources=TrainResources(num_workers=2),
        ),
        "align": DistillStep(
            mixer=NEW_MIXER, train=TrainConfig(objective=AlignConfig(), steps=120, lr=4e-3, **batch), **stage
        ),
        **probes(
            SMALL_LAYERS,
            student=aligned,
            train=TrainConfig(objective=SMALL_KD, steps=20, lr=3e-3, **batch),
            **stage,
        ),
        "select": select(SMALL_LAYERS, SMALL_KEPT),
        "select-one-shot": SelectLayersStep(
            method="one_shot", count=SMALL_KEPT, n_layers=SMALL_LAYERS, student=aligned, sequences=256, **pair
        ),
        "select-uniform": SelectLayersStep(method="uniform", count=SMALL_KEPT, n_layers=SMALL_LAYERS),
        "stage2": second(SelectionRef(step="select"), student=aligned),
        "stage2-one-shot": second(SelectionRef(step="select-one-shot"), student=aligned),
        "stage2-uniform": second(SelectionRef(step="select-uniform"), student=aligned),
        "stage2-no-align": second(SelectionRef(step="select-uniform"), mixer=NEW_MIXER),
        "stage3": DistillStep(
            teacher=teacher,
            student=CheckpointRef(step="stage2"),
            data=long,
            train=TrainConfig(objective=SMALL_KD, steps=60, global_batch_size=16, lr=1e-3, min_lr_ratio=1.0, **train),
        ),
        "items": ItemsStep(data=long, held_out="report", context=80, needles=NEEDLES, needle_samples=10),
    }
    names = {
        "teacher": "teacher",
        "stage2-no-align": "no alignment",
        "stage2-uniform": "uniform",
        "stage2": "selected",
        "stage3": "stage 3",
    }
    perplexity = PerplexityConfig(held_out="report", batch_size=32)
    tasks = (perplexity, HarnessConfig(tasks=("continuation", *NEEDLES), batch_size=20))
    for name in names:
        steps[f"evaluate-{name}"] = EvaluateStep(
            checkpoint=CheckpointRef(step=name), data=long, pack=PackRef(step="items"), tasks=tasks
        )
    trained = ["teacher", "align", "stage2-no-align", "stage2-uniform", "stage2-one-shot", "stage2", "stage3"]
    return Workflow("distill_small", steps | {"retention": retention(names, trained)})


def retention(names: dict[str, str], stages: list[str], *, title: str = "Distillation") -> RetentionStep:
    """The report on evaluate-NAME of each of `names`, the teacher's first, by the label given there."""
    teacher, *students = names
    return RetentionStep(
        title=title,
        teacher=EvaluationRef(step=f"evaluate-{teacher}"),
        students={names[name]: EvaluationRef(step=f"evaluate-{name}") for name in students},
        stages={names.get(name, name): CheckpointRef(step=name) for name in stages},
    )


OURO_LAYERS, OURO_KEPT, OURO_FOLDER = 24, 6, "Ouro-1.4B"
OURO_14B = ModelConfig(  # its config.json (Zhu et al. 2025)
    vocab_size=49_152,
    dim=2048,
    n_layers=OURO_LAYERS,
    n_loops=4,
    num_heads=16,
    layout=UniformLayout(mixer=FullConfig(num_kv_heads=16, head_dim=128)),
    ffn_hidden=5632,
    rope_theta=1e6,
    loop_residual=False,
    norm_each_loop=True,
    sandwich_norm=True,
    halting=ExitGate(threshold=1.0),
    max_seq_len=65_536,
)


def distill_ouro_14b(data: str = "openthoughts") -> Workflow:
    """Ouro-1.4B to Ouro-Hybrid-1.4B on 1.3B tokens; distill_ouro_14b:dclm does without reasoning traces in stage 3.

    100M tokens of length 512 for alignment, 600M of 4,096 for the logits, 600M of 32,768 for long contexts; 6 of 24
    layers keep attention, chosen by 24 probes of 10M tokens. Folders of weights and data are named with --set.
    """
    if data not in ("openthoughts", "dclm"):
        raise ConfigError(f"unknown data {data!r}; choose openthoughts or dclm")
    teacher, aligned = CheckpointRef(step="teacher"), CheckpointRef(step="align")
    common: dict[str, Any] = {"tokenizer": f"{OURO_FOLDER}/tokenizer.json", "validation_fraction": 0.001}
    dclm = DclmConfig(path="dclm")
    traces = dclm if data == "dclm" else OpenThoughtsConfig(path="openthoughts3", loss="all")
    gpus = TrainResources(num_workers=8, use_gpu=True)
    train: dict[str, Any] = {"activation_checkpoint": True, "weight_decay": 0.1, "grad_clip": 1.0}
    logits = DistillConfig(k=64, temperature=1.0, rest_lr_scale=0.07)  # 7e-6 beside the mixers' 1e-4
    at_4k: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 2, "lr": 1e-4, "warmup_steps": 20} | train
    # 262,144 tokens a step: 600M
    second = TrainConfig(objective=logits, steps=2289, checkpoint_every=200, **at_4k)
    stage: dict[str, Any] = {"teacher": teacher, "data": DatasetRef(step="prepare-4k"), "resources": gpus}

    def evaluation(name: str) -> EvaluateStep:
        packs = suites("packs/ouro", "core", "needles", "ruler", "reasoning")
        return EvaluateStep(
            checkpoint=CheckpointRef(step=name),
            data=DatasetRef(step="prepare-32k"),
            tasks=(PerplexityConfig(batch_size=1, max_sequences=64, held_out="report"), *packs),
        )

    steps: dict[str, StepConfig] = {
        "teacher": ImportOuroStep(folder=OURO_FOLDER, expected=OURO_14B),
        "prepare-512": PrepareStep(source=dclm, seq_len=512, **common),
        "prepare-4k": PrepareStep(source=dclm, seq_len=4096, **common),
        "prepare-32k": PrepareStep(source=traces, seq_len=32_768, **common),
        "align": DistillStep(
            teacher=teacher,
            data=DatasetRef(step="prepare-512"),
            mixer=NEW_MIXER,
            train=TrainConfig(
                objective=AlignConfig(),
                steps=763,  # of 131,072 tokens: 100M
                global_batch_size=256,
                micro_batch_size=16,
                lr=1e-3,
                warmup_steps=20,
                checkpoint_every=100,
                **train,
            ),
            resources=gpus,
        ),
        **probes(OURO_LAYERS, student=aligned, train=TrainConfig(objective=logits, steps=40, **at_4k), **stage),
        "select": select(OURO_LAYERS, OURO_KEPT),
        "stage2": DistillStep(student=aligned, kept=SelectionRef(step="select"), train=second, **stage),
        "stage2-uniform": DistillStep(
            student=aligned, kept=uniform_layers(OURO_LAYERS, OURO_KEPT), train=second, **stage
        ),
        "stage3": DistillStep(
            teacher=teacher,
            student=CheckpointRef(step="stage2"),
            data=DatasetRef(step="prepare-32k"),
            train=TrainConfig(
                objective=logits,
                steps=2289,
                global_batch_size=8,
                micro_batch_size=1,
                lr=1e-4,
                min_lr_ratio=1.0,
                checkpoint_every=200,
                **train,
            ),
            resources=gpus,
        ),
    }
    names = {"teacher": "Ouro-1.4B", "stage2-uniform": "uniform", "stage2": "stage 2", "stage3": "Ouro-Hybrid-1.4B"}
    steps |= {f"evaluate-{name}": evaluation(name) for name in names}
    return Workflow(
        "distill_ouro_14b", steps | {"retention": retention(names, ["align", "stage2-uniform", "stage2", "stage3"])}
    )
