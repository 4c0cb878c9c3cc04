"""A tiny pretraining run and its perplexity, on a packed dataset given with --set: a recipe as a user writes one."""

from __future__ import annotations

from lt2_platform.evaluate.config import PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Workflow
from lt2_workflows.steps import CheckpointRef, EvaluateStep, PretrainStep, TrainResources
from tests.platform.train.packed import MODEL, train_config

STEPS = 120


def trained() -> Workflow:
    return Workflow(
        "trained",
        {
            "pretrain": PretrainStep(
                data="unset",
                model=PretrainModel.model_validate(MODEL),
                train=train_config(steps=STEPS, checkpoint_every=10),
                resources=TrainResources(cpus_per_worker=1),
            ),
            "evaluate": EvaluateStep(
                data="unset", checkpoint=CheckpointRef(step="pretrain"), tasks=(PerplexityConfig(),)
            ),
        },
    )
