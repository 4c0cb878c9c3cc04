"""Initial weights of a looped model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lt2.config import ConfigError

if TYPE_CHECKING:
    from lt2.model import LoopedLM


@torch.no_grad()
def init_weights(model: LoopedLM, seed: int = 42) -> None:
    """Truncated normal at 3 sigma with std fan_in^-1/2 (d^-1/2 for embeddings), from `seed` alone.

    With global_depth_init the projections back into the residual stream are scaled by (2 (N + 1))^-1/2, N being
    the number of physical layers. Mixers then set their own special parameters.
    """
    config = model.config
    cards = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=cards):
        # torch.manual_seed would seed every card of the caller's, forked or not.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[card] for card in cards)):
            generator.manual_seed(seed)
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if isinstance(module, nn.Linear):
                truncated_normal(module.weight, module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                truncated_normal(module.weight, config.dim**-0.5)
            elif reset is not None:
                reset()
        if model.rho is not None:
            nn.init.zeros_(model.rho)
        for block in model.blocks:
            for name, module in block.named_modules():
                special = getattr(module, "init_special", None)
                if special is not None:
                    special()
                into_stream = name.rpartition(".")[2] in ("o_proj", "down_proj")
                if config.global_depth_init and into_stream and isinstance(module, nn.Linear):
                    module.weight.mul_((2 * (config.n_layers + 1)) ** -0.5)


@torch.no_grad()
def init_fresh(model: LoopedLM, seed: int = 42) -> None:
    """`init_weights` of a model that was built without memory, where what a module's __init__ sets is lost.

    Raises:
        ConfigError: a parameter or buffer, of a mixer of one's own, that nothing has set, or that no checkpoint holds.
    """
    set_by_rule, saved = (nn.Linear, nn.Embedding), model.state_dict().keys()
    rest = [
        (f"{prefix}.{name}", tensor)
        for prefix, module in model.named_modules()
        if not isinstance(module, set_by_rule)
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    ]
    tensors = {name.removeprefix("."): tensor for name, tensor in rest}
    others = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
    found: list[dict[str, Tensor]] = []
    for fill in (0, 1) if others else (0,):  # integers have no NaN: those that are set are the same after either
        for tensor in tensors.values():
            tensor.fill_(math.nan if tensor.is_floating_point() else fill)
        init_weights(model, seed)
        found.append({name: tensor.clone() for name, tensor in others.items()})
    for name, tensor in tensors.items():
        if name not in saved:
            raise ConfigError(
                f"{name} is a buffer that no checkpoint holds, so a loaded model lacks it; compute it in forward"
            )
        if bool((found[0][name] != found[1][name]).any()) if name in others else bool(tensor.isnan().any()):
            raise ConfigError(
                f"{name} has no initial value: models are built without memory, so what __init__ sets is lost; set it "
                "in a method init_special"
            )


def truncated_normal(weight: Tensor, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)
