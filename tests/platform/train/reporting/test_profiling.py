"""A trace of chosen steps lies with the run; everything else about the run is as without it."""

import gzip
import json
from dataclasses import replace

import pytest

from lt2.config import ConfigError
from lt2_platform.train import run_folder, worker
from lt2_platform.train.config import Workers
from lt2_platform.train.reporting import profiling
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config


def optimizer_steps(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events)


def test_the_trace_holds_the_steps_asked_for_and_training_is_the_same(tmp_path):
    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(), "plain"))
    worker.run(replace(open_run(tmp_path, pretrain_config()), profile_steps=(2, 4)))
    worker.run(replace(open_run(tmp_path, pretrain_config(), "cut"), profile_steps=(6, 9)))
    (trace,) = (tmp_path / "run/profile").iterdir()
    assert trace.name == "steps-00000002-00000004.json.gz"
    assert optimizer_steps(trace) == 3
    (cut,) = (tmp_path / "cut/profile").iterdir()
    assert (cut.name, optimizer_steps(cut)) == ("steps-00000006-00000006.json.gz", 1)
    assert losses(tmp_path) == losses(tmp_path, "plain")
    assert not (tmp_path / "plain/profile").exists()


def test_storage_that_refuses_costs_the_trace_only(tmp_path, monkeypatch, caplog):
    def refuse(storage, path, data):
        raise OSError("full")

    monkeypatch.setattr(profiling.Storage, "write_bytes", refuse)
    done = []

    def steps():
        for item in range(4):
            yield item
            done.append(item)

    assert list(profiling.traced(steps(), lambda: len(done), (1, 2), str(tmp_path))) == [0, 1, 2, 3]
    assert "the profiler's trace is not written: full" in caplog.text


def test_steps_that_make_no_sense_are_refused(tmp_path):
    write_dataset(tmp_path / "data")
    places = {"data": str(tmp_path / "data"), "out": str(tmp_path / "run"), "storage_root": str(tmp_path)}
    for steps in ((0, 2), (3, 2)):
        with pytest.raises(ConfigError, match="give the first and the last step, counted from 1"):
            run_folder.open_run(pretrain_config(), run_id="run", workers=Workers(profile_steps=steps), **places)
