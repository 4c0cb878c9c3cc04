"""The programs of state-based recall: swaps of pointers into a list of bits, and the order in which they are learned.

    bits = [b0, b1, …]            m bits
    a, b, c, d, e = 3, 0, 7, …    five different indices
    a, c = c, a;                  n times: a swap of two variables,
    assert bits[a] == ?           and what `a` then points at; only this is learned

Needs nothing but lt2. Shapes: B programs, L tokens, n swaps. A size is (bits, swaps).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lt2.model import LoopedLM
from lt2.train.config import TrainConfig
from lt2.train.loop import Batch, TrainState, train
from lt2.train.loss import next_token_objective
from lt2_platform.evaluate.config import RECALL_WORDS, StateRecallConfig

WORDS = ["<pad>", "bits", "=", "[", "]", ",", ";", "\n", "assert", "==", "a", "b", "c", "d", "e", "bit0", "bit1"]
ID = {word: index for index, word in enumerate(WORDS)}
VARIABLES, BIT, NUMBER = ID["a"], ID["bit0"], RECALL_WORDS
EVALUATION = 2**40  # "step" of the evaluation programs: never one of training


def programs(n_bits: int, n_swaps: int, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """`count` programs; the paper's stages have as many swaps as bits.

    Returns: tokens (B, L) int64; asked (B, n) int64, the place of every `?` (its bit stands there); moved (B, n) bool,
    whether `a` was in the swap before it.
    """
    bits = rng.integers(0, 2, (count, n_bits))
    pointers = rng.permuted(np.tile(np.arange(n_bits), (count, 1)), axis=1)[:, :5]
    first = rng.integers(0, 5, (count, n_swaps))
    second = (first + rng.integers(1, 5, (count, n_swaps))) % 5

    row = np.arange(count)
    columns: list[np.ndarray] = []
    put = lambda text: columns.extend(np.full(count, ID[word]) for word in text.split(" "))  # noqa: E731

    put("bits = [")
    for i in range(n_bits):
        columns.append(BIT + bits[:, i])
        put("," if i < n_bits - 1 else "]")
    put("\n")
    put("a , b , c , d , e =")
    for i in range(5):
        columns.append(NUMBER + pointers[:, i])
        put("," if i < 4 else "\n")
    asked, answers = [], []
    for swap in range(n_swaps):
        x, y = first[:, swap], second[:, swap]
        for name, sign in ((x, ","), (y, "="), (y, ","), (x, ";")):
            columns.append(VARIABLES + name)
            put(sign)
        put("\n")
        pointers[row, x], pointers[row, y] = pointers[row, y], pointers[row, x]
        put("assert bits [ a ] ==")
        asked.append(len(columns))
        answers.append(BIT + bits[row, pointers[:, 0]])
        columns.append(answers[-1])
        put("\n")
    places = np.tile(np.array(asked), (count, 1))
    return {"tokens": np.stack(columns, 1), "asked": places, "moved": (first == 0) | (second == 0)}


def read(tokens: np.ndarray) -> str:
    """One program as text."""
    words = [WORDS[token] if token < NUMBER else str(token - NUMBER) for token in tokens]
    return " ".join(words).replace(" \n ", "\n").removesuffix(" \n")


def batches(config: StateRecallConfig, size: tuple[int, int], step: int) -> Iterator[Batch]:
    """Training batches from `step` on; each a function of the seed, the size and its step."""
    while True:
        made = programs(*size, config.batch_size, np.random.default_rng([config.seed, *size, step]))
        tokens = torch.from_numpy(made["tokens"])
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask.scatter_(1, torch.from_numpy(made["asked"]), True)
        yield Batch(tokens, loss_mask=mask)
        step += 1


@torch.inference_mode()
def accuracy(
    model: LoopedLM, size: tuple[int, int], *, examples: int, seed: int, batch_size: int = 32
) -> dict[str, float]:
    """Shares of right answers: of all asserts, of each program's last, and of those right after `a` moved."""
    device = model.embed.weight.device
    model.eval()
    made = programs(*size, examples, np.random.default_rng([seed, *size, EVALUATION]))
    hits = []
    for start in range(0, examples, batch_size):
        tokens = torch.from_numpy(made["tokens"][start : start + batch_size]).to(device)
        asked = torch.from_numpy(made["asked"][start : start + batch_size]).to(device)
        hidden = model(tokens[:, :-1]).hidden
        before = hidden.gather(1, (asked - 1)[..., None].expand(-1, -1, hidden.shape[-1]))  # (B, n, D)
        hits.append((model.logits(before).argmax(-1) == tokens.gather(1, asked)).cpu().numpy())
    right = np.concatenate(hits)
    return {
        "all": float(right.mean()),
        "final": float(right[:, -1].mean()),
        "moved": float(right[made["moved"]].mean()) if made["moved"].any() else float("nan"),
    }


def practise(
    config: StateRecallConfig,
    model: LoopedLM,
    optimizer: torch.optim.Optimizer,
    size: tuple[int, int],
    state: TrainState,
    steps: int,
) -> tuple[TrainState, dict[str, Any]]:
    """Train `steps` steps on programs of `size`, in place.

    Returns the state and an entry of a history: {n (bits), swaps, step, loss, all, final, moved}.
    """
    on_gpu = model.embed.weight.is_cuda
    state = train(
        model,
        next_token_objective(),
        batches(config, size, state.step),
        optimizer,
        lambda step: config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps)),
        TrainConfig(
            steps=state.step + steps,
            global_batch_size=config.batch_size,
            lr=config.lr,
            log_every=config.eval_every,
            precision="auto" if on_gpu else "fp32",
        ),
        state,
    )
    scores = accuracy(model, size, examples=config.eval_examples, seed=config.seed, batch_size=config.batch_size)
    return state, {"n": size[0], "swaps": size[1], "step": state.step, "loss": state.loss, **scores}


def current(config: StateRecallConfig, history: list[dict[str, Any]]) -> tuple[tuple[int, int], int] | None:
    """The size to train on next, and for how many steps; None when the last stage is passed or a size's are used up."""
    passed = sizes_passed(config, history)
    left = [size for size in config.curriculum if size not in passed]
    if not left:
        return None
    evaluations = sum((entry["n"], entry["swaps"]) == left[0] for entry in history)
    steps = min(config.eval_every, config.max_steps - evaluations * config.eval_every)
    return (left[0], steps) if steps > 0 else None


def n_max(config: StateRecallConfig, history: list[dict[str, Any]]) -> int:
    """The largest stage passed; 0 if not even the first is."""
    passed = sizes_passed(config, history)
    return max((n for n in config.stages if (n, n) in passed), default=0)


def sizes_passed(config: StateRecallConfig, history: list[dict[str, Any]]) -> set[tuple[int, int]]:
    return {(entry["n"], entry["swaps"]) for entry in history if entry["all"] >= config.threshold}
