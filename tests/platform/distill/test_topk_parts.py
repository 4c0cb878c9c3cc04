"""What is stored of a teacher's top-k, and for whom: one part after another, without Ray."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill import topk
from lt2_platform.distill.topk import StoredTopK, store_top_k
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.checkpoint import load_model
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import SEQ_LEN, TOKENIZER, VOCAB, write_dataset

N = 70  # two parts
HALTS = {"n_loops": 3, "halting": {"type": "exit_gate", "threshold": 0.5}}  # a teacher runs every loop all the same


@pytest.fixture
def store(tmp_path, monkeypatch):
    """`store_top_k` of a small teacher, and (teacher, dataset, where to)."""
    data = write_dataset(tmp_path / "data", n=N)
    teacher = save(tmp_path / "teacher", model(vocab_size=VOCAB, **HALTS), tokenizer=TOKENIZER)
    each = lambda work, parts, job, parallelism, **how: (work(part, job) for part in parts)  # noqa: E731
    monkeypatch.setattr(topk, "spread", each)
    monkeypatch.setattr(topk, "some_ray", lambda parallelism: nullcontext())
    out = str(tmp_path / "out")

    def stored(**options):
        return store_top_k(**{"teacher": teacher, "data": data, "out": out, "k": 4, "batch_size": 5, **options})

    return stored, teacher, PackedDataset(data, "train"), out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("k", "final_only", "loops"), [(4, False, 3), (4, True, 1), (VOCAB, False, 3)])
def test_every_sequence_has_the_largest_logits_after_the_last_loops(store, masked, k, final_only, loops):
    stored, teacher, dataset, out = store
    shown = []
    record = stored(k=k, final_only=final_only, document_mask=masked, progress=shown.append)
    assert (record["k"], record["loops"], record["sequences"], record["seq_len"]) == (k, loops, N, SEQ_LEN)
    assert shown == [{"part": 1, "parts": 2}, {"part": 2, "parts": 2}]
    wanted = [69, 0, 64, 63]
    batch = dataset.batch(wanted)
    (found,) = StoredTopK(out, dataset, document_mask=masked).attach(iter([batch]))
    tokens, docs = torch.from_numpy(batch["tokens"])[:, :-1], torch.from_numpy(batch["doc_ids"])[:, :-1]
    net = load_model(teacher)[0].at_depth(3, halting=False)
    with torch.no_grad():
        states = net(tokens, doc_ids=docs if masked else None, per_loop=True).loops[-loops:]
        logits = torch.stack([net.logits(state) for state in states], 2)  # (B, L, T, V)
    values, ids = logits.sort(dim=-1, descending=True)
    assert np.array_equal(found["topk_ids"], ids[..., :k].int().numpy())
    expected = (values - values[..., :1])[..., :k].numpy()
    np.testing.assert_allclose(found["topk_logits"], expected, rtol=1e-3, atol=1e-3)
    assert np.array_equal(found["tokens"], batch["tokens"])


def test_what_was_begun_goes_on_and_is_of_one_teacher_and_setting(store, tmp_path, monkeypatch):
    stored, teacher, _, out = store
    write = topk.write_part

    def broken(part, job):
        if part == 1:
            raise OSError("full")
        return write(part, job)

    monkeypatch.setattr(topk, "write_part", broken)
    with pytest.raises(OSError, match="full"):
        stored()
    other = save(tmp_path / "other", model(vocab_size=VOCAB, seed=1, **HALTS), tokenizer=TOKENIZER)
    for options in ({"k": 5}, {"final_only": True}, {"document_mask": True}, {"teacher": other}):
        with pytest.raises(ConfigError, match="was started for another teacher, data or setting; use another folder"):
            stored(**options)
    first = Storage(out).fs.modified(f"{out}/part-000000.parquet")
    monkeypatch.setattr(topk, "write_part", write)
    record = stored(batch_size=64)  # how many at a time changes nothing
    assert Storage(out).fs.modified(f"{out}/part-000000.parquet") == first
    monkeypatch.setattr(topk, "write_part", broken)  # nothing is left to do
    assert stored(batch_size=1) == record
    with pytest.raises(ConfigError, match="holds the top-k of another teacher, data or setting; use another folder"):
        stored(k=5)


def test_what_cannot_be_stored_is_refused(store, tmp_path):
    stored, _, _, out = store
    with pytest.raises(ConfigError, match="k 24 exceeds the teacher's vocabulary of 23; lower it"):
        stored(k=VOCAB + 1)
    data = write_dataset(tmp_path / "theirs", n=2, tokenizer=TOKENIZER | {"sha256": "1" * 64})
    with pytest.raises(ConfigError, match="have different tokenizers; prepare the data with the teacher's"):
        stored(data=data)
    assert not Storage(out).exists("job.json")
