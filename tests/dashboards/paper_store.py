"""A store with what every producer of a paper figure writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

from .conftest import Clock

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "openbookqa", "sciq", "boolq")


def uniform(mixer: str, **fields: Any) -> dict[str, Any]:
    return {"type": "uniform", "mixer": {"type": mixer, **fields}}


def hybrid(attention: str = "full", mixer: str = "gdn", ratio: str = "1:4", **more: Any) -> dict[str, Any]:
    gate = more.pop("gate", None)
    return {"type": "hybrid", "attention": {"type": attention, "gate": gate}, "mixer": {"type": mixer},
            "ratio": ratio, "pattern": "interleave", **more}  # fmt: skip


def add(
    store: ResultsStore,
    run: str,
    layout: dict[str, Any],
    *,
    at: float,
    n_loops: int = 4,
    n_layers: int = 5,
    halting: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **evals: Any,
) -> None:
    """A finished run with `evals`: name of the evaluation -> its rows."""
    model = {"vocab_size": 300, "dim": 64, "n_layers": n_layers, "num_heads": 2}
    model |= {"n_loops": n_loops, "halting": halting, "layout": layout}
    train = {"lr": 1e-3, "global_batch_size": 2} | (train or {})
    clock = Clock(at)
    with store.create_run(run, {"config": {"model": model, "train": train}}, clock=clock) as writer:
        for step in range(1, 81):
            writer.log(step, {"loss": 3.0 + 1 / step, "grad_norm": 9.0 if step == 70 else 1.0, "tokens": 64.0 * step})
    for name, rows in evals.items():
        store.log_eval(run, name, rows)


def scores(ppl: float, accuracy: float | None, parameters: int) -> list[dict[str, Any]]:
    rows = [{"task": "perplexity", "metric": "perplexity", "value": ppl, "parameters": parameters}]
    if accuracy is not None:
        rows += [{"task": task, "metric": "acc", "value": accuracy, "parameters": parameters} for task in TASKS]
        rows += [{"task": "hellaswag", "metric": "acc_norm", "value": accuracy + 0.08, "parameters": parameters}]
    return rows


def reasoning(score: float, parameters: int) -> list[dict[str, Any]]:
    metrics = {"gsm8k": "exact_match/strict-match", "minerva_math": "math_verify", "mmlu": "acc"}
    rows = [{"task": task, "metric": metric, "value": score} for task, metric in metrics.items()]
    rows += [{"task": "gsm8k", "metric": "exact_match/flexible-extract", "value": 0.99}]
    return [row | {"parameters": parameters} for row in rows]


def cells(rates: dict[tuple[int, int], float | None]) -> list[dict[str, Any]]:
    """Throughput rows: {(batch, context): tokens/s, or None where memory ran out}."""
    return [
        {"task": "throughput", "metric": metric, "value": rate, "batch_size": batch, "context": context,
         "device": "cpu", "out_of_memory": rate is None}
        for (batch, context), rate in rates.items()
        for metric in ("prefill_tokens_per_s", "decode_tokens_per_s")
    ]  # fmt: skip


def readings(loops: int, layers: int) -> list[dict[str, Any]]:
    return [
        {"task": "diagnostics", "metric": metric, "value": 1.0 + loop * layers + layer, "loop": loop, "layer": layer,
         "mixer": "full"}
        for loop in range(loops)
        for layer in range(layers)
        for metric in ("first_token_mass", "max_abs", "rms")
    ]  # fmt: skip


def fill_paper(root: Path) -> ResultsStore:
    store = ResultsStore(Storage(str(root)))
    depth = [
        {"task": "perplexity", "metric": "perplexity", "value": 12.0 - n, "n_loops": n, "early_exit": False,
         "mean_loops": float(n), "flops_per_token": 1e6 * n} for n in (1, 2, 4)
    ]  # fmt: skip
    recall = [{"task": "swde", "metric": "contains,none", "value": 0.5},
              {"task": "niah_single_1_1024", "metric": "contains", "value": 1.0, "stderr": 0.01},
              {"task": "ruler_vt_4096", "metric": "contains", "value": 0.25, "stderr": 0.05},
              {"task": "niah_multikey_1_4096", "metric": "contains", "value": 0.75}]  # fmt: skip
    add(store, "hybrid-a", hybrid(), at=100.0, validation=scores(10.0, 0.5, 1000), depth=depth, needles=recall)
    add(store, "hybrid-b", hybrid(), at=200.0, validation=scores(11.0, None, 1000))
    add(store, "gated", hybrid(gate="elementwise"), at=300.0, validation=scores(9.0, 0.25, 1000))
    add(store, "wide", hybrid(ratio="1:1"), at=400.0, validation=scores(12.0, 0.4, 4000))
    add(store, "plain", uniform("full"), at=500.0, validation=scores(13.0, 0.3, 500) + cells(
        {(1, 1024): 50.0, (1, 2048): 40.0, (8, 1024): 20.0, (8, 2048): None}), diagnostics=readings(4, 5))  # fmt: skip
    places = [{"task": "positions", "metric": "loss", "value": 4.0 - n, "n_loops": 4, "early_exit": False, "length": 4,
               "first": 2**n // 2 + 1, "position": 2**n, "n": 10 * 2**n} for n in range(3)]  # fmt: skip
    store.log_eval("plain", "positions", places)
    masks = [{"type": "full"}, *({"type": "window", "window": window} for window in (64, 32, 16))]
    add(store, "narrowing", {"type": "loops", "mixers": masks}, at=600.0, validation=scores(10.5, None, 1000))
    stage = [
        {"task": "state_recall", "metric": "stage", "value": 2},
        {"task": "state_recall", "metric": "n_max", "value": 16},
    ]
    add(store, "recall-2", uniform("nsa"), at=700.0, n_loops=2, state_recall=stage)
    add(store, "retnet", uniform("retnet"), at=800.0)
    layers = [{"task": mixer, "metric": "us_per_token", "value": 1.0, "seq_len": length, "us_per_token": 1.0,
               "saved_bytes": 100, "decode_ms": 2.0, "cache_bytes": 50}
              for mixer in ("full", "gdn") for length in (512, 1024)]  # fmt: skip
    store.create_run("bench-mixers-1", {"config": {"dim": 64}}, clock=Clock(900.0)).close()
    store.log_eval("bench-mixers-1", "mixers", layers)
    kl = [{"task": "distillation", "metric": "teacher_kl", "value": 0.25, "teacher": "plain", "n": 10}]
    kept = {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "kept": [0]}
    student = [row | {"stderr": 0.015} if row["task"] == "piqa" else row for row in scores(26.0, 0.15, 600)]
    add(store, "student", kept, at=50.0, distillation=kl, validation=student)
    for name, size, score in (("Smol-1B", 1e9, 0.2), ("Large-4B", 4e9, 0.5)):
        run = f"eval-{name}-12345678"
        store.create_run(run, {"config": {"evaluated": f"/models/{name}"}}, clock=Clock(20.0)).close()
        store.log_eval(run, "validation", reasoning(score, int(size)))
    store.log_eval("hybrid-a", "validation", reasoning(0.4, 1000))
    store.log_eval("teacher", "validation", scores(8.0, 0.6, 2000))  # a model from elsewhere is no run
    return store
