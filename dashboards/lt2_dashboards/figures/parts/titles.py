"""What metrics and results are called in titles and on axes."""

from __future__ import annotations

from collections.abc import Collection

from lt2_platform.results.store import RunInfo
from lt2_platform.results.tables import unit_of

TITLES = {
    "loss": "Training loss (nats per token)",
    "validation_loss": "Validation loss (nats per token)",
    "kl": "KL to the teacher (nats per token)",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_s": "Throughput (tokens/s)",
    "step_time": "Step time (s)",
    "data_wait": "Waiting for data (s per step)",
    "data_wait_fraction": "Waiting for data (fraction of the time)",
    "save_stall": "Waiting for checkpoints (s)",
    "mfu": "Model FLOPs utilisation",
    "ce": "Cross entropy (nats per token)",
    "mean_loops": "Loops per token",
    "grad_spikes": "Gradient spikes so far",
    "peak_memory_gb": "Peak memory (GB)",
    "tokens": "Tokens trained on",
}
LOOP_TITLES = {  # of metrics that end in a loop, counted from 0; titles count from 1
    "rho_norm": "Norm of rho, loop {}",
    "kl_loop": "KL to the teacher, loop {} (nats per token)",
    "align_loop": "Distance to the attention, loop {}",
}
EVALUATED = {  # metrics of evaluations; others are called as they are
    "loss": "loss (nats per token)",
    "late_loss": "late loss (nats per token)",
    "teacher_kl": "KL to the teacher (nats per token)",
    "prefill_tokens_per_s": "prefill (tokens/s)",
    "decode_tokens_per_s": "decoding (tokens/s)",
    "training_flops": "training FLOPs",
}
# Evaluations whose names tell nothing beside that of a task.
USUAL = ("validation", "training", "depth", "downstream", "sweep")


def titled(metric: str, runs: Collection[RunInfo] = ()) -> str:
    """A logged metric, or a result called name/task/metric, in words; the loss with its unit if all `runs` have it."""
    if metric == "loss" and not all(unit_of(metric, run.config) for run in runs):
        return "Training loss"
    if "/" in metric:
        return _evaluated(*metric.split("/"))
    name, _, number = metric.rpartition("_")
    if number.isdecimal() and name in LOOP_TITLES:
        return LOOP_TITLES[name].format(int(number) + 1)
    if number.isdecimal() and name == "align_layer":  # layers have the numbers that settings give them
        return f"Distance to the attention, layer {number}"
    return TITLES.get(metric, metric)


def _evaluated(name: str, *given: str) -> str:
    """E.g. "Validation perplexity", "arc_easy acc, 8 loops", "arc_easy acc (mine)"."""
    *parts, at = given if name == "depth" else (*given, "")
    task = parts[0] if len(parts) > 1 else ""
    metric = "/".join(parts[bool(task) :]).removesuffix(",none")  # lm-eval's
    subject = {"": name.capitalize(), name: "", "throughput": "", "perplexity": "Validation"}.get(task, task)
    source = f" ({name})" if task and name not in (*USUAL, task) else ""
    return f"{subject} {EVALUATED.get(metric, metric)}".strip() + source + f", {at}" * bool(at)
