"""Curves: downsampled, extended, encoded and read back, without a store."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from lt2_platform.results.curves import MAX_POINTS, ROWS, decode, downsample, encode, extend, last_written, rows_table


def table(points: dict[str, list[tuple[int, float]]]) -> pa.Table:
    return rows_table((s, float(s), m, v) for m, series in points.items() for s, v in series)


def test_short_series_pass_through_downsampling_exactly():
    series = [(step, 0.1 * step) for step in range(MAX_POINTS)]
    curve = downsample(table({"loss": series}))
    for name in ("min", "mean", "max", "last"):
        assert curve[name].to_pylist() == [value for _, value in series]
    assert set(curve["width"].to_pylist()) == {1}


def test_buckets_hold_min_mean_max_of_their_steps():
    rng = np.random.default_rng(0)
    steps = np.arange(100_000)
    data = rng.normal(size=len(steps))
    curve = downsample(table({"loss": list(zip(steps.tolist(), data.tolist())), "val": [(0, 1.0), (99_999, 2.0)]}))
    loss = curve.filter(pa.compute.field("metric") == "loss")
    assert loss.num_rows <= MAX_POINTS
    width = loss["width"][0].as_py()
    assert width == 64  # the smallest power of two with at most 2,000 buckets
    bucket = data[5 * width : 6 * width]
    row = loss.slice(5, 1).to_pylist()[0]
    assert (row["min"], row["max"], row["last"], row["count"]) == (bucket.min(), bucket.max(), bucket[-1], width)
    assert row["mean"] == pytest.approx(bucket.mean(), rel=1e-12)
    val = curve.filter(pa.compute.field("metric") == "val")
    assert val["step"].to_pylist() == [0, 99_999]  # a sparse metric keeps its own width


def test_nonfinite_values_are_counted_and_do_not_hide_the_others():
    series = [(s, 1.0) for s in range(4000)]
    series[10] = (10, math.nan)
    series[11] = (11, math.inf)  # with the one before a bucket
    series[15] = (15, math.nan)  # in one with a finite value
    curve = downsample(table({"loss": series}))
    assert sum(curve["nonfinite"].to_pylist()) == 3
    mean, count = curve["mean"].to_numpy(), curve["count"].to_numpy()
    assert sum(count) == 3997
    assert set(mean[count > 0]) == {1.0}
    assert np.isnan(mean[count == 0]).all()


@pytest.mark.parametrize("cuts", [[100], [2_000], [1, 2, 3], [500, 4_000, 4_001, 9_999], list(range(250, 20_000, 250))])
def test_extending_equals_downsampling_everything(cuts):
    rng = np.random.default_rng(1)
    points = [(step, float(rng.normal())) for step in range(20_000)]
    points[77] = (77, math.nan)
    edges = [0, *cuts, len(points)]
    curve = downsample(table({"loss": points[: edges[1]]}))
    for start, stop in zip(edges[1:], edges[2:]):
        curve = extend(curve, table({"loss": points[start:stop], "val": [(start, 1.0)]}))
        assert curve is not None
    whole = downsample(table({"loss": points, "val": [(e, 1.0) for e in edges[1:-1]]}))
    for name in whole.column_names:
        np.testing.assert_allclose(
            whole[name].to_numpy(), curve[name].to_numpy(), rtol=1e-12
        ) if name != "metric" else None
    assert whole["metric"].to_pylist() == curve["metric"].to_pylist()


def test_replayed_steps_cannot_extend_a_curve():
    curve = downsample(table({"loss": [(0, 1.0), (1, 1.0)]}))
    assert extend(curve, table({"loss": [(1, 2.0)]})) is None
    assert extend(curve, ROWS.empty_table()) is curve


def test_last_written_keeps_one_row_per_metric_and_step():
    rows = rows_table([(1, 0.0, "b", 1.0), (0, 0.0, "b", 2.0), (1, 1.0, "b", 3.0), (1, 2.0, "a", 4.0)])
    assert last_written(rows).to_pylist() == [
        {"step": 1, "time": 2.0, "metric": "a", "value": 4.0},
        {"step": 0, "time": 0.0, "metric": "b", "value": 2.0},
        {"step": 1, "time": 1.0, "metric": "b", "value": 3.0},
    ]


def test_decode_refuses_other_files():
    other = encode(pa.table({"x": [1]}))
    with pytest.raises(ValueError, match="step"):
        decode(other, ROWS)
    with pytest.raises(ValueError, match=r"\S"):
        decode(b"PAR1", ROWS)
    rows, metadata = decode(encode(table({"a": [(1, 2.0)]}), {"covered": {"w": 3}}), ROWS)
    assert metadata == {"covered": {"w": 3}}
    assert rows.schema == ROWS


THREADS = """
import os
from lt2_platform.results.curves import ROWS, decode, encode, rows_table
data = encode(rows_table([(1, 1.0, "loss", 0.5)]))
before = set(os.listdir("/proc/self/task"))
assert decode(data, ROWS)[0].num_rows == 1
print(len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_reading_leaves_no_thread_that_could_outlive_a_short_command():
    assert subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True).stdout == "0\n"
