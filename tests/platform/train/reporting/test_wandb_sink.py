"""The wandb sink: offline files with every metric, and nothing that wandb does reaches training."""

import struct
import threading

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from lt2.train.loop import TrainState
from lt2_platform.train import worker
from lt2_platform.train.reporting import wandb_sink
from lt2_platform.train.reporting.wandb_sink import WandbSink, resolve_mode
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def log_records(content):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, each record with checksum, length and kind."""
    at, parts = 7, []  # wandb's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(folder):
    """step -> metrics of the only offline run under `folder`."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or item.nested_key[0]): float(item.value_json) for item in record.history.item}
            rows[int(items.pop("_step"))] = items
    return rows


def test_a_run_offline_has_every_step_of_the_results_store(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 240.0)
    write_dataset(tmp_path / "data")
    spec = open_run(tmp_path, pretrain_config())
    sink = WandbSink(spec.run_id, spec.out, {"train": spec.train})
    assert sink.mode == "offline"
    with sink:
        worker.run(spec, callbacks=[sink])
    rows = history(tmp_path / "run")
    assert {step: row["loss"] for step, row in rows.items()} == losses(tmp_path)
    assert {"grad_norm", "lr", "tokens_per_s", "tokens", "data_wait_fraction", "peak_memory_gb"} <= rows[6].keys()


def test_wandb_that_fails_costs_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(**settings):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(wandb, "init", refuse)
    with WandbSink("run", str(tmp_path), {}) as sink:
        sink.thread.join()
        sink.on_step(TrainState(step=1), {"loss": 1.0})
    assert "wandb failed (no route to host); training continues" in caplog.text


def test_wandb_that_hangs_never_holds_a_step_and_at_the_end_only_for_a_while(tmp_path, monkeypatch, caplog):
    release = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **settings: release.wait())
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 0.05)
    monkeypatch.setattr(wandb_sink, "WAITING_ROWS", 700)
    with WandbSink("run", str(tmp_path), {}) as sink:
        for step in range(1000):
            sink.on_step(TrainState(step=step), {"loss": 1.0})
        assert sink.rows.qsize() == 700  # not one more for every step of a long run
    assert "wandb has not finished" in caplog.text
    release.set()
    sink.thread.join()


@pytest.mark.parametrize(
    ("asked", "environment", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "off"),
        ("auto", {"WANDB_MODE": "online"}, "online"),
        ("off", {"WANDB_API_KEY": "x"}, "off"),
        ("offline", {"WANDB_API_KEY": "x"}, "offline"),
    ],
)
def test_which_mode(monkeypatch, asked, environment, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(asked) == mode
