"""Mixtures: exact shares, whole and partial epochs, the same bytes whatever the spread."""

import hashlib

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from lt2.config import ConfigError
from lt2_platform.data.mixture import Segment, mix, whole
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.sources.configs import MixtureConfig, SourceConfig, describe, parts_of
from lt2_platform.data.sources.listing import PIECE_BYTES


def mixture(*weights, **options):
    shares = [{"weight": weight, "source": f"{'abc'[index]}.jsonl"} for index, weight in enumerate(weights)]
    return MixtureConfig.model_validate({"sources": shares, **options})


def tokens_of(stream, source_of):
    taken = {}
    for unit, tokens in stream:
        taken[source_of[unit]] = taken.get(source_of[unit], 0) + tokens
    return taken


STREAMS = [[Segment(0, 100), Segment(1, 50)], [Segment(2, 30)], [Segment(3, 7), Segment(4, 0), Segment(5, 13)]]
SOURCE_OF = [0, 0, 1, 2, 2, 2]


def test_first_exhausted_takes_no_token_twice():
    stream, account = mix(mixture(5, 1, 4), STREAMS)
    assert tokens_of(stream, SOURCE_OF) == {0: 25, 1: 5, 2: 20}
    assert stream == [Segment(0, 25), Segment(2, 5), Segment(3, 7), Segment(4, 0), Segment(5, 13)]
    assert [one["epochs"] for one in account] == [25 / 150, 5 / 30, 1]
    assert [one["weight"] for one in account] == [0.5, 0.1, 0.4]


def test_all_exhausted_takes_every_token_and_begins_the_scarce_again():
    stream, account = mix(mixture(5, 1, 4, stopping_strategy="all_exhausted"), STREAMS)
    assert tokens_of(stream, SOURCE_OF) == {0: 150, 1: 30, 2: 120}
    assert stream[:3] == [Segment(0, 100), Segment(1, 50), Segment(2, 30)]
    assert stream[3:] == STREAMS[2] * 6
    stream, account = mix(mixture(5, 1.5, 0.3, stopping_strategy="all_exhausted"), STREAMS)
    assert tokens_of(stream, SOURCE_OF) == {0: 333, 1: 100, 2: 20}
    assert stream[2:6] == [Segment(0, 100), Segment(1, 50), Segment(0, 33), Segment(2, 30)]
    assert account[1]["epochs"] == 100 / 30


def test_without_weights_every_source_is_taken_once():
    stream, account = mix(mixture(None, None, None), STREAMS)
    assert stream == [segment for source in STREAMS for segment in source]
    assert [one["epochs"] for one in account] == [1, 1, 1]
    assert [one["weight"] for one in account] == [0.75, 0.15, 0.1]
    assert describe(mixture(None, None)) == "a.jsonl + b.jsonl"
    assert describe(mixture(1, 3)) == "25% a.jsonl + 75% b.jsonl"
    with pytest.raises(ValidationError, match="give a weight to every source, or to none to take each once"):
        mixture(1, None)
    with pytest.raises(ValidationError, match="on_the_fly does not know how many tokens a source has; give every"):
        PrepareConfig(source=mixture(None, None), tokenize="on_the_fly")


def test_shares_are_exact_whatever_the_weights():
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.uniform(0.001, 10, 3)
        counts = [int(count) for count in rng.integers(1, 10**12, 3)]
        streams = [[Segment(index, count)] for index, count in enumerate(counts)]
        _, account = mix(mixture(*weights), streams)
        taken = [one["tokens"] for one in account]
        assert all(mine <= there for mine, there in zip(taken, counts, strict=True))
        assert any(mine == there for mine, there in zip(taken, counts, strict=True))
        total = min(count / weight for count, weight in zip(counts, weights, strict=True))
        assert np.allclose(taken, total * weights, rtol=1e-9, atol=1)


def test_a_source_without_tokens_is_named():
    with pytest.raises(ConfigError, match=r"^the mixture's source b\.jsonl has no training tokens; drop it$"):
        mix(mixture(1, 1), [[Segment(0, 5)], [Segment(1, 0)]])
    assert whole([{"unit": 3, "tokens": {"train": 4}}], "validation") == [Segment(3, 0)]


def test_mixtures_do_not_nest():
    inner = {"type": "mixture", "sources": [{"weight": 1, "source": "x"}, {"weight": 1, "source": "y"}]}
    outer = SourceConfig.read({"type": "mixture", "sources": [{"weight": 1, "source": inner}] * 2})
    with pytest.raises(ConfigError, match="a mixture inside a mixture; list its sources in the outer one"):
        parts_of(outer)


def rows(out, column="tokens"):
    tables = [pq.read_table(path) for path in sorted((out / "train").iterdir())]
    return np.concatenate([np.stack(table[column].to_numpy()) for table in tables])


def digests(out):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*/*.parquet"))}


def test_a_prepared_mixture(three, tmp_path, no_ray, monkeypatch):
    manifest = prepare(PrepareConfig.model_validate(three), str(tmp_path / "out"))
    by_name = {one["source"].rsplit("/", 1)[-1]: one["tokens"] for one in manifest["mixture"]}
    assert by_name == {"letters.jsonl": 7204, "digits.txt": 3602, "chat.jsonl": 3602}  # the digits run out first
    stream = rows(tmp_path / "out").reshape(-1)
    kinds = {"letters": b"abc", "digits": b"0123456789\n"}
    assert abs(int(np.isin(stream, list(kinds["letters"])).sum()) - 7204) < 40
    assert int(np.isin(stream[7204 : 7204 + 3602], list(kinds["digits"])).sum()) == 3600
    assert manifest["splits"]["train"]["tokens"] == sum(by_name.values()) // 32 * 32

    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    prepare(PrepareConfig.model_validate(three), str(tmp_path / "again"))
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


def test_a_finished_mixture_is_of_its_weights(three, tmp_path, no_ray):
    prepare(PrepareConfig.model_validate(three), str(tmp_path / "out"))
    three["source"]["sources"][0]["weight"] = 3
    with pytest.raises(ConfigError, match="holds a dataset of other input or settings"):
        prepare(PrepareConfig.model_validate(three), str(tmp_path / "out"))
