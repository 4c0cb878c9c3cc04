"""The paper's ablations as sweeps, at its size or at one for two cores: `lt2 sweep ratio`, `lt2 sweep ratio:1.3b`.

`cpu` trains on the standard library's own source text for minutes, with two seeds; `0.6b` and `1.3b` are the runs of
recipes/pretrain.py, with the paper's seeds, evaluated on its eight tasks from the pack `packs/core`. Where the paper
matches parameters (level, gate), and for ratios and loops, the FFN width makes all trials as large as Full+GDN 1:4.
"""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError, HybridLayout, Layout, LoopLayout, MixerConfig, RandomLayout, UniformLayout
from lt2.mixer_configs import (
    DeltaNetConfig,
    DSAConfig,
    FullConfig,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    HGRN2Config,
    KimiDeltaConfig,
    LinearAttentionConfig,
    Mamba2Config,
    NSAConfig,
    RetNetConfig,
    WindowConfig,
)
from lt2.train.config import TrainConfig
from lt2_platform.evaluate.config import DiagnosticsConfig, HarnessConfig, PerplexityConfig, TaskConfig
from lt2_platform.evaluate.paper.main_table import TASKS
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import Workflow
from lt2_workflows.recipes.models import ROWS, Scale, paper_model
from lt2_workflows.recipes.pretrain import SEQ_LEN, WEIGHT_DECAY, pretrain_06b, pretrain_13b
from lt2_workflows.steps import CheckpointRef, DatasetRef, EvaluateStep, PrepareStep, PretrainStep
from lt2_workflows.sweeps import SweepResources, SweepStep, TrialConfig

LAYOUT = "pretrain.model.layout"
PAPER_SEEDS = ("pretrain.train.seed", "pretrain.train.init_seed")
CPU_SEEDS = (0, 1)  # of the paper's tables; sweeps with more trials take one
TASKS_TO_AVERAGE = HarnessConfig(pack="packs/core", tasks=TASKS)


def sweep_ratio(size: str = "cpu") -> Workflow:
    """Hybrid ratio, Full : GDN from 1:0 to 0:1 (paper, Table 3). Sizes: cpu, 0.6b, 1.3b."""
    ratios = ("1:0", "1:1", "1:4", "1:6", "1:12", "0:1")
    trials = [TrialConfig(label=ratio, settings={f"{LAYOUT}.ratio": ratio}) for ratio in ratios]
    # Of fifteen layers 15, 7, 3, 2, 1 and 0 are attention.
    return sweep("ratio", size, trials, cpu=cpu_recipe(n_layers=15, n_loops=2), match=True)


def sweep_pattern(size: str = "cpu") -> Workflow:
    """Where a 1:4 hybrid's attention layers are: bookend, interleave, front, back (paper, Table 3)."""
    patterns = ("bookend", "interleave", "front", "back")
    trials = [TrialConfig(label=pattern, settings={f"{LAYOUT}.pattern": pattern}) for pattern in patterns]
    # Ten layers: two of attention, so that the four patterns differ.
    return sweep("pattern", size, trials, cpu=cpu_recipe(n_layers=10, n_loops=2))


def sweep_level(size: str = "cpu") -> Workflow:
    """Hybrids over depth, over loops coarse to fine or back, or drawn at random with a vote (paper, Table 3)."""
    windows = (64, 32, 16) if size == "cpu" else (512, 256, 128)
    full, *narrower = (FullConfig(), *(WindowConfig(window=window) for window in windows))
    layouts: dict[str, Layout] = {
        "random + vote": RandomLayout(attention=full, mixer=GatedDeltaNetConfig(), fraction=0.2, votes=5),
        "depth": HybridLayout(attention=full, mixer=GatedDeltaNetConfig(), ratio="1:4"),
        "coarse to fine": LoopLayout(mixers=(full, *narrower)),
        "fine to coarse": LoopLayout(mixers=(*reversed(narrower), full)),
    }
    trials = [TrialConfig(label=label, settings=layout_settings(layout)) for label, layout in layouts.items()]
    return sweep("level", size, trials, cpu=cpu_recipe(), match=True)


def sweep_gate(size: str = "cpu") -> Workflow:
    """The SDPA output gate on Looped Transformer, Full+GDN and GDN+DSA (paper, Table 4), with the sink (Figure 5)."""
    dsa = DSAConfig(top_k=32, index_dim=16, index_rope_dim=8, warmup_steps=20) if size == "cpu" else DSAConfig()

    def layouts(gate: Any) -> dict[str, Layout]:
        full, gdn = FullConfig(gate=gate), GatedDeltaNetConfig()
        sparse = dsa.model_copy(update={"gate": gate})
        return {
            "Looped Transformer": UniformLayout(mixer=full),
            "Full+GDN": HybridLayout(attention=full, mixer=gdn, ratio="1:4"),
            "GDN+DSA": HybridLayout(attention=sparse, mixer=gdn, ratio="1:4"),
        }

    trials = [
        TrialConfig(group=model, label=label, settings=layout_settings(layouts(gate)[model]) | compiled(model))
        for model in layouts(None)
        for label, gate in (("no gate", None), ("gate", "elementwise"))
    ]
    return sweep("gate", size, trials, cpu=cpu_recipe(), match=True, more=(DiagnosticsConfig(),))


def sweep_mixers(size: str = "cpu") -> Workflow:
    """Every mixer and hybrid of the paper's main table, looped, as many parameters each."""
    if size == "cpu":
        trials = [TrialConfig(label=label, settings=layout_settings(each)) for label, each in cpu_mixers().items()]
        return sweep("mixers", size, trials, cpu=cpu_recipe(), match=True)
    scale: Any = size
    check_size(size)
    models = {name: paper_model(name, scale, seq_len=SEQ_LEN) for name, row in ROWS.items() if scale in row.scales}
    trials = [
        TrialConfig(
            label=ROWS[name].title,
            settings={"pretrain.model": PretrainModel.of(model).model_dump(mode="json")}
            | compiled(ROWS[name].title)
            | decayed(name, scale),
        )
        for name, model in models.items()
    ]
    return sweep("mixers", size, trials, cpu=cpu_recipe())


def sweep_loops(size: str = "cpu") -> Workflow:
    """T = 1, 2, 4, 8 loops of Looped Transformer, Looped GDN and Full+GDN, trained at each depth."""
    full, gdn = FullConfig(), GatedDeltaNetConfig()
    layouts: dict[str, Layout] = {
        "Looped Transformer": UniformLayout(mixer=full),
        "Looped GDN": UniformLayout(mixer=gdn),
        "Full+GDN": HybridLayout(attention=full, mixer=gdn, ratio="1:4"),
    }
    trials = [
        TrialConfig(group=model, label=f"T = {loops}", settings=layout_settings(layout) | loop_settings(loops))
        for model, layout in layouts.items()
        for loops in (1, 2, 4, 8)
    ]
    return sweep("loops", size, trials, cpu=cpu_recipe(), paper=False, match=True)


def sweep(
    name: str,
    size: str,
    trials: list[TrialConfig],
    *,
    cpu: dict[str, Any],
    match: bool = False,
    paper: bool = True,
    more: tuple[TaskConfig, ...] = (),
):  # without a return annotation: not a recipe
    """`more` are tasks that every trial is evaluated on besides the recipe's."""
    check_size(size)
    small = size == "cpu"
    steps = cpu if small else full_recipe(size)
    steps["evaluate"]["tasks"] += [task.model_dump(mode="json") for task in more]
    table = name if name != "mixers" else "mixers-0.6b" if size == "0.6b" else "mixers-1.3b"
    return Workflow(
        f"sweep_{name}",
        {
            "sweep": SweepStep(
                steps=steps,
                trials=tuple(trials),
                seeds=CPU_SEEDS[: 2 if len(trials) < 10 else 1] if small else (),
                seed_keys=("pretrain.train.seed",) if small else PAPER_SEEDS,
                match_parameters="pretrain" if match else None,
                paper=table if paper else None,
                resources=SweepResources(concurrent=2 if small else 4),
            )
        },
    )


def check_size(size: str) -> None:
    if size not in ("cpu", "0.6b", "1.3b"):
        raise ConfigError(f"unknown size {size!r} of a sweep; choose cpu, 0.6b or 1.3b")


def cpu_recipe(*, n_layers: int = 5, n_loops: int = 4) -> dict[str, Any]:
    """A Full+GDN 1:4 hybrid of a few hundred thousand parameters on 60 steps of 1,024 bytes."""
    data = DatasetRef(step="prepare")
    layout = HybridLayout(attention=FullConfig(), mixer=GatedDeltaNetConfig(), ratio="1:4")
    model = PretrainModel(
        dim=48, n_layers=n_layers, n_loops=n_loops, num_heads=2, ffn_hidden=128, max_seq_len=128, layout=layout
    )
    train = TrainConfig(steps=60, global_batch_size=8, lr=3e-3, warmup_steps=6, log_every=5, checkpoint_every=30)
    configs = {
        "prepare": PrepareStep(
            source="python-stdlib", tokenizer="byte", seq_len=128, max_documents=200, validation_fraction=0.05
        ),
        "pretrain": PretrainStep(data=data, model=model, train=train),
        "evaluate": EvaluateStep(
            checkpoint=CheckpointRef(step="pretrain"),
            data=data,
            tasks=(PerplexityConfig(max_sequences=256, batch_size=32),),
        ),
    }
    return Workflow("recipe", configs).record()["steps"]


def full_recipe(size: str) -> dict[str, Any]:
    """pretrain_06b or pretrain_13b, evaluated on held-out text and the paper's eight tasks."""
    steps = (pretrain_06b() if size == "0.6b" else pretrain_13b()).record()["steps"]
    tasks = (PerplexityConfig(batch_size=4), TASKS_TO_AVERAGE)
    steps["evaluate"]["tasks"] = [task.model_dump(mode="json") for task in tasks]
    return {name: steps[name] for name in ("prepare", "pretrain", "evaluate")}


def cpu_mixers() -> dict[str, Layout]:
    """The paper's names, and the mixers that only its table of mixers has."""
    full, gdn = FullConfig(), GatedDeltaNetConfig()
    window, dsa = WindowConfig(window=32), DSAConfig(top_k=32, index_dim=16, index_rope_dim=8, warmup_steps=20)
    nsa = NSAConfig(num_heads=4, num_kv_heads=1, block_size=8, num_blocks=4, window=16, backend="torch")
    pure: dict[str, MixerConfig] = {
        "Looped Transformer": full,
        "Looped LA": LinearAttentionConfig(),
        "Looped RetNet": RetNetConfig(),
        "Looped HGRN2": HGRN2Config(),
        "Looped GLA": GatedLinearConfig(),
        "Looped Mamba2": Mamba2Config(head_dim=32),
        "Looped DeltaNet": DeltaNetConfig(),
        "Looped GDN": gdn,
        "Looped KDA": KimiDeltaConfig(),
        "Looped Window": window,
        "Looped NSA": nsa,
        "Looped DSA": dsa,
    }
    hybrids: dict[str, tuple[MixerConfig, MixerConfig]] = {
        "Looped Hybrid (Full+Window)": (full, window),
        "Looped Hybrid (Full+DSA)": (full, dsa),
        "Looped Hybrid (Full+GDN)": (full, gdn),
        "Looped Hybrid (GDN+DSA)": (dsa, gdn),
    }
    found: dict[str, Layout] = {label: UniformLayout(mixer=each) for label, each in pure.items()}
    for label, (attention, each) in hybrids.items():
        found[label] = HybridLayout(attention=attention, mixer=each, ratio="1:4")
    return found


def layout_settings(layout: Layout) -> dict[str, Any]:
    return {LAYOUT: layout.model_dump(mode="json")}


def loop_settings(loops: int) -> dict[str, Any]:
    """T = 1 is the plain stack: without the residual that carries a loop's input."""
    return {"pretrain.model.n_loops": loops, "pretrain.model.loop_residual": loops > 1}


def decayed(row: str, scale: Scale) -> dict[str, Any]:
    """The weight decay of the rows that have one of their own."""
    return {"pretrain.train.weight_decay": WEIGHT_DECAY[row, scale]} if (row, scale) in WEIGHT_DECAY else {}


def compiled(model: str) -> dict[str, Any]:
    """DSA's selection breaks compiled graphs."""
    return {"pretrain.train.compile": False} if "DSA" in model else {}
