"""What is refused or told of a sweep's trials before they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lt2.analysis.accounting import parameters
from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Workflow
from lt2_workflows.inputs import check_inputs
from lt2_workflows.outside import note
from lt2_workflows.plan import describe_plan
from lt2_workflows.provenance import provenance
from lt2_workflows.sweeps.checks import made_otherwise, remarks
from lt2_workflows.sweeps.config import SweepStep, TrialConfig, sized
from tests.platform.evaluate.tiny import MODEL

TRAIN = {"steps": 4, "global_batch_size": 2, "checkpoint_every": 2}
MIXER = """
from lt2.mixer_configs import KimiDeltaConfig
from typing import ClassVar, Literal


class OwnConfig(KimiDeltaConfig):
    weights: ClassVar[str] = "swept"
    type: Literal["swept"] = "swept"
"""


def layout(mixer: Any) -> dict[str, Any]:
    return {"type": "hybrid", "attention": {"type": "full"}, "mixer": mixer, "ratio": "1:1"}


def longer() -> dict[str, Any]:
    """A recipe that trains, and trains the same weights on longer rows."""
    model, prepare = MODEL | {"layout": layout({"type": "kda"})}, {"type": "prepare", "source": "python-stdlib"}
    first = {"type": "pretrain", "data": {"step": "prepare"}, "model": model, "train": TRAIN}
    more = {"data": {"step": "prepare-long"}, "start": {"step": "average"}}
    return {
        "prepare": prepare | {"seq_len": 64},
        "prepare-long": prepare | {"seq_len": 128},
        "pretrain": first,
        "average": {"type": "average", "checkpoint": {"step": "pretrain"}, "last": 2},
        "extend": first | more,
    }


def sweep(**fields: Any) -> tuple[SweepStep, Workflow]:
    config = SweepStep(steps=longer(), **fields)
    return config, Workflow("w", {"sweep": config})


def mixers(*kinds: Any, steps: tuple[str, ...] = ("pretrain",)) -> tuple[TrialConfig, ...]:
    keys = [f"{step}.model.layout" for step in steps]
    return tuple(TrialConfig(label=kind["type"], settings=dict.fromkeys(keys, layout(kind))) for kind in kinds)


def finished(storage: Storage, workflow: Workflow, name: str) -> str:
    """Store `name` as done now; its id."""
    step = workflow.steps[name]
    read = note(StepContext(storage, workflow, step))
    done = {"attempt": 1, "ended": 0.0, "result": {}, "read": read, "provenance": provenance()}
    storage.write_json(f"{step.folder}/done.json", done)
    return step.id


def test_equal_parameters_reach_the_step_that_trains_further(tmp_path: Path):
    both = mixers({"type": "gdn"}, {"type": "la"}, steps=("pretrain", "extend"))
    config, workflow = sweep(trials=both, match_parameters="pretrain")
    wanted = parameters(sized(SweepStep(steps=longer()).expanded[0].workflow.configs["pretrain"].model)).total
    for trial in config.expanded:
        first, then = (trial.workflow.configs[name].model for name in ("pretrain", "extend"))
        assert first.ffn_hidden == then.ffn_hidden != MODEL.get("ffn_hidden")
        assert parameters(sized(then)).total == pytest.approx(wanted, rel=0.02)
    check_inputs(workflow, Storage(str(tmp_path)), workflow.steps.values())


def test_a_trial_that_cannot_start_from_what_it_trained_is_refused_before_any_runs(tmp_path: Path):
    storage = Storage(str(tmp_path))
    _, workflow = sweep(grid={"pretrain.model.dim": (16, 32)}, seeds=(0, 1))
    with pytest.raises(ConfigError) as planned:
        describe_plan(workflow, storage)
    said = "sweep: dim=32: extend: start: cannot start from this model: rho is (2, 32) there and (2, 16) here; "
    assert str(planned.value) == said + "the sizes must be the same"  # once, not for either seed
    with pytest.raises(ConfigError, match="dim=32: extend: start"):
        check_inputs(workflow, storage, workflow.steps.values())


def test_mixers_that_begin_at_random_and_missed_seeds_are_told(tmp_path: Path):
    storage = Storage(str(tmp_path))
    config, workflow = sweep(trials=mixers({"type": "kda"}, {"type": "gdn"}, {"type": "la"}))
    context = StepContext(storage, workflow, workflow.steps["sweep"])
    gdn, la = remarks(config, context)
    assert gdn.startswith("gdn: extend: new kda BEGIN AT RANDOM in 1 of 2 layers, where average has gdn; ")
    assert la.startswith("la: extend: new kda BEGIN AT RANDOM in 1 of 2 layers, where average has la; ")
    assert gdn in describe_plan(workflow, storage)
    config, workflow = sweep(trials=mixers({"type": "kda"}, {"type": "gdn"}, steps=("pretrain", "extend")))
    assert remarks(config, StepContext(storage, workflow, workflow.steps["sweep"])) == []
    seeded, workflow = sweep(seeds=(0, 1))
    said = "SEEDS DO NOT REACH extend, whose data have one order; seed_keys lacks extend.train.seed"
    assert remarks(seeded, StepContext(storage, workflow, workflow.steps["sweep"])) == [said]
    deeper, workflow = sweep(grid={"pretrain.model.n_loops": (1, 4)})  # other loops are no other weights
    assert remarks(deeper, StepContext(storage, workflow, workflow.steps["sweep"])) == []


def test_finished_trials_of_code_that_was_edited_since_are_told(tmp_path: Path):
    """Else the mean over seeds would be one of two models."""
    storage, source = Storage(str(tmp_path / "s")), tmp_path / "own.py"
    source.write_text(MIXER)
    own = mixers({"type": "swept", "source": str(source)}, {"type": "gdn"}, steps=("pretrain", "extend"))
    config, workflow = sweep(trials=own, seeds=(0, 1), seed_keys=("pretrain.train.seed", "extend.train.seed"))
    context = StepContext(storage, workflow, workflow.steps["sweep"])
    done = finished(storage, config.expanded[0].workflow, "extend")
    assert remarks(config, context) == made_otherwise(config, context) == []
    source.write_text(MIXER + "# edited\n")
    (said,) = remarks(config, context)
    assert said.startswith(f"{done}: ITS INPUT HAS CHANGED since: the code in {source} has other content")
    assert said in describe_plan(workflow, storage)
    source.write_text(MIXER)
    finished(storage, workflow, "sweep")
    source.write_text(MIXER + "# edited\n")  # a finished sweep says so itself
    assert describe_plan(workflow, storage).count("ITS INPUT HAS CHANGED") == 1


def test_finished_trials_of_other_packages_are_told(tmp_path: Path):
    storage = Storage(str(tmp_path))
    config, workflow = sweep(grid={"pretrain.train.lr": (1e-3, 1e-2)})
    done = finished(storage, config.expanded[0].workflow, "pretrain")
    record: Any = json.loads(storage.read_bytes(f"steps/{done}/done.json"))
    record["provenance"]["packages"]["torch"] = "1.0"
    storage.write_json(f"steps/{done}/done.json", record)
    (said,) = made_otherwise(config, StepContext(storage, workflow, workflow.steps["sweep"]))
    assert said.startswith(f"{done}: already finished, made with other code or packages: torch 1.0 -> ")
