"""What a run logs beside its loss."""

from pathlib import Path

import pytest
import torch

from lt2.analysis.accounting import head_flops, peak_flops, training_flops, warmup_flops
from lt2.model import build
from lt2.train.loop import TrainState
from lt2.train.objectives import NextTokenConfig
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.config import PretrainConfig
from lt2_platform.train.reporting import observe
from lt2_platform.train.reporting.observe import Observer
from tests.platform.train.packed import MODEL, model_config, train_config, write_dataset
from tests.platform.train.test_worker import open_run
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def logged(root, run_id="run"):
    rows = ResultsStore(Storage(str(root))).metrics(run_id).to_pylist()
    return {(row["metric"], row["step"]): row["value"] for row in rows}


def train_with_rho(root):
    fields = train_config(checkpoint_every=3).model_dump()
    config = PretrainConfig.model_validate({"model": MODEL | {"loop_residual": True}, "train": fields})
    return worker.run(open_run(Path(root), config))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_logs_rho_memory_and_spikes(tmp_path, ranks):
    write_dataset(tmp_path / "data")
    if ranks == 1:
        train_with_rho(tmp_path)
    else:
        run_ranks(train_with_rho, ranks, str(tmp_path))
    metrics = logged(tmp_path)
    rho = checkpoint.load_model(str(tmp_path / "run"))[0].rho
    assert rho is not None
    assert rho.abs().max() > 0
    for loop in range(2):
        assert metrics[f"rho_norm_{loop}", 6] == pytest.approx(rho[loop].norm().item(), rel=1e-6)
    assert metrics["peak_memory_gb", 6] >= metrics["peak_memory_gb", 1] > 0.05
    assert metrics["grad_spikes", 6] == 0
    assert 0 <= metrics["data_wait_fraction", 6] <= 1
    assert not any(name == "mfu" for name, _ in metrics)  # a CPU has no known peak


def observe_norms(norms):
    observer = Observer.build(build(model_config(loop_residual=False), seed=0), train_config(), 12, CPU)
    counts = []
    for step, norm in enumerate(norms):
        metrics = {"grad_norm": norm, "tokens_per_s": 1.0}
        observer.on_step(TrainState(step=step), metrics)
        counts.append(metrics["grad_spikes"])
    assert not any(name.startswith("rho_norm") for name in metrics)  # a model without them
    return counts


def test_spikes_are_counted_against_the_running_median():
    steady = [1.0] * 8
    assert observe_norms([*steady, 2.9, 3.1, 1.0, 50.0])[-4:] == [0, 1, 1, 2]
    assert observe_norms([9.0, *steady])[-1] == 0  # the first steps are no spikes of anything
    assert observe_norms([1.0, 1.0, 50.0])[-1] == 0


def mfu(monkeypatch, model, *asked, step=0, **train):
    monkeypatch.setattr(observe, "autocast_dtype", lambda precision, device: torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(observe, "peak_memory", lambda device: 0)
    observer = Observer.build(model, train_config(**train), 12, torch.device("cuda", 0), *asked)
    metrics = {"grad_norm": 1.0, "step_time": 1e-6, "tokens_per_s": 1.0}  # few of them are learned, all computed
    observer.on_step(TrainState(step=step), metrics)
    return metrics["mfu"] * 989e12 / (8 * 12 / 1e-6)  # FLOPs per token


def test_mfu_is_the_models_flops_over_all_cards(monkeypatch):
    model = build(model_config(), seed=0)
    assert mfu(monkeypatch, model) == pytest.approx(training_flops(model.config, 12))


def test_mfu_counts_what_the_objective_computes(monkeypatch):
    gated = build(model_config(halting={"type": "exit_gate"}), seed=0)
    plain, head = training_flops(gated.config, 12), head_flops(gated.config)
    every = 3 * (gated.config.n_loops - 1) * head
    assert mfu(monkeypatch, gated, objective={"type": "exit_gate"}) == pytest.approx(plain + every)
    final = {"type": "distill", "supervision": "final"}
    assert mfu(monkeypatch, gated, gated.config, objective=final) == pytest.approx(plain * 4 / 3)


def test_mfu_counts_dense_steps_of_dsa_as_long_as_they_last(monkeypatch):
    layout = {"type": "uniform", "mixer": {"type": "dsa", "top_k": 2, "warmup_steps": 3}}
    net = build(model_config(layout=layout), seed=0)
    more = 3 * warmup_flops(net.config, NextTokenConfig(), 12)[3]
    flops = [mfu(monkeypatch, net, step=step) - training_flops(net.config, 12) for step in (3, 4)]
    assert flops == [pytest.approx(more), pytest.approx(0, abs=1)]


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("Quadro RTX 8000", None),
    ],
)
def test_peaks_by_the_names_cards_give_themselves(card, peak):
    assert peak_flops(card) == peak
