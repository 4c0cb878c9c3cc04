"""A number of workers within a range. Going on with fewer: test_trainer.py."""

import pytest

from lt2.config import ConfigError
from lt2_platform.train import run_folder
from lt2_platform.train.config import Workers
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import pretrain_config


def test_every_number_of_workers_in_the_range_must_divide_the_batch(tmp_path):
    write_dataset(tmp_path / "data")
    places = {"data": str(tmp_path / "data"), "out": str(tmp_path / "run"), "storage_root": str(tmp_path)}
    with pytest.raises(ConfigError, match="global_batch_size 8 is not divisible by 3 workers"):
        run_folder.open_run(pretrain_config(), run_id="run", workers=Workers(num_workers=4, min_workers=2), **places)
    two = Workers(num_workers=2, min_workers=1)
    with pytest.raises(ConfigError, match="train.shard_workers 4 does not divide 2 workers"):
        run_folder.open_run(pretrain_config(shard_workers=4), run_id="run", workers=two, **places)
    assert not (tmp_path / "run").exists()
