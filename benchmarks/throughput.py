"""Prefill and decode throughput over context and batch beside transformers' generate(), and where memory ends.

python benchmarks/throughput.py cpu|cuda [--frontier] [--only gdn,full] [--out DIR] [--json FILE] [--figure FILE]
    [--storage ROOT]

cpu: small models for the trend (decode cost flat with context for GDN, growing for full attention), in minutes.
cuda: the paper's efficiency figure: four looped models of 1.3B, batch 1/2/4/8, 1k to 32k tokens, bf16.

Every cell is measured in a process of its own, ours and the peer on the same model there. Cells found in --out are not
measured again, so an interrupted run continues. --frontier also bisects, per model and batch, for the longest context
that fits. Out of memory is a result, with its phase.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.comparison import machine, print_rows, row, write_rows
from lt2.config import ModelConfig
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.evaluate.throughput.cells import Cell, frontier, measured
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.recipes.models import paper_model

FULL, GDN = {"type": "full"}, {"type": "gdn"}


@dataclass(frozen=True)
class Preset:
    """The grid, how each cell is measured, and the memory that a frontier is looked for in (GiB)."""

    models: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    decode_steps: int
    warmups: int
    repeats: int
    threads: int | None = None
    memory_gib: float | None = None
    frontier_most: int = 2**17


PRESETS = {
    "cpu": Preset(
        models=("full", "gdn", "full+gdn"),
        batches=(1, 2),
        contexts=(1024, 2048, 4096, 8192),
        device="cpu",
        dtype="float32",
        decode_steps=32,
        warmups=1,
        repeats=3,
        threads=1,
        memory_gib=1.0,
        frontier_most=2**14,
    ),
    "cuda": Preset(
        models=("looped-transformer", "gdn", "full+gdn", "gdn+dsa"),
        batches=(1, 2, 4, 8),
        contexts=tuple(1024 * 2**i for i in range(6)),
        device="cuda",
        dtype="bfloat16",
        decode_steps=128,
        warmups=3,
        repeats=5,
    ),
}


def model(preset: str, name: str, max_seq_len: int) -> ModelConfig:
    """A row of the paper's main table at 1.3B, or a small one: 4 layers, 2 loops, width 256."""
    if preset == "cuda":
        return paper_model(name, "1.3b", seq_len=max_seq_len)
    layouts = {
        "full": {"type": "uniform", "mixer": FULL},
        "gdn": {"type": "uniform", "mixer": GDN},
        "full+gdn": {"type": "hybrid", "attention": FULL, "mixer": GDN, "ratio": "1:3"},
    }
    sizes = {"vocab_size": 1024, "dim": 256, "num_heads": 4, "n_layers": 4, "n_loops": 2}
    return ModelConfig.model_validate({**sizes, "layout": layouts[name], "max_seq_len": max_seq_len})


def cell(preset: str, name: str, batch: int, context: int, *, quick: bool = False) -> Cell:
    """quick: one prefill and two decode steps, to see whether they fit."""
    grid = PRESETS[preset]
    how: dict[str, Any] = {"decode_steps": 2, "warmups": 0, "repeats": 1}
    if not quick:
        how = {"decode_steps": grid.decode_steps, "warmups": grid.warmups, "repeats": grid.repeats}
    return Cell(
        model=model(preset, name, context + how["decode_steps"] + 2),
        throughput=ThroughputConfig(batch_size=batch, context=context, **how),
        device=grid.device,
        dtype=grid.dtype,
        threads=grid.threads,
        memory_gib=grid.memory_gib if quick else None,
        peer=not quick,
    )


def kept(one: Cell, out: Path) -> dict[str, Any]:
    """The cell's result, from `out` if it is there."""
    file = out / f"{hashlib.sha256(one.model_dump_json().encode()).hexdigest()[:16]}.json"
    if not file.exists():
        found = measured(one) | {"machine": machine()}
        out.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".tmp").write_text(json.dumps({"cell": one.model_dump(mode="json"), **found}))
        file.with_suffix(".tmp").rename(file)
    return json.loads(file.read_text())


def throughput_rows(preset: str, names: list[str], out: Path) -> Iterator[dict[str, Any]]:
    grid = PRESETS[preset]
    for name in names:
        for batch in grid.batches:
            for context in grid.contexts:
                where = {"model": name, "batch": batch, "context": context}
                found = kept(cell(preset, name, batch, context), out)
                if "out_of_memory" in found:
                    yield {**where, "out_of_memory": found["out_of_memory"], "machine": found["machine"]}
                    continue
                meta = {key: value for key, value in found.items() if key not in ("cell", "peer")}
                for work in ("prefill", "decode"):
                    ours, peer = (side[f"{work}_tokens_per_s"] for side in (found, found["peer"]))
                    rate = peer["median"] if peer else float("nan")
                    size = f"{name}, batch {batch}, {context} tokens"
                    compared = row(work, size, ours["median"], found["peer"]["name"], rate, "tokens/s", "higher")
                    yield (
                        compared
                        | where
                        | {"q1": ours["q1"], "q3": ours["q3"], "measured": meta}
                        | {"machine": found["machine"]}
                    )


def frontier_rows(preset: str, names: list[str], out: Path) -> Iterator[dict[str, Any]]:
    grid = PRESETS[preset]
    for name in names:
        for batch in grid.batches:
            phases: dict[int, str] = {}

            def fits(context: int, name: str = name, batch: int = batch, phases: dict[int, str] = phases) -> bool:
                found = kept(cell(preset, name, batch, context, quick=True), out)
                if "out_of_memory" in found:
                    phases[context] = found["out_of_memory"]
                return context not in phases

            longest, failed = frontier(fits, first=grid.contexts[0], most=grid.frontier_most)
            where = {"work": "frontier", "model": name, "batch": batch, "memory_gib": grid.memory_gib}
            phase = None if failed is None else phases[failed]
            yield {**where, "longest": longest, "shortest_failed": failed, "phase": phase, "machine": machine()}


def store(root: str, preset: str, rows: list[dict[str, Any]]) -> None:
    """Keep the rows in a results store, a run per model, for the dashboard's throughput figure."""
    results = ResultsStore(Storage(root))
    for name in dict.fromkeys(r["model"] for r in rows):
        run = f"throughput-{preset}-{name.replace('+', '-')}"
        config = {"preset": preset, "model": model(preset, name, PRESETS[preset].contexts[0]).model_dump(mode="json")}
        results.create_run(run, {"config": config}).close()
        results.log_eval(run, "throughput", stored_rows([r for r in rows if r["model"] == name]))


def stored_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluation rows of one model: a value per phase and cell, or where memory ran out and in which phase."""
    found = []
    for r in rows:
        failed = r.get("out_of_memory") or (r.get("phase") if r.get("work") == "frontier" else None)
        place = {
            "task": "throughput",
            "batch_size": r["batch"],
            "context": r.get("context") or r.get("shortest_failed"),
        }
        if failed:
            gone = {"value": None, "out_of_memory": True, "phase": failed}
            found += [{**place, "metric": f"{work}_tokens_per_s", **gone} for work in ("prefill", "decode")]
        elif "ours" in r:
            extra = {key: r["measured"].get(key) for key in ("device", "dtype", "cache_bytes", "peak_memory_bytes")}
            rates = {"value": r["ours"], "q1": r["q1"], "q3": r["q3"]}
            found.append({**place, "metric": f"{r['work']}_tokens_per_s", **rates, **extra})
    return found


def figure(rows: list[dict[str, Any]], path: str) -> None:
    """Rows: batch sizes; columns: prefill, decode. A square marks the last context before memory ran out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    batches = sorted({r["batch"] for r in rows})
    _, axes = plt.subplots(len(batches), 2, figsize=(9, 2.6 * len(batches)), squeeze=False, layout="constrained")
    for line, batch in enumerate(batches):
        for column, work in enumerate(("prefill", "decode")):
            axis = axes[line][column]
            for index, name in enumerate(dict.fromkeys(r["model"] for r in rows)):
                own = [r for r in rows if (r["model"], r["batch"]) == (name, batch)]
                points = [r for r in own if r.get("work") == work]
                contexts, color = [r["context"] for r in points], f"C{index}"
                axis.plot(contexts, [r["ours"] for r in points], "o-", ms=3, color=color, label=name)
                axis.plot(contexts, [r["peer"] for r in points], ":", color=color)
                if points and any("out_of_memory" in r for r in own):
                    axis.plot(contexts[-1], points[-1]["ours"], "s", ms=9, mfc="none", color=color)
            axis.set(xscale="log", yscale="log", title=f"{work}, batch {batch}", xlabel="context", ylabel="tokens/s")
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
            axis.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            axis.set_xticks(sorted({r["context"] for r in rows if "context" in r}))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
            axis.minorticks_off()
    axes[0][0].legend(fontsize=8, title="dotted: generate()", title_fontsize=8)
    plt.savefig(path, dpi=110)
    plt.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--frontier", action="store_true")
    parser.add_argument("--only", help="models, comma-separated")
    parser.add_argument("--out", default="throughput-cells", help="where cells are kept")
    parser.add_argument("--json")
    parser.add_argument("--figure")
    parser.add_argument("--storage", help="a results store that gets the rows as well, for the dashboard")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(PRESETS[options.preset].models)
    rows = list(throughput_rows(options.preset, names, Path(options.out)))
    print_rows([r for r in rows if "ratio" in r])
    for r in rows:
        if "out_of_memory" in r:
            print(f"{r['model']}, batch {r['batch']}, {r['context']} tokens: out of memory in {r['out_of_memory']}")
    if options.figure:
        figure(rows, options.figure)
    if options.frontier:
        limits = list(frontier_rows(options.preset, names, Path(options.out)))
        for r in limits:
            end = "nothing longer was tried" if r["phase"] is None else f"{r['shortest_failed']} fails in {r['phase']}"
            print(f"{r['model']}, batch {r['batch']}: {r['longest']} tokens fit, {end}")
        rows += limits
    if options.storage:
        store(options.storage, options.preset, rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
