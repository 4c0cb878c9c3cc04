"""A tiny pretraining run and its perplexity on a dataset given with --set, held at a step until a file is there; and
the quickstart up to its trained model, held likewise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar, Literal

from lt2.train.objectives import NextTokenConfig, ObjectiveConfig
from lt2_platform.evaluate.config import PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Workflow
from lt2_workflows.recipes import quickstart as shipped
from lt2_workflows.steps import CheckpointRef, EvaluateStep, PretrainStep, TrainResources
from tests.platform.train.packed import MODEL, train_config


class HeldConfig(ObjectiveConfig):
    """Next-token loss; from step `hold` on it waits for the file `gate`, so that a test need not race training, in each
    step for at most `hold_s`.
    """

    module: ClassVar[str] = "build_held"
    type: Literal["held"] = "held"
    gate: str = "unset"
    hold: int = 15
    hold_s: float = 3600.0


def build_held(config: HeldConfig, train: Any) -> Any:
    objective = NextTokenConfig().build(train)

    def held(model: Any, batch: Any) -> Any:
        end = time.monotonic() + config.hold_s
        while batch.step >= config.hold and not Path(config.gate).exists() and time.monotonic() < end:
            time.sleep(0.05)
        return objective(model, batch)

    return held


def training() -> Workflow:
    return Workflow("training", {"pretrain": trained().configs["pretrain"]})


def trained() -> Workflow:
    return Workflow(
        "trained",
        {
            "pretrain": PretrainStep(
                data="unset",
                model=PretrainModel.model_validate(MODEL),
                train=train_config(steps=40, checkpoint_every=10, objective=HeldConfig(source=__file__)),
                resources=TrainResources(cpus_per_worker=1),
            ),
            "evaluate": EvaluateStep(
                data="unset", checkpoint=CheckpointRef(step="pretrain"), tasks=(PerplexityConfig(),)
            ),
        },
    )


def quickstart() -> Workflow:
    configs = shipped.quickstart().configs
    pretrain = configs["pretrain"]
    assert isinstance(pretrain, PretrainStep)
    assert pretrain.train.objective == NextTokenConfig()
    train = pretrain.train.model_copy(update={"objective": HeldConfig(source=__file__)})
    return Workflow(
        "quickstart", {"prepare": configs["prepare"], "pretrain": pretrain.model_copy(update={"train": train})}
    )
