"""What sequence length costs: attention FLOPs and decode cache from the accounting, and whole layers as measured."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import ValidationError

from lt2.config import ConfigError, ModelConfig
from lt2.layout import layout
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.series import Panel, at_length, by_length, line, panels
from lt2_dashboards.figures.parts.store import architecture, known_runs, rows_of
from lt2_dashboards.queries import Source
from lt2_platform.results.flops import why

LENGTHS = [2**power for power in range(10, 21)]  # 1k to 1M tokens
ITEMSIZE = {"compute": 2, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1}
OWN = 4  # architectures of the store drawn by themselves

_FULL, _GDN, _DSA = {"type": "full"}, {"type": "gdn"}, {"type": "dsa"}
PAPER_LAYOUTS: dict[str, dict[str, Any]] = {
    "Looped Transformer": {"type": "uniform", "mixer": _FULL},
    "Looped GDN": {"type": "uniform", "mixer": _GDN},
    "Looped Hybrid (Full+GDN)": {"type": "hybrid", "attention": _FULL, "mixer": _GDN, "ratio": "1:4"},
    "Looped Hybrid (GDN+DSA)": {"type": "hybrid", "attention": _DSA, "mixer": _GDN, "ratio": "1:4"},
}


def cost_vs_length(source: Source, *, runs: list[str] | None = None) -> Figure:
    """FLOPs of the token mixers and bytes of the decode cache (bf16) of one sequence, by its length.

    Computed, not measured: from the accounting, for the paper's four candidates at its 1.3B sizes (d = 2048, 20 layers,
    T = 4; T = 1 for the Transformer) and for runs of this store (default: its newest architectures).
    """
    reference = {"Transformer": paper_model("Looped Transformer", n_loops=1)}
    reference |= {name: paper_model(name, n_loops=4) for name in PAPER_LAYOUTS}
    ours, problems = own_models(source, runs)
    flops = Panel("token mixers, forward FLOPs per sequence", by_length("tokens", LENGTHS), {"type": "log"})
    cache = Panel("decode cache per sequence (bf16)", by_length("tokens", LENGTHS), {"type": "log", "bytes": True})
    rows: list[list[Any]] = []
    entries = [(name, "paper's sizes, computed", model) for name, model in reference.items()]
    entries += [(run, "this store, computed", model) for run, model in ours.items()]
    for position, (name, origin, model) in enumerate(entries):
        spent = [length * mixing_flops(model, length) for length in LENGTHS]
        kept = [cache_bytes(model, length) for length in LENGTHS]
        rows += [[name, origin, length, f, c] for length, f, c in zip(LENGTHS, spent, kept)]
        style = {"lineStyle": {"type": "dashed"}} if name in reference else {}
        for panel, values in ((flops, spent), (cache, kept)):
            data = [[at_length(length), rounded(value)] for length, value in zip(LENGTHS, values)]
            panel.series.append(line(name, data, position, showSymbol=False, **style))
    notes = [
        "Dashed: the paper's 1.3B sizes. Projections, FFN and head are left out: they do not depend on the length.",
        "Paper: Figure 2 draws this for the 1.3B model without printing numbers.",
        *problems,
    ]
    columns = ["model", "source", "tokens", "FLOPs", "cache (bytes)"]
    return Figure("FLOPs and cache by length", panels([flops, cache], columns=2), columns, lambda: rows, notes)


def mixing_flops(model: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs per token of mixing over the sequence, over all (loop, layer)."""
    return sum(mixer.sequence_flops(model.dims, seq_len) for loop in layout(model) for mixer in loop)


def cache_bytes(model: ModelConfig, seq_len: int) -> int:
    """Bytes of a bf16 decode cache of one sequence, as lt2.analysis.accounting counts them but without torch."""
    specs = [mixer.cache_spec(model.dims, seq_len) for loop in layout(model) for mixer in loop]
    return sum(prod(shape) * ITEMSIZE[kind] for spec in specs for shape, kind in spec.values())


def paper_model(given: str | dict[str, Any], *, n_loops: int) -> ModelConfig:
    """The paper's 1.3B with a layout, or with that of one of its candidates by name."""
    mixing = PAPER_LAYOUTS[given] if isinstance(given, str) else given
    sizes = {"vocab_size": 128_256, "dim": 2048, "n_layers": 20, "num_heads": 16, "n_loops": n_loops}
    return ModelConfig.model_validate({**sizes, "layout": mixing, "tie_embeddings": True, "max_seq_len": LENGTHS[-1]})


def own_models(source: Source, runs: list[str] | None) -> tuple[dict[str, ModelConfig], list[str]]:
    """{run: its model}, and what could not be read: a store may have mixers that this process does not know."""
    snapshot = source.snapshot()
    if runs is None:
        newest = snapshot.query("SELECT run FROM runs ORDER BY created DESC, run LIMIT 200")
        infos, limit = snapshot.runs([run for (run,) in newest]), OWN
    else:
        infos, limit = known_runs(snapshot, runs), len(runs)
    found: dict[str, ModelConfig] = {}
    problems: list[str] = []
    seen = set()
    for run, info in infos.items():
        kind = architecture(info.config)
        if len(found) == limit or kind is None or (runs is None and kind.title in seen):
            continue
        seen.add(kind.title)
        given = info.config.get("model", info.config)
        fields = {key: value for key, value in given.items() if key in ModelConfig.model_fields and value is not None}
        try:
            model = ModelConfig.model_validate({"vocab_size": 1, **fields, "max_seq_len": LENGTHS[-1]})
            for measure in (mixing_flops, cache_bytes):  # a mixer may lack what these need
                measure(model, LENGTHS[0])
        except (ValidationError, ConfigError, TypeError) as error:
            problems.append(f"{run} is left out: {why(error)}")
            continue
        found[run] = model
    return found, problems


def layer_cost(source: Source, *, what: Literal["training", "decoding"] = "training") -> Figure:
    """Whole mixer layers as measured by `lt2 bench mixers`: time per token and memory, by sequence length.

    `training` is a forward and backward pass, `decoding` one token after so many cached ones.
    """
    time, memory = ("us_per_token", "saved_bytes") if what == "training" else ("decode_ms", "cache_bytes")
    titles = ("µs per token", "kept for backward (bytes)") if what == "training" else ("ms per token", "cache (bytes)")
    found = [(run, row) for run, row in rows_of(source.snapshot(), "e.name = 'mixers'") if row.get("seq_len")]
    tokens = by_length("tokens", [row["seq_len"] for _, row in found])
    left, right = (Panel(title, tokens, {"type": "log", "bytes": title.endswith("(bytes)")}) for title in titles)
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run, row in found:
        lines.setdefault((run, str(row.get("task"))), []).append(row)
    newest = list(dict.fromkeys(run for run, _ in lines))[:3]
    drawn = {key: rows for key, rows in lines.items() if key[0] in newest}
    mixers = list(dict.fromkeys(mixer for _, mixer in drawn))
    table: list[list[Any]] = []
    for (run, mixer), rows in drawn.items():
        measured = {row["seq_len"]: row for row in rows}
        name = mixer if len(newest) == 1 else f"{mixer}, {run}"
        dash = {"type": ("solid", "dashed", "dotted")[newest.index(run)]}
        for panel, key in ((left, time), (right, memory)):
            data = [[at_length(n), rounded(row.get(key))] for n, row in sorted(measured.items())]
            panel.series.append(line(name, data, mixers.index(mixer), showSymbol=True, symbolSize=5, lineStyle=dash))
        table += [
            [run, mixer, n, row.get(time), row.get(memory), "yes" if row.get("out_of_memory") else ""]
            for n, row in sorted(measured.items())
        ]
    nothing = {"series": [], "empty": "No layers have been measured in this store yet."}
    option = panels([left, right], columns=2) if drawn else nothing
    columns = ["run", "mixer", "tokens", titles[0], titles[1], "out of memory"]
    notes = ["The newest three measurements of this store; their settings are those of the runs."]
    produce = "" if drawn else "lt2 bench mixers --storage ROOT"
    return Figure(f"Mixer layers, {what}", option, columns, lambda: table, notes, produce=produce)
