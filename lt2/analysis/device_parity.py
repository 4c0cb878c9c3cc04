"""A mixer's path on a device (CUDA's kernels, say) against the same layer in fp64 on the PyTorch path: forward,
gradients, packing, decoding. The fp64 path itself is checked against token-by-token oracles in the test suite.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from lt2.config import ModelConfig
from lt2.decode import DecodeStep
from lt2.model import LoopedLM, build

# fp32 runs on tf32 tensor cores inside the Triton kernels; a loop of two and a head pass errors on.
LIMITS = {"float32": 5e-3, "bfloat16": 3e-2}
GRADIENT_LIMITS = {"float32": 1e-2, "bfloat16": 8e-2}

# A top-k over rounded scores may select other blocks than the exact one: a jump, not an accumulation of rounding.
SELECTING = {"nsa", "dsa"}
SELECTING_FACTOR = 5.0

DRAWS = 4
"""Batches of which the best conditioned is compared, see `drawn`."""

SMALL: dict[str, dict[str, Any]] = {
    "window": {"window": 48},
    "nsa": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64},
    "dsa": {"top_k": 32},
    "mla": {"kv_rank": 64},
}


def relative(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def tiny_model(mixer: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=128,
        dim=256,
        num_heads=2,
        n_layers=1,
        n_loops=2,
        layout={"type": "uniform", "mixer": {"type": mixer, **SMALL.get(mixer, {})}},  # type: ignore[arg-type]
        max_seq_len=1024,
    )


def outputs(model: LoopedLM, ids: Tensor, weight: Tensor, doc_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Hidden states of a training pass and the gradients of a fixed projection of them."""
    model.zero_grad()
    hidden = model(ids, doc_ids=doc_ids).hidden
    (hidden * weight.to(hidden.dtype)).sum().backward()
    gradient = torch.cat([p.grad.flatten().double() for p in model.blocks.parameters() if p.grad is not None])
    return {"forward": hidden.detach(), "gradient": gradient}


def drawn(
    oracle: LoopedLM, weight: Tensor, cases: dict[str, Tensor | None]
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """The batch, of DRAWS random ones, with the smallest gradient in fp64, and the oracle's outputs for it by case.

    A document's first token has the output (q·k) v, and RetNet, GLA and DeltaNet normalise it: where q·k is nearly 0,
    its sign, and with it the output's, is a matter of rounding in whatever arithmetic, and the gradient is huge.
    """
    found = []
    for _ in range(DRAWS):
        ids = torch.randint(128, weight.shape[:2], device=weight.device)
        exact = {case: outputs(oracle, ids, weight, doc_ids) for case, doc_ids in cases.items()}
        found.append((ids, exact))
    return min(found, key=lambda draw: sum(float(out["gradient"].norm()) for out in draw[1].values()))


@torch.no_grad()
def decoded(model: LoopedLM, ids: Tensor, n_prefill: int) -> Tensor:
    """Hidden states of a prefill and token-by-token steps."""
    cache = model.init_cache(len(ids), ids.shape[1])
    parts = [model(ids[:, :n_prefill], cache=cache).hidden]
    parts += [model(ids[:, t : t + 1], cache=cache).hidden for t in range(n_prefill, ids.shape[1])]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def replayed(model: LoopedLM, ids: Tensor, n_prefill: int) -> tuple[Tensor, bool]:
    """Logits of the same steps through `DecodeStep`, and whether it could record them."""
    cache = model.init_cache(len(ids), ids.shape[1])
    model(ids[:, :n_prefill], cache=cache)
    step = DecodeStep(model, cache)
    logits = [step(ids[:, t]).clone() for t in range(n_prefill, ids.shape[1])]
    return torch.stack(logits, dim=1), step.recording is not None


def check(mixer: str, dtype: torch.dtype, length: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of {mixer, dtype, case, what, error, limit, ok}; an error is ‖out - ref‖ / ‖ref‖.

    mixer: the `type` of a registered one. length: of the sequences, in tokens, at least 17.
    """
    torch.manual_seed(0)
    model = build(tiny_model(mixer), seed=1, device=device)
    torch.nn.init.normal_(model.rho, std=0.3)  # type: ignore[arg-type]
    model = model.to(dtype)
    oracle = copy.deepcopy(model).double()
    weight = torch.randn(2, length, 256, device=device, dtype=torch.float64)
    doc_ids = (torch.arange(length, device=device) * 3 // length)[None].repeat(2, 1)
    cases = {"whole": None, "packed": doc_ids}
    ids, exact = drawn(oracle, weight, cases)
    name = str(dtype).removeprefix("torch.")
    rows = []
    for case, documents in cases.items():
        ours, ref = outputs(model, ids, weight, documents), exact[case]
        for what, limit in (("forward", LIMITS[name]), ("gradient", GRADIENT_LIMITS[name])):
            rows.append((case, what, relative(ours[what], ref[what]), limit))
    full = oracle(ids).hidden.detach()
    rows.append(("decode", "forward", relative(decoded(model, ids, length - 16), full), LIMITS[name]))
    logits, recorded = replayed(model, ids, length - 16)
    case = "decode, replayed" if recorded else "decode, not recorded"
    rows.append((case, "logits", relative(logits, oracle.logits(full[:, -16:]).detach()), LIMITS[name]))
    slack = SELECTING_FACTOR if mixer in SELECTING and dtype == torch.bfloat16 else 1.0
    return [row(mixer, name, case, what, error, limit * slack) for case, what, error, limit in rows]


def row(mixer: str, dtype: str, case: str, what: str, error: float, limit: float) -> dict[str, Any]:
    return {
        "mixer": mixer, "dtype": dtype, "case": case, "what": what, "error": error, "limit": limit,
        "ok": bool(error <= limit),
    }  # fmt: skip
