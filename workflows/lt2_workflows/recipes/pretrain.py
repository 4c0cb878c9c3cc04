"""The paper's pretraining runs: any row of its main table at 0.6B or 1.3B, on FineWeb-Edu.

`lt2 plan pretrain_13b:gdn+dsa --set prepare.source=… --set prepare.tokenizer=…` names the row after the recipe (see
ROWS in models.py; full+gdn if left out). Hyper-parameters are those of the paper's appendix on pretraining: 255,000
steps of 96 sequences of 4,096 tokens (100B in all), AdamW (0.9, 0.95), weight decay 0.1 (0.033 for
Full+Window at 1.3B), clip 1.0, cosine to 1e-6 of the peak, seeds 777 (trainer) and 42 (weights).

What needs an evaluation pack is a step of its own, so that the rest does not wait for one: the tasks of the main table,
and the paper's long-context table, recall within 2,048 tokens and needles.
"""

from __future__ import annotations

from typing import Any

from lt2.train.config import TrainConfig
from lt2_platform.evaluate.config import DiagnosticsConfig, HarnessConfig, PerplexityConfig, ThroughputConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Workflow
from lt2_workflows.recipes.models import ROWS, Scale, paper_model
from lt2_workflows.steps import (
    CheckpointRef,
    DatasetRef,
    EvaluateStep,
    EvaluationRef,
    PrepareStep,
    PretrainStep,
    ReportStep,
    TrainResources,
)

SEQ_LEN = 4096
PACK = "packs/paper"  # made with Llama 3's tokenizer
WEIGHT_DECAY: dict[tuple[str, Scale], float] = {("full+window", "1.3b"): 0.033}
"""Of the rows for which the paper needed less to keep training stable."""


def pretrain_06b(row: str = "full+gdn") -> Workflow:
    """A row of the paper's main table at 0.6B, 100B tokens of FineWeb-Edu, e.g. pretrain_06b:gdn."""
    return pretrain(row, "0.6b", lr=1.5e-4, warmup_steps=5_000)


def pretrain_13b(row: str = "full+gdn") -> Workflow:
    """A row of the paper's main table at 1.3B, 100B tokens of FineWeb-Edu, e.g. pretrain_13b:gdn+dsa."""
    return pretrain(row, "1.3b", lr=3e-4, warmup_steps=10_000)


def suites(pack: str, *names: Any) -> tuple[HarnessConfig, ...]:
    """Suites of one pack. At 8k tokens a looped transformer's cache is gigabytes a row: few at once."""
    return tuple(
        HarnessConfig(pack=pack, suite=name, batch_size=4 if name in ("needles", "ruler") else 16) for name in names
    )


def pretrain(row: str, scale: Scale, *, lr: float, warmup_steps: int):
    data, training = DatasetRef(step="prepare"), CheckpointRef(step="pretrain")
    model = paper_model(row, scale, seq_len=SEQ_LEN)
    return Workflow(
        f"pretrain_{scale.replace('.', '')}",
        {
            "prepare": PrepareStep(
                source="fineweb-edu", tokenizer="llama3.tiktoken", seq_len=SEQ_LEN, validation_fraction=0.001
            ),
            "pretrain": PretrainStep(
                data=data,
                model=PretrainModel.of(model),
                train=TrainConfig(
                    steps=255_000,
                    global_batch_size=96,
                    micro_batch_size=4,
                    lr=lr,
                    min_lr_ratio=1e-6,
                    warmup_steps=warmup_steps,
                    weight_decay=WEIGHT_DECAY.get((row, scale), 0.1),
                    seed=777,
                    init_seed=42,
                    compile="dsa" not in ROWS[row].mixers,
                    activation_checkpoint=True,
                    checkpoint_every=1_000,
                    eval_every=5_000,
                ),
                resources=TrainResources(num_workers=8, use_gpu=True),
            ),
            "evaluate": EvaluateStep(
                checkpoint=training,
                data=data,
                tasks=(PerplexityConfig(batch_size=4), ThroughputConfig(context=SEQ_LEN), DiagnosticsConfig()),
            ),
            "evaluate-tasks": EvaluateStep(
                checkpoint=training, data=data, tasks=suites(PACK, "core", "recall", "needles")
            ),
            "report": ReportStep(
                title=f"{ROWS[row].title}, {scale.upper()}",
                data=data,
                training=training,
                evaluation=EvaluationRef(step="evaluate"),
            ),
        },
    )
