"""State-based recall (paper, Sec. 3.6): how long a program each architecture learns, by loops."""

from __future__ import annotations

from lt2.config import ConfigError, HybridLayout, Layout, MixerConfig, UniformLayout
from lt2.mixer_configs import (
    DSAConfig,
    FullConfig,
    GatedDeltaNetConfig,
    KimiDeltaConfig,
    Mamba2Config,
    NSAConfig,
    WindowConfig,
)
from lt2_workflows.graph import Workflow
from lt2_workflows.steps import StateRecallStep
from lt2_workflows.sweeps import SweepStep, TrialConfig

FULL, GDN = FullConfig(), GatedDeltaNetConfig(allow_neg_eigval=True)
WINDOW = WindowConfig(window=64)
# fla's kernels need groups of 16 query heads; a model of this size has four in all.
NSA = NSAConfig(num_heads=4, num_kv_heads=1, block_size=16, num_blocks=8, window=64, backend="torch")


def hybrid(attention: MixerConfig, mixer: MixerConfig) -> Layout:
    """2 + 2 layers, interleaved."""
    return HybridLayout(attention=attention, mixer=mixer, ratio="1:1")


ARCHITECTURES: dict[str, Layout] = {
    "full": UniformLayout(mixer=FULL),
    "window": UniformLayout(mixer=WINDOW),
    "nsa": UniformLayout(mixer=NSA),
    "dsa": UniformLayout(mixer=DSAConfig(top_k=64)),
    "gdn": UniformLayout(mixer=GDN),
    "kda": UniformLayout(mixer=KimiDeltaConfig(allow_neg_eigval=True)),
    "mamba2": UniformLayout(mixer=Mamba2Config()),
    "full-window": hybrid(FULL, WINDOW),
    "full-gdn": hybrid(FULL, GDN),
    "gdn-window": hybrid(WINDOW, GDN),
    "gdn-nsa": hybrid(NSA, GDN),
}


def state_recall() -> Workflow:
    """State-based recall on two cores, small: GDN and the Full + GDN hybrid, n = 8 and 16.

    The opening has 5 bits and 1, 2, 3 and 5 swaps; with it and a rotary base of 100 both pass the two stages (LOG.md).
    Full attention of this size learns to look bits up and not to follow swaps: it stays in the opening.
    """
    return Workflow("state_recall", {name: small(name) for name in ("gdn", "full-gdn")})


def sweep_state_recall(size: str = "cpu") -> Workflow:
    """State-based recall by architecture and loops, a trial each: small on two cores, or sweep_state_recall:paper."""
    if size not in ("cpu", "paper"):
        raise ConfigError(f"unknown size {size!r} of sweep_state_recall; choose cpu or paper")
    names, depths = (ARCHITECTURES, (1, 2, 4, 8)) if size == "paper" else (("full", "gdn", "full-gdn"), (1, 2))
    base = StateRecallStep(layout=ARCHITECTURES["full"]) if size == "paper" else small("full")
    trials = tuple(
        TrialConfig(
            group=name,
            label=f"T = {n_loops}",
            settings={"recall.layout": ARCHITECTURES[name].model_dump(mode="json"), "recall.n_loops": n_loops},
        )
        for name in names
        for n_loops in depths
    )
    steps = Workflow("recipe", {"recall": base}).record()["steps"]
    return Workflow("sweep_state_recall", {"sweep": SweepStep(steps=steps, trials=trials, seed_keys=("recall.seed",))})


def small(name: str) -> StateRecallStep:
    sizes = {"n_layers": 2, "dim": 64, "num_heads": 2, "n_loops": 2, "stages": (8, 16)}
    quick = {"max_steps": 6000, "eval_every": 250, "batch_size": 16, "lr": 3e-3, "warmup_steps": 50, "rope_theta": 100}
    opening = tuple((5, swaps) for swaps in (1, 2, 3, 5))
    return StateRecallStep(layout=ARCHITECTURES[name], opening=opening, **sizes, **quick)
