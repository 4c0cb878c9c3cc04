"""A teacher's stored top-k against asking the teacher."""

import json
import shutil

import numpy as np
import pytest
import torch

from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill.topk import StoredTopK, store_top_k
from lt2_platform.train.checkpoints import checkpoint
from tests.platform.distill.stages import DISTILL, run_stage, write_teacher
from tests.platform.one_ray import one_ray
from tests.platform.train.packed import SEQ_LEN, write_dataset
from tests.platform.train.test_worker import losses

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root = tmp_path_factory.mktemp("topk")
    teacher = write_teacher(root, steps=4)
    options = {"teacher": teacher, "data": str(root / "data"), "k": 8, "batch_size": 3}
    with one_ray():
        record = store_top_k(out=str(root / "stored"), **options)
        assert store_top_k(out=str(root / "stored"), **options) == record  # at once
        with pytest.raises(ConfigError, match="holds the top-k of another teacher, data or setting"):
            store_top_k(out=str(root / "stored"), **options | {"k": 9})
    return root


def test_rows_are_the_teachers_largest_logits_after_every_loop(stored):
    dataset = PackedDataset(str(stored / "data"), "train")
    top = StoredTopK(str(stored / "stored"), dataset)
    model = checkpoint.load_model(str(stored / "teacher"))[0]
    (batch,) = top.attach(iter([dataset.batch([7, 39])]))
    assert batch["topk_logits"].dtype == np.float16
    assert batch["topk_ids"].shape == (2, SEQ_LEN, 2, 8)
    model.requires_grad_(False)
    states = model(torch.from_numpy(batch["tokens"])[:, :-1], per_loop=True).loops
    for loop, state in enumerate(states):
        values, ids = model.logits(state).topk(8, dim=-1)
        assert np.array_equal(batch["topk_ids"][:, :, loop], ids.int().numpy())
        expected = (values - values[..., :1]).numpy()
        np.testing.assert_allclose(batch["topk_logits"][:, :, loop], expected, rtol=1e-3, atol=1e-3)


def test_a_damaged_part_is_named(stored, tmp_path):
    shutil.copytree(stored / "stored", tmp_path / "stored")
    top = StoredTopK(str(tmp_path / "stored"), PackedDataset(str(stored / "data"), "train"))
    part = tmp_path / "stored/part-000000.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(ConfigError, match=r"part-000000\.parquet is damaged \(.*\); store it again in another folder$"):
        list(map(top.row, range(40)))


def test_a_stage_on_stored_top_k_learns_what_it_learns_from_the_teacher(stored):
    teacher = str(stored / "teacher")
    run_stage(stored, "asked", DISTILL, teacher=teacher, kept=(1,))
    run_stage(stored, "read", DISTILL, teacher=teacher, kept=(1,), topk=str(stored / "stored"))
    # What is stored is rounded to fp16.
    assert losses(stored, "read") == pytest.approx(losses(stored, "asked"), rel=2e-3)
    assert json.loads((stored / "read/pretrain.json").read_text())["sources"].keys() == {"start", "topk"}


def test_mistakes_are_named(stored, tmp_path):
    dataset = PackedDataset(str(stored / "data"), "train")
    with pytest.raises(ConfigError, match="no finished top-k"):
        StoredTopK(str(tmp_path), dataset)
    with pytest.raises(ConfigError, match="stored with document_mask False, training has True"):
        StoredTopK(str(stored / "stored"), dataset, document_mask=True)
    other = write_dataset(tmp_path / "data")
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest | {"fingerprint": "0" * 64}))
    with pytest.raises(ConfigError, match="is the top-k of other data"):
        StoredTopK(str(stored / "stored"), PackedDataset(other, "train"))
    with pytest.raises(ConfigError, match="k 30 exceeds the teacher's vocabulary of 23"):
        store_top_k(teacher=str(stored / "teacher"), data=str(stored / "data"), out=str(tmp_path / "x"), k=30)
