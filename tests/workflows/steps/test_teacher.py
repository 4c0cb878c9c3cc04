"""The import of a model of others, as a step."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.steps.teacher import run_import
from tests.lt2.interop.test_pretrained import SIZES


def imported(folder, root, seed):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": 300})).save_pretrained(folder)
    step = {"type": "import_model", "folder": str(folder), "tokenizer": "byte"}
    workflow = workflow_from_record({"workflow": folder.name, "steps": {"base": step}}, source="test")
    context = StepContext(Storage(str(root)), workflow, workflow.steps["base"])
    return run_import(context.step.config, context)["run"]


def test_the_store_has_the_settings_of_a_model_that_is_imported(tmp_path):
    base, tuned = (imported(tmp_path / name, tmp_path / "store", seed) for seed, name in enumerate(("base", "tuned")))
    runs = {run.run_id: run for run in ResultsStore(Storage(str(tmp_path / "store"))).runs()}
    assert set(runs) == {base, tuned}
    settings = runs[base].config
    assert settings["model"]["dim"] == 16
    assert settings["model"]["layout"]["mixer"]["type"] == "full"
    assert settings["imported"]["model_type"] == "llama"
    assert settings["imported"]["folder"] == str(tmp_path / "base")
    # Equal in architecture: they differ, and are no repeats of each other.
    assert settings["model"] == runs[tuned].config["model"]
    assert settings["imported"]["weights"] != runs[tuned].config["imported"]["weights"]
