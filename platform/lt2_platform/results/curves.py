"""Metric rows and downsampled curves as Arrow tables: pure functions, no storage.

Rows are long: one (step, time, metric, value) per logged number. A curve keeps at most MAX_POINTS buckets per metric.
Bucket widths are powers of two and buckets start at multiples of their width, so a curve can be extended by new rows
without reading the old ones again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MAX_POINTS = 2_000

ROWS = pa.schema([("step", pa.int64()), ("time", pa.float64()), ("metric", pa.string()), ("value", pa.float64())])
CURVES = pa.schema(
    [
        ("metric", pa.string()),
        ("width", pa.int64()),  # steps per bucket
        ("step", pa.int64()),  # last step in the bucket
        ("time", pa.float64()),  # unix seconds of that step
        ("count", pa.int64()),  # finite values in the bucket
        ("nonfinite", pa.int64()),  # NaN and infinities, which min, mean and max leave out
        ("min", pa.float64()),
        ("mean", pa.float64()),
        ("max", pa.float64()),
        ("last", pa.float64()),  # value at `step`, finite or not
    ]
)


def rows_table(rows: Iterable[tuple[int, float, str, float]]) -> pa.Table:
    """(step, unix seconds, metric, value) tuples as a ROWS table."""
    columns = list(zip(*rows)) or [[], [], [], []]
    return pa.table([pa.array(list(c), field.type) for c, field in zip(columns, ROWS)], schema=ROWS)


def encode(table: pa.Table, metadata: Mapping[str, Any] | None = None) -> bytes:
    """Parquet bytes; `metadata` values travel as JSON in the schema."""
    extra = {f"lt2.{key}": json.dumps(value) for key, value in (metadata or {}).items()}
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(extra), buffer, compression="zstd")
    return buffer.getvalue()


def read_parquet(data: bytes) -> pa.Table:
    """The table of a small file. Here and now: `pq.read_table` reads in threads of Arrow's whatever it is told, and one
    that lets go of Python's bytes while Python ends aborts the process."""
    return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)


def decode(data: bytes, schema: pa.Schema) -> tuple[pa.Table, dict[str, Any]]:
    """(table cast to `schema`, metadata). Raises ValueError on anything that is not such a file."""
    try:
        table = read_parquet(data)
        extra = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items() if k.startswith(b"lt2.")}
        metadata = {key.removeprefix("lt2."): json.loads(value) for key, value in extra.items()}
        return table.select(schema.names).replace_schema_metadata(None).cast(schema), metadata
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def last_written(rows: pa.Table) -> pa.Table:
    """One row per (metric, step), the last in table order, sorted by metric and step.

    A resumed run logs again the steps it replays; parts are concatenated in the order they were written.
    """
    if rows.num_rows == 0:
        return rows
    encoded = rows["metric"].combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    rank = np.argsort(np.argsort(names, kind="stable"), kind="stable")
    metric = rank[encoded.indices.to_numpy(zero_copy_only=False)]
    step = rows["step"].to_numpy()
    order = np.lexsort((step, metric))  # stable: equal keys stay in write order
    metric, step = metric[order], step[order]
    is_last = np.append((metric[1:] != metric[:-1]) | (step[1:] != step[:-1]), True)
    return rows.take(pa.array(order[is_last]))


def downsample(rows: pa.Table, *, max_points: int = MAX_POINTS) -> pa.Table:
    """A CURVES table of `rows`: for each metric the narrowest bucket width that needs at most `max_points` buckets."""
    rows = last_written(rows)
    value = rows["value"].to_numpy()
    finite = np.isfinite(value)
    single = pa.table(
        {
            "metric": rows["metric"],
            "width": np.ones(len(value), np.int64),
            "step": rows["step"],
            "time": rows["time"],
            "count": finite.astype(np.int64),
            "nonfinite": (~finite).astype(np.int64),
            **dict.fromkeys(("min", "mean", "max"), np.where(finite, value, np.nan)),
            "last": value,
        },
        schema=CURVES,
    )
    return refit(single, max_points)


def extend(curves: pa.Table, rows: pa.Table) -> pa.Table | None:
    """`curves` with newer `rows` folded in, or None if `rows` replays steps that `curves` has already merged.

    None means: read every part again and `downsample` them, because a bucket cannot forget one of its values.
    """
    if rows.num_rows == 0:
        return curves
    ends = dict(zip(*(c.to_pylist() for c in _by_metric(curves, "max").columns)))
    starts = dict(zip(*(c.to_pylist() for c in _by_metric(rows, "min").columns)))
    if any(start <= ends.get(metric, -1) for metric, start in starts.items()):
        return None
    return refit(pa.concat_tables([curves, downsample(rows)]), MAX_POINTS)


def _by_metric(table: pa.Table, how: str) -> pa.Table:
    return table.group_by("metric").aggregate([("step", how)]).select(["metric", f"step_{how}"])


def refit(curves: pa.Table, max_points: int) -> pa.Table:
    """The same curves with wider buckets where a metric has more than `max_points` of them, sorted by metric and step.

    Each metric's buckets are merged at the smallest power-of-two width that fits.
    """
    pieces = []
    for metric in sorted(curves["metric"].unique().to_pylist()):
        piece = curves.filter(pc.field("metric") == metric).sort_by("step")
        step, width = piece["step"].to_numpy(), int(piece["width"].to_numpy().max())
        while len(np.unique(step // width)) > max_points:
            width *= 2
        pieces.append(_merge(piece, metric, width))
    return pa.concat_tables(pieces) if pieces else CURVES.empty_table()


def _merge(piece: pa.Table, metric: str, width: int) -> pa.Table:
    columns = {name: piece[name].to_numpy() for name in CURVES.names[2:]}
    bucket = columns["step"] // width
    starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
    ends = np.append(starts[1:], len(bucket)) - 1
    count = np.add.reduceat(columns["count"], starts)
    weighted = np.where(columns["count"] > 0, columns["mean"] * columns["count"], 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        # A lone value passes through untouched: value * 1 / 1 is exact, value * n / n may not be.
        mean = np.where(count > 0, np.add.reduceat(weighted, starts) / count, np.nan)
    return pa.table(
        {
            "metric": [metric] * len(starts),
            "width": np.full(len(starts), width, np.int64),
            "step": columns["step"][ends],
            "time": columns["time"][ends],
            "count": count,
            "nonfinite": np.add.reduceat(columns["nonfinite"], starts),
            "min": np.fmin.reduceat(columns["min"], starts),
            "mean": mean,
            "max": np.fmax.reduceat(columns["max"], starts),
            "last": columns["last"][ends],
        },
        schema=CURVES,
    )
