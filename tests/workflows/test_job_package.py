"""What is packed for a job: a snapshot of the code, the recipe, the files its configs name, and no secret."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_workflows.engine.records import write_workflow
from lt2_workflows.job_package import PACKAGES, RECORD, pack, refuse_secrets
from lt2_workflows.loading import load_workflow
from tests.workflows.conftest import FAKE_STEPS

MIXER = """
from typing import ClassVar, Literal

from lt2.config import MixerConfig


class PackedConfig(MixerConfig):
    module: ClassVar[str] = "Packed"
    weights: ClassVar[str] = "packed"
    type: Literal["packed-for-a-job"] = "packed-for-a-job"


class Packed:
    pass
"""


def test_the_snapshot_alone_reads_the_record(tmp_path):
    """Moved to another folder, with the live checkout off the path, the package gives the same workflow."""
    workflow = load_workflow(f"{FAKE_STEPS}:chain", ["first.lines=7"])
    (tmp_path / "made").mkdir()
    env, _ = pack(workflow, tmp_path / "made")
    (tmp_path / "made").rename(tmp_path / "moved")
    work = Path(env["working_dir"].replace("made", "moved"))
    modules = [Path(path.replace("made", "moved")) for path in env["py_modules"]]
    assert [path.name for path in modules] == list(PACKAGES)
    assert not list((tmp_path / "moved").rglob("__pycache__"))
    code = (
        f"import sys; sys.path.insert(0, {str(modules[0].parent)!r})\n"
        "from lt2_workflows import loading, provenance\n"
        "print(loading.__file__, loading.load_workflow('workflow.json').id, provenance.provenance()['git'])"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], cwd=work, capture_output=True, text=True, check=True)
    file, workflow_id, git = shown.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert workflow_id == workflow.id
    assert git == json.loads((modules[2] / "snapshot.json").read_text())["git"] or git == "None"


def with_mixer(source: str):
    settings = ["type=packed-for-a-job", f"source={source}"]
    return load_workflow("quickstart", [f"pretrain.model.layout.mixer.{item}" for item in settings])


def test_a_users_mixer_travels_under_its_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mixers").mkdir()
    Path("mixers/packed.py").write_text(MIXER)
    workflow = with_mixer("mixers/packed.py")
    Path("out").mkdir()
    work = Path(pack(workflow, Path("out"))[0]["working_dir"])
    assert (work / "mixers/packed.py").read_text() == MIXER
    assert json.loads((work / RECORD).read_text())["steps"] == workflow.record()["steps"]


def test_a_users_mixer_from_elsewhere_is_brought_in(tmp_path):
    (tmp_path / "packed.py").write_text(MIXER)
    (tmp_path / "out").mkdir()
    work = Path(pack(with_mixer(str(tmp_path / "packed.py")), tmp_path / "out")[0]["working_dir"])
    source = json.loads((work / RECORD).read_text())["steps"]["pretrain"]["model"]["layout"]["mixer"]["source"]
    assert not Path(source).is_absolute()
    assert (work / source).read_text() == MIXER


def test_a_job_is_called_what_its_workflow_is_called_there(tmp_path):
    """A source from elsewhere has another path in the job, and so the workflow another id: the one to resume by."""
    (tmp_path / "packed.py").write_text(MIXER)
    (tmp_path / "out").mkdir()
    workflow = with_mixer(str(tmp_path / "packed.py"))
    environment, known = pack(workflow, tmp_path / "out")
    with chdir(environment["working_dir"]):
        assert load_workflow(RECORD).id == known != workflow.id


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    """Python takes it for what its first line says; it is looked through for secrets as text."""
    file = tmp_path / "packed.py"
    file.write_bytes(b"# coding: latin-1\n" + MIXER.encode() + "# größer".encode("latin-1"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"packed\.py is not UTF-8 \(byte \d+\); save it as that"):
        pack(with_mixer(str(file)), tmp_path / "out")


def test_a_file_beside_the_recipe_hides_nothing_by_finding_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as python -m and PYTHONPATH=. have it
    for number, name in enumerate(("packed_of_mine.py", "packed.v2.py")):
        Path(name).write_text(MIXER)
        Path(f"out{number}").mkdir()
        assert (Path(pack(with_mixer(name), Path(f"out{number}"))[0]["working_dir"]) / name).is_file()


def test_a_file_that_would_hide_a_module_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("stat.py").write_text(MIXER)
    Path("out").mkdir()
    with pytest.raises(ConfigError, match="stat.py hides the module 'stat' on the cluster"):
        pack(with_mixer("stat.py"), Path("out"))


def test_a_recipe_that_carries_a_secret_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-wandb-key")
    workflow = load_workflow(f"{FAKE_STEPS}:chain", ["first.text=canary-wandb-key"])
    with pytest.raises(ConfigError, match=r"workflow.json contains the value of \$WANDB_API_KEY"):
        pack(workflow, tmp_path)


@pytest.mark.parametrize(
    ("variable", "secret"),
    [
        ("AWS_SECRET_ACCESS_KEY", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("HF_TOKEN", True),
        ("RAY_AUTH_TOKEN", True),
        ("OPENAI_APIKEY", True),
        ("RAY_AUTH_TOKEN_PATH", False),
        ("AWS_ENDPOINT_URL", False),
        ("TOKENIZERS_PARALLELISM", False),
    ],
)
def test_what_counts_as_a_secret(variable, secret):
    texts = {"the job": "run with a-long-value"}
    if secret:
        with pytest.raises(ConfigError, match=variable):
            refuse_secrets(texts, {variable: "a-long-value"})
    else:
        refuse_secrets(texts, {variable: "a-long-value"})
    refuse_secrets(texts, {variable: "another-value"})


def test_files_that_configs_name_by_relative_paths_are_recorded(tmp_path, monkeypatch):
    """A job's paths are relative to its folder, which is gone when the workflow is resumed."""
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).with_name("fault_recipe.py")
    (tmp_path / "own").mkdir()
    shutil.copy(recipe, "own/held.py")
    storage = Storage(str(tmp_path / "storage"))
    for source in ("own/held.py", str(recipe)):
        workflow = load_workflow(f"{recipe}:trained", [f"pretrain.train.objective.source={source}"])
        write_workflow(storage, workflow)
        recorded = storage.glob(f"workflows/{workflow.id}/files/**/*.py")
        assert recorded == ([f"workflows/{workflow.id}/files/{source}"] if source == "own/held.py" else [])


def test_what_was_corrected_since_the_first_run_is_what_a_resume_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("packed.py").write_text(MIXER)
    Path("recipe.py").write_text("# has a mistake\n")
    storage, workflow = Storage(str(tmp_path / "storage")), replace(with_mixer("packed.py"), recipe_file="recipe.py")
    write_workflow(storage, workflow)
    Path("packed.py").write_text(MIXER + "# corrected\n")
    Path("recipe.py").write_text("# has none\n")
    write_workflow(storage, workflow)
    folder = tmp_path / f"storage/workflows/{workflow.id}"
    assert (folder / "files/packed.py").read_text() == MIXER + "# corrected\n"
    assert (folder / "recipe.py").read_text() == "# has none\n"
