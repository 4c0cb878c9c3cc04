"""The paper from text to report in one workflow: pretrain a looped transformer, turn it into an LT2-hybrid, compare.

prepare -> pretrain (Looped Transformer) -> extend to long rows -> evaluate -> distill (alignment, choice of layers,
logits) -> long context -> evaluate -> retention and report. Sizes of the stages are the paper's (Sec. Distilling), the
model its 1.3B. The paper's own teacher, Ouro, knows 64k tokens; one pretrained on rows of 4,096 is extended first, with
a larger rotary base as in Xiong et al. (2023), or it would teach positions that it has never seen.
"""

from __future__ import annotations

from typing import Any

from lt2.config import UniformLayout
from lt2.mixer_configs import FullConfig
from lt2.train.config import TrainConfig
from lt2.train.objectives import AlignConfig, DistillConfig
from lt2_platform.data.sources.configs import OpenThoughtsConfig
from lt2_platform.distill.run import NEW_MIXER
from lt2_platform.evaluate.config import HarnessConfig, PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Ref, StepConfig, Workflow
from lt2_workflows.recipes.distill import probes, retention, select
from lt2_workflows.recipes.models import paper_model
from lt2_workflows.recipes.pretrain import PACK, pretrain_13b, suites
from lt2_workflows.steps import (
    CheckpointRef,
    DatasetRef,
    DistillStep,
    DocumentStep,
    EvaluateStep,
    ItemsStep,
    PackRef,
    PrepareStep,
    PretrainStep,
    SelectionRef,
    SelectLayersStep,
    TrainResources,
)

LONG = 32_768
LONG_THETA = 500_000.0
TEACHER, ALIGNED = CheckpointRef(step="extend"), CheckpointRef(step="align")


def paper_end_to_end() -> Workflow:
    """Looped Transformer 1.3B on 100B tokens and 600M in rows of 32k, distilled to Full+GDN 1:3, evaluated, reported.

    Stages of 100M tokens at 512, 600M at 4,096 and 600M at 32,768; 5 of 20 layers keep attention, the paper's 25 %,
    chosen by 20 probes.
    """
    scratch = pretrain_13b("looped-transformer").configs
    prepare, pretrain = scratch["prepare"], scratch["pretrain"]
    assert isinstance(prepare, PrepareStep)
    assert isinstance(pretrain, PretrainStep)
    model = paper_model("looped-transformer", "1.3b", seq_len=LONG).model_copy(update={"rope_theta": LONG_THETA})
    layers, kept = model.n_layers, model.n_layers // 4
    gpus = TrainResources(num_workers=8, use_gpu=True)
    train: dict[str, Any] = {"activation_checkpoint": True, "checkpoint_every": 200}
    logits = DistillConfig(k=64, rest_lr_scale=0.07)
    at_4k: dict[str, Any] = {
        **train,
        "objective": logits,
        "global_batch_size": 64,
        "micro_batch_size": 2,
        "lr": 1e-4,
        "warmup_steps": 20,
    }
    stage: dict[str, Any] = {"teacher": TEACHER, "data": DatasetRef(step="prepare"), "resources": gpus}
    short: dict[str, Any] = {"objective": AlignConfig(), "global_batch_size": 256, "micro_batch_size": 16, "lr": 1e-3}
    long: dict[str, Any] = {"objective": logits, "global_batch_size": 8, "micro_batch_size": 1, "min_lr_ratio": 1.0}
    steps: dict[str, StepConfig] = {
        "prepare": prepare,
        "prepare-short": prepare.model_copy(update={"seq_len": 512}),
        "prepare-long": PrepareStep(
            source=OpenThoughtsConfig(path="openthoughts3", template="llama3", loss="all"),
            tokenizer=prepare.tokenizer,
            seq_len=LONG,
            validation_fraction=0.001,
        ),
        # Tokenised while training, it would hold out other documents, and train on some that are evaluated.
        "prepare-extend": prepare.model_copy(update={"seq_len": LONG, "max_documents": 1_000_000}),
        "pretrain": pretrain,
        "extend": PretrainStep(
            data=DatasetRef(step="prepare-extend"),
            start=CheckpointRef(step="pretrain"),
            model=PretrainModel.of(model),
            train=TrainConfig(
                steps=2289, global_batch_size=8, micro_batch_size=1, lr=3e-5, warmup_steps=100, seed=777, **train
            ),
            resources=gpus,
        ),
        "align": DistillStep(
            teacher=TEACHER,
            data=DatasetRef(step="prepare-short"),
            mixer=NEW_MIXER,
            train=TrainConfig(steps=763, warmup_steps=20, **train, **short),
            resources=gpus,
        ),
        **probes(layers, student=ALIGNED, train=TrainConfig(steps=40, **at_4k), **stage),
        "select": select(layers, kept),
        "distill": DistillStep(
            student=ALIGNED, kept=SelectionRef(step="select"), train=TrainConfig(steps=2289, **at_4k), **stage
        ),
        "long-context": DistillStep(
            teacher=TEACHER,
            student=CheckpointRef(step="distill"),
            data=DatasetRef(step="prepare-long"),
            train=TrainConfig(steps=2289, lr=1e-4, **train, **long),
            resources=gpus,
        ),
    }
    evaluation = {
        "data": DatasetRef(step="prepare"),
        "tasks": (
            PerplexityConfig(batch_size=4, max_sequences=512, held_out="report"),
            *suites(PACK, "core", "recall", "needles", "ruler", "reasoning"),
        ),
    }
    return finished("paper_end_to_end", steps, evaluation)


def paper_end_to_end_small() -> Workflow:
    """Every stage of paper_end_to_end on two cores, in a minute or two: it shows that all of it runs, and no more."""
    data, long = DatasetRef(step="prepare"), DatasetRef(step="prepare-long")
    train: dict[str, Any] = {"global_batch_size": 8, "lr": 3e-3, "warmup_steps": 2, "checkpoint_every": 50}
    logits = DistillConfig(k=32, rest_lr_scale=0.3)
    text: dict[str, Any] = {"source": "python-stdlib", "tokenizer": "byte", "max_documents": 60}
    stage: dict[str, Any] = {"teacher": TEACHER, "data": data}
    layers = 4
    model = PretrainModel(
        dim=32,
        n_layers=layers,
        n_loops=2,
        num_heads=2,
        ffn_hidden=64,
        layout=UniformLayout(mixer=FullConfig()),
    )
    steps: dict[str, StepConfig] = {
        "prepare": PrepareStep(seq_len=64, validation_fraction=0.1, **text),
        "prepare-long": PrepareStep(seq_len=256, validation_fraction=0.1, **text),
        "pretrain": PretrainStep(data=data, model=model, train=TrainConfig(steps=20, **train)),
        "extend": PretrainStep(
            data=long,
            start=CheckpointRef(step="pretrain"),
            model=model.model_copy(update={"rope_theta": LONG_THETA}),
            train=TrainConfig(steps=4, **train),
        ),
        "align": DistillStep(mixer=NEW_MIXER, train=TrainConfig(objective=AlignConfig(), steps=6, **train), **stage),
        "select": SelectLayersStep(method="one_shot", count=1, n_layers=layers, student=ALIGNED, sequences=8, **stage),
        "distill": DistillStep(
            student=ALIGNED,
            kept=SelectionRef(step="select"),
            train=TrainConfig(objective=logits, steps=6, **train),
            **stage,
        ),
        "long-context": DistillStep(
            teacher=TEACHER,
            student=CheckpointRef(step="distill"),
            data=long,
            train=TrainConfig(objective=logits, steps=4, **train),
        ),
        "items": ItemsStep(data=long, held_out="report", items=12, context=48, continuation=16),
    }
    evaluation = {
        "data": long,
        "pack": PackRef(step="items"),
        "tasks": (PerplexityConfig(max_sequences=8, held_out="report"), HarnessConfig(tasks=("continuation",))),
    }
    return finished("paper_end_to_end_small", steps, evaluation)


def finished(name: str, steps: dict[str, StepConfig], evaluation: dict[str, Any]):
    """The workflow with evaluations of teacher, stage 2 and stage 3, what they keep of the teacher, and the report."""
    models = {"extend": "Looped Transformer", "distill": "LT2-hybrid", "long-context": "LT2-hybrid, long context"}
    compared = retention(models, ["align", "distill", "long-context"], title="From Looped Transformer to LT2-hybrid")
    return Workflow(
        name,
        steps
        | {f"evaluate-{run}": EvaluateStep(checkpoint=CheckpointRef(step=run), **evaluation) for run in models}
        | {"retention": compared, "report": DocumentStep(steps=(Ref(step="retention"),))},
    )
