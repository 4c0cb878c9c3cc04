"""Students: a looped teacher whose attention, outside a kept set of layers, is replaced by another mixer.

A student has its teacher's embeddings, FFNs and norms; a new mixer starts from the projections of the attention it
replaces (paper, Sec. Distilling; Goldstein et al. 2026 for the copy).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from lt2.config import ActHalting, ConfigError, ExitGate, KeptLayout, MixerConfig, ModelConfig, UniformLayout
from lt2.explain import explain
from lt2.layout import of_each_loop
from lt2.mixer_configs import DSAConfig
from lt2.mixers.shared import fused_heads
from lt2.model import Block, LoopedLM, build
from lt2.ops.dispatch import announce

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "qfv_proj": ("q_proj", None, "v_proj")}
"""A mixer's fused projection and, in the order of its rows, the attention's projections that its parts begin as."""


def student_config(
    teacher: ModelConfig, mixer: MixerConfig, kept: Collection[int] = (), *, both: bool = False
) -> ModelConfig:
    """The teacher's config with attention in the layers of `kept` only and `mixer` in the others.

    both: keep the teacher's attention in every layer as well, unused outside `kept`: the model of stage 1.

    Raises:
        ConfigError: a teacher that mixes mixers or halts by ACT, a mixer that would run on the attention's own weights,
            or kept layers that do not exist.
    """
    if isinstance(teacher.halting, ActHalting):
        raise ConfigError(
            "the teacher has halting type 'act', with which a token has no state after the loop it halts in; distil "
            "from one without halting, or with an exit gate"
        )
    attention = attention_of(teacher)
    if isinstance(attention, DSAConfig):  # its indexer is trained: dense for its first steps it was another function
        attention = attention.model_copy(update={"warmup_steps": 0})
    if attention.weights == mixer.weights:
        raise ConfigError(
            f"mixer {mixer.type!r} runs on the same weights as the teacher's {attention.type!r}; choose one with "
            "weights of its own, e.g. gdn or kda"
        )
    layout = KeptLayout(attention=attention, mixer=mixer, kept=tuple(sorted(kept)), both=both)
    try:
        return ModelConfig.model_validate(teacher.model_dump() | {"layout": layout.model_dump()})
    except ValidationError as error:
        raise ConfigError(explain(error, "student")) from None


def attention_of(teacher: ModelConfig) -> MixerConfig:
    """The one mixer a teacher runs everywhere. Raises ConfigError where there are several."""
    if isinstance(teacher.layout, UniformLayout):
        return teacher.layout.mixer
    if isinstance(teacher.layout, KeptLayout) and teacher.layout.both:
        return teacher.layout.attention
    raise ConfigError(
        f"the teacher has layout {teacher.layout.type!r}; distil from one with the same attention in every layer "
        "(layout type 'uniform')"
    )


def convert(
    teacher: LoopedLM, mixer: MixerConfig, kept: Collection[int] = (), *, both: bool = False, seed: int = 42
) -> LoopedLM:
    """A student of `teacher` before any training, fp32, on the CPU. See `student_config` and `start_from`."""
    student = build(student_config(teacher.config, mixer, kept, both=both), seed=seed)
    start_from(student, teacher)
    return student


@torch.no_grad()
def start_from(student: LoopedLM, source: LoopedLM) -> None:
    """Copy into `student` what `source`, its teacher or the student of an earlier stage, has of it.

    Parameters of the same name are copied; with other loops than `source`, rho is that of its loops, the last one's
    for all later ones, so that the student is the source run so deep. A mixer that `source` lacks begins as the
    projections of the source's attention in that layer, where their shapes fit (fewer key/value heads are repeated).
    The rest of it stays as it is, and so do rho (0) and an exit gate that `source` lacks.

    Raises:
        ConfigError: other layers or another width, or a part that either lacks (an exit gate may be left).
    """
    check_start(student, source)
    theirs = dict(source.named_parameters())
    for name, parameter in student.named_parameters():
        if name == "rho" and name in theirs:
            parameter.copy_(torch.stack(of_each_loop(theirs[name].unbind(), len(parameter))))
        elif name in theirs:
            parameter.copy_(theirs[name])
    layout = student.config.layout
    attention = layout.attention.weights if isinstance(layout, KeptLayout) else ""
    for ours, block in zip(cast(list[Block], student.blocks), cast(list[Block], source.blocks)):
        for kind in ours.mixers.keys() - block.mixers.keys():
            start_mixer(ours.mixers[kind], dict(block.mixers.items()).get(attention), kind)


def check_start(student: LoopedLM, source: LoopedLM) -> None:
    """Raise ConfigError where `start_from` would; reads no weights."""
    if len(student.blocks) != len(source.blocks):
        there, here = len(source.blocks), len(student.blocks)
        raise ConfigError(f"cannot start from this model: it has {there} layers, not {here}")
    theirs = dict(source.named_parameters())
    # What may begin with this run: rho of 0 and a gate that nobody reaches leave the function as it was trained.
    fresh = ("rho", "halt.") if isinstance(student.config.halting, ExitGate) else ("rho",)
    for name, parameter in student.named_parameters():
        if name not in theirs and ".mixers." not in name and not name.startswith(fresh):
            raise ConfigError(f"cannot start from this model: it has no {name}{_why(student, source)}")
        shape = slice(1, None) if name == "rho" else slice(None)  # loops may be more or fewer
        if name in theirs and theirs[name].shape[shape] != parameter.shape[shape]:
            shapes = f"{tuple(theirs[name].shape)} there and {tuple(parameter.shape)} here"
            raise ConfigError(f"cannot start from this model: {name} is {shapes}; the sizes must be the same")
    own = {name for name, _ in student.named_parameters()}
    for name in sorted(theirs.keys() - own):  # without it the rest is another function than was trained
        if ".mixers." not in name and not name.startswith("halt."):
            lacking = f"it has {name}, which the model here lacks{_why(student, source)}"
            raise ConfigError(f"cannot start from this model: {lacking}")
    layout = student.config.layout
    advice = "give both mixers the same settings"
    if (layout.type == "random") != (source.config.layout.type == "random"):
        advice = "with layout 'random' mixers of a layer share projections, so both models must have it or neither"
    for layer, (ours, block) in enumerate(zip(cast(list[Block], student.blocks), cast(list[Block], source.blocks))):
        for kind in sorted(ours.mixers.keys() & block.mixers.keys()):  # or it is another function than was trained
            here, there = ({name for name, _ in each.mixers[kind].named_parameters()} for each in (ours, block))
            for name in sorted(here ^ there):
                lacking = f"{name} of {kind} {'there' if name in here else 'here'}"
                raise ConfigError(f"cannot start from this model: layer {layer} has no {lacking}; {advice}")
        new = ours.mixers.keys() - block.mixers.keys()
        if isinstance(layout, KeptLayout) and layout.attention.weights in new:
            raise ConfigError(
                f"cannot start from this model: layer {layer} keeps attention here and has lost it there; start "
                "from the teacher or from a student of stage 1, which holds both"
            )


def _why(student: LoopedLM, source: LoopedLM) -> str:
    """The settings that give a model parts, where they differ."""
    pairs = {
        name: (getattr(source.config, name), getattr(student.config, name))
        for name in ("loop_residual", "sandwich_norm", "tie_embeddings")
    }
    return "".join(
        f"; model.{name} is {there} there and {here} here".lower()
        for name, (there, here) in pairs.items()
        if there != here
    )


@torch.no_grad()
def start_mixer(mixer: Any, attention: Any, kind: str) -> None:
    """Copy q, k, v and o of `attention` into a new mixer, each where the shapes fit, without their biases; what is left
    out is said once."""
    left = []
    found = {fused: heads for fused in FUSED if (heads := fused_heads(mixer, fused))}
    for fused, (H, K, V) in found.items():
        parts = FUSED[fused]
        rows = getattr(mixer, fused).weight.split([H * K, H * K, H * V])
        for part, target in zip(parts, rows):
            weight = whole_heads(attention, part, H) if part is not None else None
            if weight is not None and weight.shape == target.shape:
                target.copy_(weight)
            elif part is not None:
                left.append(part)
    output, target = getattr(attention, "o_proj", None), getattr(mixer, "o_proj", None)
    if output is not None and isinstance(target, nn.Linear) and output.weight.shape == target.weight.shape:
        target.weight.copy_(output.weight)
    else:
        left.append("o_proj")
    if not found:
        left += ["q_proj", "k_proj", "v_proj"]
    device = str(next(mixer.parameters()).device)
    projections = {name: getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if biased := [name for name, layer in projections.items() if getattr(layer, "bias", None) is not None]:
        announce(f"conversion to {kind}", device, f"no biases of {', '.join(biased)}", "it has no place for them")
    if left:
        why = (
            "the attention's shapes do not fit"
            if attention is not None
            else "only distillation begins mixers as attention"
        )
        announce(f"conversion to {kind}", device, f"random {', '.join(left)}", why)


def whole_heads(attention: Any, part: str, heads: int) -> Tensor | None:
    """The weight (heads·E, D) of one projection, its heads repeated as grouped-query attention shares them."""
    projection, sizes = getattr(attention, part, None), getattr(attention, "heads", ())
    if not isinstance(projection, nn.Linear) or len(sizes) != 3:
        return None
    own, shared, size = sizes
    count = own if part == "q_proj" else shared
    if heads % count or projection.out_features != count * size:  # MLA's queries carry rotated channels as well
        return None
    return projection.weight.unflatten(0, (count, size)).repeat_interleave(heads // count, dim=0).flatten(0, 1)
