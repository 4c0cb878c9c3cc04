"""Parameters, FLOPs over the unrolled depth, and cache bytes of a model, from its config.

FLOPs count multiply and add as two. A looped model's compute is that of its N*T unrolled layers (paper App. C).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from lt2.cache import cache_dtype
from lt2.config import ConfigError, KeptLayout, MixerConfig, ModelConfig, UniformLayout
from lt2.layout import layout, of_each_loop, weights_per_layer
from lt2.mixer_configs import DSAConfig
from lt2.mixers.shared import SharedRows
from lt2.model import Block, LoopedLM
from lt2.train.objectives import AlignConfig, DistillConfig, ExitGateConfig, NextTokenConfig, ObjectiveConfig


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. `stack` is what each loop re-applies: the blocks; `embedding` counts a tied matrix once."""

    total: int
    embedding: int
    stack: int
    unrolled: int


def parameters(config: ModelConfig) -> Parameters:
    """Exact counts, read off the model built without storage."""
    with torch.device("meta"):
        model = LoopedLM(config)
    total = sum(p.numel() for p in model.parameters())
    stack = sum(p.numel() for p in model.blocks.parameters())
    embedding = config.vocab_size * config.dim * (1 if config.tie_embeddings else 2)
    return Parameters(total, embedding, stack, total + stack * (config.n_loops - 1))


def forward_flops(config: ModelConfig, seq_len: int, *, n_loops: int | None = None) -> float:
    """Forward FLOPs per token of a sequence of seq_len: 2 per weight used, the mixers' sequence terms, the head.

    Each (loop, layer) counts the weights of the mixer that runs there.
    """
    blocks = _blocks(config)
    mixers = _mixer_table(blocks, config, seq_len, n_loops or config.n_loops)
    ffns = 2.0 * sum(p.numel() for block in blocks for p in block.ffn.parameters())
    return head_flops(config) + sum(map(sum, mixers)) + len(mixers) * ffns


def head_flops(config: ModelConfig) -> float:
    """Forward FLOPs per token of the head."""
    return 2.0 * config.vocab_size * config.dim


def mixer_flops(config: ModelConfig, seq_len: int) -> list[list[float]]:
    """Forward FLOPs per token of the mixer at every [loop][layer], projections included."""
    return _mixer_table(_blocks(config), config, seq_len, config.n_loops)


def _blocks(config: ModelConfig) -> list[Block]:
    """One block per layer, built without storage; layers that hold the same weights share one object."""
    held = weights_per_layer(config)
    with torch.device("meta"):
        made = {repr(specs): Block(config, specs) for specs in {repr(specs): specs for specs in held}.values()}
    return [made[repr(specs)] for specs in held]


def _mixer_table(blocks: list[Block], config: ModelConfig, seq_len: int, n_loops: int) -> list[list[float]]:
    return [
        [_mixer_flops(blocks[layer], spec, config, seq_len) for layer, spec in enumerate(row)]
        for row in of_each_loop(layout(config), n_loops)
    ]


def _mixer_flops(block: Block, spec: MixerConfig, config: ModelConfig, seq_len: int) -> float:
    mixer = block.mixers[spec.weights]
    used = [p.numel() for p in mixer.parameters() if p.dim() > 1]
    used += [m.numel for m in mixer.modules() if isinstance(m, SharedRows)]
    return 2.0 * sum(used) + spec.sequence_flops(config.dims, seq_len)


def training_flops(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward FLOPs per token: three times the forward (recomputation is not counted, as in MFU)."""
    return 3.0 * forward_flops(config, seq_len)


def objective_flops(
    config: ModelConfig, objective: ObjectiveConfig, seq_len: int, *, teacher: ModelConfig | None = None
) -> float:
    """FLOPs per token of training by `objective`: forward, backward (twice that), and a teacher's forward.

    In stage 1 of a distillation everything runs forward and only the new mixers backward, as far as their input. Later
    stages have a head after every loop that counts: the mean over the run's steps. An exit gate's has one after every.
    Steps that run different numbers of loops count as their mean. Weights that the objective freezes have no gradient.
    DSA counts as sparse: `warmup_flops` says what its dense steps cost more.
    """
    blocks, head = stack_flops(config, objective, seq_len), head_flops(config)
    if isinstance(objective, AlignConfig):
        return blocks + 2 * _new_mixer_flops(config, seq_len) - _new_input_flops(config)
    heads = config.n_loops if isinstance(objective, ExitGateConfig) else 1
    if isinstance(objective, DistillConfig):
        share = {"final": 0.0, "uniform": 1.0, "scheduled": objective.until}[objective.supervision]
        heads = 1 + share * (config.n_loops - 1)
    asked = 0.0 if teacher is None else forward_flops(teacher, seq_len) + (heads - 1) * head
    return 3 * (blocks + heads * head) + asked - _frozen_gradient_flops(config, objective, heads)


def _frozen_gradient_flops(config: ModelConfig, objective: ObjectiveConfig, heads: float) -> float:
    """FLOPs per token of gradients to weights whose learning rate is multiplied by 0."""
    if type(objective).lr_scale is ObjectiveConfig.lr_scale:  # most train everything; no need to look at each weight
        return 0.0

    def frozen(part: str, module: nn.Module) -> float:
        weights = ((name, p) for name, p in module.named_parameters() if p.dim() > 1)
        return sum(2.0 * p.numel() for name, p in weights if not objective.lr_scale(f"{part}.{name}", config))

    blocks = _blocks(config)
    uses = sum(
        frozen(f"blocks.{layer}.mixers.{spec.weights}", blocks[layer].mixers[spec.weights])
        + frozen(f"blocks.{layer}.ffn", blocks[layer].ffn)
        for row in layout(config)
        for layer, spec in enumerate(row)
    )
    head = "embed.weight" if config.tie_embeddings else "head.weight"
    return uses + (0.0 if objective.lr_scale(head, config) else heads * head_flops(config))


def stack_flops(config: ModelConfig, objective: ObjectiveConfig, seq_len: int) -> float:
    """Forward FLOPs per token of all blocks as `objective` runs them: aligned are new mixers beside the teacher's."""
    if isinstance(objective, AlignConfig):
        assert isinstance(config.layout, KeptLayout)
        teacher = config.model_copy(update={"layout": UniformLayout(mixer=config.layout.attention)})
        return forward_flops(teacher, seq_len) - head_flops(config) + _new_mixer_flops(config, seq_len)
    each = [forward_flops(config, seq_len, n_loops=n_loops) for n_loops in depths(config, objective)]
    return sum(each) / len(each) - head_flops(config)


def depths(config: ModelConfig, objective: ObjectiveConfig) -> tuple[int, ...]:
    """Numbers of loops of training steps, each as often as the others."""
    drawn = objective.loops if isinstance(objective, NextTokenConfig) else None
    return drawn or (config.n_loops,)


def warmup_flops(config: ModelConfig, objective: ObjectiveConfig, seq_len: int) -> dict[int, float]:
    """{warmup_steps: forward FLOPs per token} by which DSA costs more in a training's first steps, where it is dense.

    The backward costs twice as much again, whatever the objective: only weights are frozen, and mixing has none.
    """
    each = depths(config, objective)
    rows = [row for n_loops in each for row in of_each_loop(layout(config), n_loops)]
    more: dict[int, float] = {}
    for spec in (spec for row in rows for spec in row):
        if isinstance(spec, DSAConfig) and spec.warmup_steps:
            dense = spec.model_copy(update={"top_k": seq_len})
            extra = dense.sequence_flops(config.dims, seq_len) - spec.sequence_flops(config.dims, seq_len)
            more[spec.warmup_steps] = more.get(spec.warmup_steps, 0.0) + extra / len(each)
    return more


def _new_mixer_flops(config: ModelConfig, seq_len: int) -> float:
    assert isinstance(config.layout, KeptLayout)
    kept = config.layout.kept
    return sum(flops for row in mixer_flops(config, seq_len) for layer, flops in enumerate(row) if layer not in kept)


def _new_input_flops(config: ModelConfig) -> float:
    """FLOPs per token of gradients to the new mixers' inputs, by their projections of it: all but the output's."""
    assert isinstance(config.layout, KeptLayout)
    new, kept = config.layout.mixer, config.layout.kept
    block = next(block for layer, block in enumerate(_blocks(config)) if layer not in kept)
    projections = [
        each.weight.numel()
        for name, each in block.mixers[new.weights].named_modules()
        if isinstance(each, nn.Linear) and each.in_features == config.dim and name != "o_proj"
    ]
    return 2.0 * sum(projections) * (config.n_layers - len(kept)) * config.n_loops


CARDS = {
    "B200": (2250e12, 180e9),
    "H200": (989e12, 141e9),
    "H100 PCIe": (756e12, 80e9),
    "H100 NVL": (835e12, 94e9),
    "H100": (989e12, 80e9),
    "A100": (312e12, 80e9),
    "L40S": (362e12, 48e9),
    "L4": (121e12, 24e9),
}
"""(dense bf16 FLOP/s, bytes of memory) of a card by a part of its name, from NVIDIA's data sheets; the first that fits
counts."""
PEAK_FLOPS = {card: flops for card, (flops, _) in CARDS.items()}
CARD_BYTES = {card: size for card, (_, size) in CARDS.items()}


def find_card(name: str) -> str:
    """The key of PEAK_FLOPS and CARD_BYTES that `name` means, whatever its case; ConfigError if there is none."""
    for card in PEAK_FLOPS:
        if name.lower() == card.lower():
            return card
    raise ConfigError(f"unknown card {name!r}; choose one of {', '.join(PEAK_FLOPS)}")


def peak_flops(card: str) -> float | None:
    """Dense bf16 FLOP/s of the card that calls itself so (torch.cuda.get_device_name); None if it is not known."""
    words = card.split()
    return next((peak for name, peak in PEAK_FLOPS.items() if _named(name.split(), words)), None)


def _named(name: list[str], words: list[str]) -> bool:
    # "A100-SXM4-80GB" is one word, and an L40 is no L4.
    return all(any(word == part or word.startswith(part + "-") for word in words) for part in name)


def cache_bytes(
    config: ModelConfig,
    max_len: int,
    *,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    n_loops: int | None = None,
) -> int:
    """Bytes that `model.init_cache(batch, max_len, n_loops=n_loops)` holds over all (loop, layer)."""
    loops = [sum(sum(layer.values()) for layer in loop) for loop in cache_table(config, max_len, dtype)]
    n_loops = n_loops or config.n_loops
    # As of_each_loop has them, but not one by one: somebody may ask for a billion, to be told that it does not fit.
    return batch * (sum(loops[:n_loops]) + max(0, n_loops - len(loops)) * loops[-1])


def cache_table(config: ModelConfig, max_len: int, dtype: torch.dtype = torch.bfloat16) -> list[list[dict[str, int]]]:
    """Bytes per sequence of every cache tensor, indexed [loop][layer][name]."""
    return [
        [
            {
                name: prod(shape) * cache_dtype(kind, dtype).itemsize
                for name, (shape, kind) in spec.cache_spec(config.dims, max_len).items()
            }
            for spec in row
        ]
        for row in layout(config)
    ]


def summarize(config: ModelConfig, seq_len: int) -> dict[str, Any]:
    """What a plan prints: counts, FLOPs per token, bf16 cache bytes of one sequence of seq_len."""
    return {
        "parameters": asdict(parameters(config)),
        "forward_flops_per_token": forward_flops(config, seq_len),
        "training_flops_per_token": training_flops(config, seq_len),
        "cache_bytes_per_sequence": cache_bytes(config, seq_len),
    }
