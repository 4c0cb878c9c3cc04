"""SIGTERM: saved at a step's end on every rank together, and the next attempt makes the run whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lt2.train.loop import SAVE, STOP, PreemptedError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import preemption, worker
from tests.platform.train.packed import checkpoints, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights
from tests.ranks import ROOT, run_ranks

CONFIG = {"steps": 8, "checkpoint_every": None, "log_every": 3}


class Terminate:
    """SIGTERM to this process at the end of a step of its data."""

    def __init__(self, at, mine=True):
        self.at, self.mine = at, mine

    def on_step(self, state, metrics):
        if state.step == self.at and self.mine:
            os.kill(os.getpid(), signal.SIGTERM)


def whole_run(root):
    write_dataset(root / "data")
    worker.run(open_run(root, pretrain_config(**CONFIG), "whole"))
    return losses(root, "whole"), weights(root / "whole")


def terminated_rank(root):
    """Only rank 1 gets the signal; both must stop at the same step."""
    spec = open_run(Path(root), pretrain_config(**CONFIG))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreemptedError) as raised:
        worker.run(spec, callbacks=[Terminate(3, mine=dist.get_rank() == 1)])
    assert signal.getsignal(signal.SIGTERM) == before
    saved, state = checkpoints(spec.out), ResultsStore(Storage(root)).run("run").state
    dist.barrier()
    return str(raised.value), saved, state, worker.run(spec)


def test_one_ranks_sigterm_saves_and_ends_all_ranks_and_nothing_is_lost(tmp_path):
    expected, theirs = whole_run(tmp_path)
    for message, saved, state, result in run_ranks(terminated_rank, 2, str(tmp_path)):
        assert message == "stopped as asked after step 5 of 8, which is saved"
        assert saved == ["step-00000005"]
        assert state == "running"
        assert (result["step"], result["position"]) == (8, 64)
    (event,) = ResultsStore(Storage(str(tmp_path))).events("run")
    assert (event["kind"], event["message"]) == ("preemption", "stopped as asked after step 5 of 8, which is saved")
    curve = losses(tmp_path)
    assert sorted(curve) == [3, 5, 6, 8]
    assert {step: curve[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(value, theirs[name], atol=1e-5) for name, value in weights(tmp_path / "run").items())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_torchrun_script_ends_with_143_and_the_same_command_goes_on(tmp_path, name):
    expected, theirs = whole_run(tmp_path)
    (tmp_path / "config.json").write_text(pretrain_config(**CONFIG).model_dump_json())
    code = "import os, runpy, signal, sys\n"
    code += "from lt2_platform.train import worker\n"
    code += "step = worker.Logger.on_step\n"
    code += "def on_step(self, state, metrics):\n"
    code += "    step(self, state, metrics)\n"
    code += f"    if state.step == 3: os.kill(os.getpid(), signal.{name})\n"
    code += "worker.Logger.on_step = on_step\n"
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, ROOT / "scripts/train_torchrun.py", "--config", tmp_path / "config.json"]
    command += ["--data", tmp_path / "data", "--storage", tmp_path, "--out", tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 143
    assert first.stderr.strip().endswith("step 5 of 8, which is saved; the same command resumes from there")
    assert subprocess.run(command, env=environment, cwd=ROOT).returncode == 0
    assert all(torch.equal(value, theirs[name]) for name, value in weights(tmp_path / "run").items())
    assert {step: loss for step, loss in losses(tmp_path).items() if step != 5} == expected


def test_a_request_to_save_saves_and_training_goes_on(tmp_path):
    expected, _ = whole_run(tmp_path)
    asked = []

    def ask():
        asked.append(1)
        return SAVE if len(asked) == 4 else 0

    result = worker.run(open_run(tmp_path, pretrain_config(**CONFIG)), stop=ask)
    assert result["step"] == 8
    assert len(asked) == 8
    assert checkpoints(tmp_path / "run") == ["step-00000005", "step-00000008"]
    assert {step: loss for step, loss in losses(tmp_path).items() if step != 5} == expected


def test_requests_of_a_thousand_ranks_are_told_apart():
    assert 1000 * SAVE < STOP


def test_ray_notice_asks_once_per_notice(monkeypatch):
    from ray.train.v2._internal.execution import context

    notices = SimpleNamespace(preemption_info=None)
    monkeypatch.setattr(context, "get_train_context", lambda: SimpleNamespace(preemption_context=notices))
    ask = preemption.ray_notice()
    answers = [ask()]
    for notice in ("node a", "node a", "nodes a, b"):
        notices.preemption_info = notice
        answers.append(ask())
    assert answers == [0, SAVE, 0, SAVE]
