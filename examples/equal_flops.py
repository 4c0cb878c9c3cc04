"""Sweeps at equal training FLOPs: each architecture is trained for as many steps as the same budget pays.

    lt2 sweep examples/equal_flops.py:equal_flops --plan
    lt2 sweep examples/equal_flops.py:equal_flops --seeds 0,1,2
    lt2 sweep examples/equal_flops.py:scaling            # four budgets, wider models for larger ones

A budget counts what plans and tables count: forward and backward of the objective, 0.5 % more or less by whole steps.
The dashboard's figure "scaling" draws the result over the budgets.
"""

from __future__ import annotations

from lt2.analysis.accounting import training_flops
from lt2.config import HybridLayout, UniformLayout
from lt2.mixer_configs import FullConfig, KimiDeltaConfig, WindowConfig
from lt2.train.config import TrainConfig
from lt2_platform.evaluate.config import PerplexityConfig
from lt2_platform.train.config import PretrainModel
from lt2_platform.wording import amount
from lt2_workflows.graph import Workflow
from lt2_workflows.steps import CheckpointRef, DatasetRef, EvaluateStep, PrepareStep, PretrainStep
from lt2_workflows.sweeps import SweepStep, TrialConfig

SEQ_LEN, BATCH, BUDGET = 256, 16, 4e12  # tokens, sequences, FLOPs
WIDTHS = {1e12: 48, 2e12: 64, 4e12: 80, 8e12: 96}  # by budget
TRANSFORMER = PretrainModel(
    dim=96, n_layers=5, n_loops=1, num_heads=2, loop_residual=False, layout=UniformLayout(mixer=FullConfig())
)
HYBRID = HybridLayout(attention=WindowConfig(window=64), mixer=KimiDeltaConfig(), ratio="1:4")
MODELS = {
    "transformer": TRANSFORMER,
    "looped window and KDA": TRANSFORMER.model_copy(update={"n_loops": 4, "loop_residual": True, "layout": HYBRID}),
}


def steps_for(model: PretrainModel, budget: float) -> int:
    sized = model.model_copy(update={"vocab_size": 259})  # of bytes
    return round(budget / (training_flops(sized, SEQ_LEN) * BATCH * SEQ_LEN))


def equal_flops() -> Workflow:
    """A plain transformer and a looped hybrid, trained for the same FLOPs."""
    return sweep("equal_flops", [trial(label, model, BUDGET) for label, model in MODELS.items()], seeds=(0, 1))


def scaling() -> Workflow:
    """The same two at each of four budgets."""
    trials = [
        trial(f"{label}, {amount(budget)} FLOPs", model.model_copy(update={"dim": width}), budget)
        for label, model in MODELS.items()
        for budget, width in WIDTHS.items()
    ]
    return sweep("scaling", trials, seeds=(0,))


def trial(label: str, model: PretrainModel, budget: float) -> TrialConfig:
    steps = steps_for(model, budget)
    return TrialConfig(
        label=label, settings={"pretrain.model": model.model_dump(mode="json"), "pretrain.train.steps": steps}
    )


def sweep(name: str, trials: list[TrialConfig], *, seeds: tuple[int, ...]) -> Workflow:
    data, trained = DatasetRef(step="prepare"), CheckpointRef(step="pretrain")
    train = TrainConfig(steps=steps_for(TRANSFORMER, BUDGET), global_batch_size=BATCH, warmup_steps=20, lr=3e-3)
    recipe = Workflow(
        "recipe",
        {
            "prepare": PrepareStep(source="python-stdlib", seq_len=SEQ_LEN, validation_fraction=0.02),
            "pretrain": PretrainStep(data=data, model=TRANSFORMER, train=train),
            "evaluate": EvaluateStep(checkpoint=trained, data=data, tasks=(PerplexityConfig(),)),
        },
    )
    return Workflow(name, {"sweep": SweepStep(steps=recipe.record()["steps"], trials=tuple(trials), seeds=seeds)})
