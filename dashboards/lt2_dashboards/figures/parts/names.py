"""What metrics are called in titles, and runs and their settings where there is little room."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lt2_dashboards.queries import Snapshot
from lt2_platform.results.store import RunInfo, differences
from lt2_platform.results.tables import as_text, unit_of

MAX_TOLD = 3  # settings in a run's name, besides the number of loops
TELLS_LITTLE = ("ffn_hidden", "data.fingerprint")  # what sweeps match sizes by, and a hash
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


def told_apart(snapshot: Snapshot, runs: list[str], *, without: Collection[str] = ()) -> dict[str, str]:
    """What runs are called: by their names, several of one step also by what they differ in: "stage2-1a2b3c4d (k=8)".

    Those of the same settings differ in the weights that they begin with: "(start=stage2-1a2b3c4d)". Settings called as
    one of `without` are not told.
    """
    names: dict[str, str] = {run: run for run in runs}
    steps: dict[str, list[RunInfo]] = {}
    for run, found in snapshot.runs(runs).items():
        if "-" in run:  # others were named by somebody
            steps.setdefault(run.rpartition("-")[0], []).append(found)
    for group in steps.values():
        apart = differences({run.run_id: run.config for run in group})
        for run in group if len(group) > 1 else []:
            settings = {
                key: value
                for key, value in apart[run.run_id].items()
                if not key.startswith("sources.") and key.rpartition(".")[2] not in without
            }
            words = in_words(settings)
            loops = [word for word in words[MAX_TOLD:] if word.startswith("n_loops=")]  # what kinds leave no room for
            told = loops + words[:MAX_TOLD]
            start = run.info.get("models", {}).get("start")
            if not told and start:
                told = [f"start={str(start).removesuffix('/out').rpartition('/')[2]}"]
            names[run.run_id] = f"{run.run_id} ({', '.join(told)})" if told else run.run_id
    return names


def in_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings in few words, kinds first and those that are not set last: ["hybrid", "gdn", "ratio=1:4", "gate=null"].

    A kind says by itself what it is of; an exit gate and its objective are called alike.
    """
    names = short_names(list(settings))
    texts = {key: as_text(value) for key, value in settings.items()}
    unset = {key for key, text in texts.items() if text == "null"}
    kinds = {key for key in texts.keys() - unset if key.endswith(".type")}
    order = sorted(texts, key=lambda key: (key not in kinds, key in unset, key.endswith(TELLS_LITTLE)))
    return list(dict.fromkeys(texts[key] if key in kinds else f"{names[key]}={texts[key]}" for key in order))


def short_names(keys: list[str]) -> dict[str, str]:
    """By key its shortest ending that no other key has, as in the runs table: train.lr -> lr, layout.type as it is."""
    names = {}
    for key in keys:
        parts = key.split(".")
        first = 2 if parts[-1] in ("type", "name", "path") and len(parts) > 1 else 1  # these alone say nothing
        endings = [".".join(parts[-count:]) for count in range(first, len(parts) + 1)]
        alone = (e for e in endings if not any(k != key and (k == e or k.endswith(f".{e}")) for k in keys))
        names[key] = next(alone, key)
    return names


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
