"""From the Python standard library's own source to a trained, evaluated LT2-hybrid, in minutes on two cores."""

from __future__ import annotations

from lt2.config import HybridLayout
from lt2.mixer_configs import FullConfig, GatedDeltaNetConfig
from lt2.train.config import TrainConfig
from lt2_platform.evaluate.config import DiagnosticsConfig, PerplexityConfig, ThroughputConfig
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Workflow
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


def quickstart() -> Workflow:
    """Prepare, pretrain, evaluate and report a small LT2-hybrid (Full + GDN 1:4, T = 4) on this machine's own text."""
    data, training = DatasetRef(step="prepare"), CheckpointRef(step="pretrain")
    return Workflow(
        "quickstart",
        {
            "prepare": PrepareStep(source="python-stdlib", tokenizer="byte", seq_len=256, validation_fraction=0.02),
            "pretrain": PretrainStep(
                data=data,
                model=PretrainModel(
                    dim=96,
                    n_layers=5,
                    n_loops=4,
                    num_heads=2,
                    layout=HybridLayout(attention=FullConfig(), mixer=GatedDeltaNetConfig(), ratio="1:4"),
                ),
                train=TrainConfig(
                    steps=120, global_batch_size=16, lr=3e-3, warmup_steps=20, log_every=1, checkpoint_every=50
                ),
                resources=TrainResources(num_workers=2),
            ),
            "evaluate": EvaluateStep(
                checkpoint=training,
                data=data,
                tasks=(
                    PerplexityConfig(max_sequences=128),
                    ThroughputConfig(context=256, decode_steps=32, warmups=1, repeats=3),
                    DiagnosticsConfig(),
                ),
            ),
            "report": ReportStep(
                title="LT2-hybrid",
                data=data,
                training=training,
                evaluation=EvaluationRef(step="evaluate"),
            ),
        },
    )
