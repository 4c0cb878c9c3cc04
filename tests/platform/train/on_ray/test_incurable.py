"""A mistake that one worker meets alone (a damaged shard of its part) ends the run: no other waits for that worker."""

from types import SimpleNamespace

import pytest
from ray.train import FailureConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api import data_parallel_trainer

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_platform.train.on_ray import trainer
from lt2_platform.train.on_ray.incurable import OncePolicy

MISTAKE = WorkerGroupError("traceback", {1: ConfigError("part-00001.parquet is damaged")})
LOST = WorkerGroupError("traceback", {0: RuntimeError("connection closed by peer")})


@pytest.mark.parametrize(("error", "decision"), [(MISTAKE, FailureDecision.RAISE), (LOST, FailureDecision.RETRY)])
def test_only_a_mistake_is_not_tried_again(error, decision):
    assert OncePolicy(FailureConfig(max_failures=1)).make_decision(error) is decision


def test_our_policy_is_what_ray_asks(monkeypatch):
    given = {}

    def run(self, **options):
        given.update(options)
        return SimpleNamespace(error=None)

    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", run)
    monkeypatch.setattr(data_parallel_trainer, "ObjectRefWrapper", lambda function: function)  # it would start Ray
    monkeypatch.setattr(trainer.Trainer, "_create_default_callbacks", lambda self: [])
    trainer.Trainer(lambda settings: None, scaling_config=ScalingConfig(num_workers=1)).fit()
    assert isinstance(given["failure_policy"], OncePolicy)
    assert "train_fn_ref" in given


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [(MISTAKE, ConfigError, "^part-00001.parquet is damaged$"), (LOST, WorkerGroupError, "traceback")],
)
def test_a_mistake_of_one_worker_is_what_training_raises(tmp_path, error, raised, text):
    def fails():
        raise error

    def fake(*arguments, **options):
        return SimpleNamespace(fit=fails)

    with pytest.raises(raised, match=text):
        trainer._fit(fake, {}, Storage(str(tmp_path)), ScalingConfig(num_workers=1), 1, 0)  # type: ignore[arg-type]


def test_a_workers_mistake_leaves_the_worker(tmp_path, monkeypatch):
    def damaged(*arguments, **options):
        raise ConfigError("part-00001.parquet is damaged")

    monkeypatch.setattr(trainer.worker, "run", damaged)
    for name in ("ray_notice", "ray_sigterm"):
        monkeypatch.setattr(trainer, name, lambda: lambda: 0)
    context = SimpleNamespace(get_world_rank=lambda: 1)
    monkeypatch.setattr(trainer.ray.train, "get_context", lambda: context)
    spec = dict.fromkeys(("model", "train", "data", "out", "run_id", "storage_root"), "x") | {"info": {}}
    settings = {"spec": spec | {"out": str(tmp_path)}, "data_reader": "direct", "wandb": "off", "folder": "/nowhere"}
    with pytest.raises(ConfigError, match="^part-00001.parquet is damaged$"):
        trainer._work(settings)
