"""The worker without Ray: what it writes, and that a kill -9 at any point changes nothing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lt2.config import ConfigError
from lt2.train.loop import NonFiniteLossError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.checkpoints import checkpoint, integrity
from lt2_platform.train.config import PretrainConfig, Workers
from tests.platform.train.packed import MODEL, SEQ_LEN, VOCAB, checkpoints, train_config, write_dataset
from tests.ranks import PATHS, ROOT


def pretrain_config(**train) -> PretrainConfig:
    fields = {"checkpoint_every": 2} | train
    return PretrainConfig.model_validate({"model": MODEL, "train": train_config(**fields).model_dump()})


def open_run(root: Path, config: PretrainConfig, name="run", **options):
    where = {"out": str(root / name), "run_id": name, "storage_root": str(root)}
    return run_folder.open_run(config, data=str(root / "data"), **where, **options)


def losses(root, run_id="run"):
    table = ResultsStore(Storage(str(root))).metrics(run_id, ["loss"]).to_pylist()
    return {row["step"]: row["value"] for row in table}


def weights(out):
    return checkpoint.load_model(str(out))[0].state_dict()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    write_dataset(root / "data")
    spec = open_run(root, pretrain_config())
    run_folder.close_run(spec, worker.run(spec))
    return root


def test_a_run_leaves_checkpoints_metrics_and_a_summary(undisturbed):
    assert checkpoints(undisturbed / "run") == ["step-00000004", "step-00000006"]
    curve = losses(undisturbed)
    assert list(curve) == [1, 2, 3, 4, 5, 6]
    assert curve[6] < curve[1] < 1.2 * math.log(VOCAB)
    summary = json.loads((undisturbed / "run/summary.json").read_text())
    assert summary == {
        "step": 6,
        "position": 48,
        "tokens": 48 * SEQ_LEN,
        "loss": curve[6],
        "checkpoint": str(undisturbed / "run/checkpoints/step-00000006"),
    }
    progress = json.loads((undisturbed / "run/progress.json").read_text())
    assert (progress["step"], progress["steps"], progress["loss"], progress["eta_s"]) == (6, 6, curve[6], 0)
    assert progress["began"] == 0
    metrics = set(ResultsStore(Storage(str(undisturbed))).metrics("run")["metric"].to_pylist())
    assert {"loss", "ce", "grad_norm", "lr", "tokens_per_s", "data_wait", "step_time", "tokens"} <= metrics
    run = ResultsStore(Storage(str(undisturbed))).run("run")
    assert run.state == "finished"
    # What it read tells a run from others: on other data it is no repeat of them.
    assert run.config["data"] == {"tokenizer": "byte", "seq_len": SEQ_LEN, "fingerprint": "f" * 12}


POINTS = [
    "between steps",
    "inside a shard",
    "first shard written, nothing else",
    "before COMPLETE",
    "after COMPLETE",
    "while pruning",
    "between the last checkpoint and the summary",
]

# Imports once and forks a child per point; each child dies at its second chance, so one checkpoint is there already.
KILL = """
import os, signal, sys
from lt2_platform.storage import Storage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.checkpoints import shards
import tests.platform.train.test_worker as test

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(owner, name, when=lambda *args: True, after=False):
    original, hits = getattr(owner, name), []
    def patched(*args, **kwargs):
        hits.extend([1] * bool(when(*args)))
        if len(hits) == 2 and not after:
            die()
        result = original(*args, **kwargs)
        if len(hits) == 2:
            die()
        return result
    setattr(owner, name, patched)

def arm(point):
    is_marker = lambda self, path, value: path.endswith("COMPLETE")
    if point == "between steps":
        kill_at(worker.Logger, "on_step", lambda self, state, metrics: state.step in (1, 3))
    if point == "inside a shard":
        # The first checkpoint takes more than 200 writes; the second is cut after its tensors began.
        kill_at(shards._HashingStream, "write", lambda self, data: self.size > 0 and "step-00000004" in self.raw.name)
    if point == "first shard written, nothing else":
        kill_at(shards.HashingFileSystem, "rename")
    if point == "before COMPLETE":
        kill_at(Storage, "write_json", is_marker)
    if point == "after COMPLETE":
        kill_at(Storage, "write_json", is_marker, after=True)
    if point == "while pruning":
        kill_at(Storage, "delete", lambda self, path: path == "step-00000002/COMPLETE", after=True)
    if point == "between the last checkpoint and the summary":
        run_folder.close_run = lambda *args: die()

test.train_here(os.path.join(sys.argv[1], "warm-up"))  # whatever is imported or built on first use
for point in test.POINTS:
    child = os.fork()
    if child == 0:
        arm(point)
        test.train_here(os.path.join(sys.argv[1], test.folder_of(point)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)
"""


def folder_of(point):
    return point.replace(" ", "-").replace(",", "")


def train_here(root):
    spec = open_run(Path(root), pretrain_config())
    run_folder.close_run(spec, worker.run(spec))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    for name in ("warm-up", *map(folder_of, POINTS)):
        write_dataset(root / name / "data")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", KILL, root], env=environment, cwd=ROOT, check=True)
    return root


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_then_the_same_call_equals_the_undisturbed_run(killed, undisturbed, point):
    root = killed / folder_of(point)
    assert not (root / "run/summary.json").exists()
    train_here(root)
    assert losses(root) == losses(undisturbed)
    ours, theirs = weights(root / "run"), weights(undisturbed / "run")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert checkpoints(root / "run") == checkpoints(undisturbed / "run")
    assert sorted(p.name for p in (root / "run/checkpoints").iterdir()) == checkpoints(root / "run")
    if point in ("inside a shard", "after COMPLETE"):
        began = json.loads((root / "run/progress.json").read_text())["began"]
        assert began == {"inside a shard": 2, "after COMPLETE": 4}[point]


def test_a_damaged_newest_checkpoint_costs_steps_not_the_run(tmp_path, undisturbed, caplog):
    write_dataset(tmp_path / "data")
    train_here(tmp_path)
    newest = tmp_path / "run/checkpoints/step-00000006"
    (newest / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "run/summary.json").unlink()
    train_here(tmp_path)
    assert "step-00000006 is damaged and skipped: __0_0.distcp: 0 bytes instead of" in caplog.text
    assert losses(tmp_path) == losses(undisturbed)
    assert integrity.damage(str(newest)) == []


def test_another_config_in_the_same_folder_is_refused(undisturbed):
    with pytest.raises(ConfigError, match=r"another config \(train.lr 0.01 -> 0.02\); use another output folder"):
        open_run(undisturbed, pretrain_config(lr=2e-2))


def test_a_run_of_before_a_setting_existed_is_resumed(tmp_path):
    write_dataset(tmp_path / "data")
    train_here(tmp_path)
    file = tmp_path / "run/pretrain.json"
    record = json.loads(file.read_text())
    del record["train"]["keep_gathered"], record["model"]["max_seq_len"]
    file.write_text(json.dumps(record))
    assert open_run(tmp_path, pretrain_config()).out == str(tmp_path / "run")


def test_a_loss_that_is_not_finite_saves_nothing_and_marks_the_run_failed(tmp_path):
    write_dataset(tmp_path / "data")
    spec = open_run(tmp_path, pretrain_config(lr=1e30, grad_clip=None, warmup_steps=0))
    with pytest.raises(NonFiniteLossError, match="step 2"):
        worker.run(spec)
    assert checkpoints(tmp_path / "run") == []
    assert ResultsStore(Storage(str(tmp_path))).run("run").state == "failed"


def test_validation_loss_is_logged_when_due_and_slow_kernels_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(worker, "startup_problems", lambda: ["fla is not installed"])
    write_dataset(tmp_path / "data")
    spec = open_run(tmp_path, pretrain_config(eval_every=3))
    worker.run(spec)
    assert "fla is not installed" in caplog.messages
    table = ResultsStore(Storage(str(tmp_path))).metrics("run", ["validation_loss"]).to_pylist()
    assert [row["step"] for row in table] == [3, 6]
    assert all(0 < row["value"] < 2 * math.log(VOCAB) for row in table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"vocab_size": VOCAB - 1}}, "vocab_size 22 is smaller than the 23 tokens of tokenizer 'byte'"),
        ({"model": {"max_seq_len": 4}}, "max_seq_len 4 is shorter than the rows of 12 tokens"),
        (
            {"model": {"layout": {"type": "uniform", "mixer": {"type": "dsa", "top_k": 16}}}},
            "for rows of 12 tokens .*top_k 16 is not below max_seq_len 12",
        ),
        ({"num_workers": 3}, "global_batch_size 8 is not divisible by 3 workers"),
        ({"run_id": "a/b"}, "run id 'a/b'"),
        ({"data": "nowhere"}, "is not a finished dataset"),
        ({"train": {"eval_every": 6}, "validation": 0}, "no validation sequences"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, change, message):
    write_dataset(tmp_path / "data", validation=change.get("validation", 4))
    config = PretrainConfig.model_validate(
        {"model": MODEL | change.get("model", {}), "train": train_config(**change.get("train", {})).model_dump()}
    )
    with pytest.raises(ConfigError, match=message) as raised:
        run_folder.open_run(
            config,
            data=str(tmp_path / change.get("data", "data")),
            out=str(tmp_path / "run"),
            run_id=change.get("run_id", "run"),
            storage_root=str(tmp_path),
            workers=Workers(num_workers=change.get("num_workers", 1)),
        )
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


UNINSTALLED = """
from importlib import metadata
installed = metadata.version
def version(name):
    if name == "lt2":
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
"""


def test_the_torchrun_script_trains_the_same_from_a_bare_checkout_without_importing_ray(tmp_path, undisturbed):
    write_dataset(tmp_path / "data")
    (tmp_path / "config.json").write_text(pretrain_config().model_dump_json())
    code = UNINSTALLED + "import runpy, sys; sys.argv = sys.argv[1:]; status = 0\n"
    code += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: status = end.code\n"
    code += "assert 'ray' not in sys.modules; sys.exit(status)"
    script = [sys.executable, "-c", code, ROOT / "scripts/train_torchrun.py"]
    options = ["--config", tmp_path / "config.json", "--data", tmp_path / "data", "--storage", tmp_path]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    trained = subprocess.run([*script, *options, "--out", tmp_path / "run"], env=environment)
    assert trained.returncode == 0
    assert losses(tmp_path) == losses(undisturbed)

    (tmp_path / "config.json").write_text('{"model": {"dims": 3}, "train": {}}')
    refused = subprocess.run(
        [*script, *options, "--out", tmp_path / "bad"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "model.dims: unknown key 'dims'; did you mean 'dim'?" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "bad").exists()
