"""The rendered files are the committed ones, and what Ray's and KubeRay's own schemas and parsers expect."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ruamel.yaml import YAML

from lt2.config import ConfigError
from lt2_platform.train.reporting.live_metrics import GAUGES, RHO_NORM, STEP, TOKENS
from lt2_workflows.cluster.check import check_file, problems_of
from lt2_workflows.cluster.grafana import PANELS
from lt2_workflows.cluster.kuberay import ray_cluster, ray_job
from lt2_workflows.cluster.render import render
from lt2_workflows.cluster.settings import read_settings
from lt2_workflows.cluster.vms import autoscaler
from lt2_workflows.engine.live_metrics import PROGRESS
from lt2_workflows.loading import load_workflow

CLUSTERS = Path(__file__).resolve().parents[3] / "platform" / "clusters"
SETTINGS = read_settings(str(CLUSTERS / "settings.yaml"))


def test_the_committed_files_are_rendered_from_the_settings():
    rendered = render(SETTINGS)
    found = {path.name: path.read_text() for path in CLUSTERS.iterdir() if path.name != "settings.yaml"}
    assert found == rendered


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml", "autoscaler.yaml"])
def test_the_committed_files_are_valid(name):
    check_file(str(CLUSTERS / name))


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value changed, or a key renamed where `value` is a string starting with "->"."""
    document = copy.deepcopy(document)
    *parents, last = path.split("/")
    here: Any = document
    for part in parents:
        here = here[int(part) if isinstance(here, list) else part]
    if isinstance(value, str) and value.startswith("->"):
        here[value[2:]] = here.pop(last)
    else:
        here[last] = value
    return document


CLUSTER, JOB, VMS = ray_cluster(SETTINGS), ray_job(SETTINGS), autoscaler(SETTINGS)
POD = "spec/workerGroupSpecs/0/template/spec"


@pytest.mark.parametrize(
    ("document", "path", "value", "place", "named"),
    [
        (CLUSTER, "spec/workerGroupSpecs", "->workerGroupSpec", "spec:", "workerGroupSpec"),
        (CLUSTER, "spec/workerGroupSpecs/0/maxReplicas", "->maxReplica", "spec.workerGroupSpecs.0:", "maxReplica"),
        (CLUSTER, "spec/workerGroupSpecs/0/maxReplicas", "four", "spec.workerGroupSpecs.0.maxReplicas:", "four"),
        (CLUSTER, "spec/headGroupSpec/rayStartParams/num-cpus", 0, "spec.headGroupSpec.rayStartParams.num-cpus:", "0"),
        (CLUSTER, "spec/autoscalerOptions/version", "v3", "spec.autoscalerOptions.version:", "v3"),
        (CLUSTER, "spec/authOptions/mode", "tokens", "spec.authOptions.mode:", "tokens"),
        (CLUSTER, f"{POD}/nodeSelector", "->nodeSelectors", "spec.workerGroupSpecs.0.template.spec:", "nodeSelectors"),
        (CLUSTER, f"{POD}/containers/0/image", "->images", "template.spec.containers.0:", "images"),
        (JOB, "spec/ttlSecondsAfterFinished", "->ttlSecondsAfterFinish", "spec:", "ttlSecondsAfterFinish"),
        (JOB, "spec/rayClusterSpec/rayVersion", "->rayVersions", "spec.rayClusterSpec:", "rayVersions"),
        (JOB, "spec/backoffLimit", "2", "spec.backoffLimit:", "'2'"),
        (VMS, "head_start_ray_commands", "->head_start_commands", "top:", "head_start_commands"),
        (VMS, "available_node_types/gpu/max_workers", "4", "available_node_types.gpu.max_workers:", "'4'"),
    ],
)
def test_a_typo_is_found(document, path, value, place, named):
    assert list(problems_of(document)) == []
    problems = list(problems_of(changed(document, path, value)))
    assert any(place in problem and named in problem for problem in problems), problems


def test_check_names_file_and_key(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    with wrong.open("w") as file:
        YAML(typ="safe").dump(changed(CLUSTER, "spec/rayVersion", "->rayVersoin"), file)
    with pytest.raises(ConfigError, match=r"wrong\.yaml: spec: .*rayVersoin"):
        check_file(str(wrong))


def test_a_file_of_nothing_and_one_that_is_no_yaml_are_not_valid(tmp_path):
    file = tmp_path / "a.yaml"
    for text, message in (
        ("# only a comment\n", "a.yaml: holds nothing"),
        ("a: [1\n", "a.yaml:2: not valid YAML: expected"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            check_file(str(file))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("pretrain_06b:lt2-hybrid", "lt2-pretrain-06b-lt2-hybrid"), ("recipes/My.py:run", "lt2-recipes-my-py-run"),
     ("a" * 80, f"lt2-{'a' * 43}")],
)  # fmt: skip
def test_any_recipe_makes_a_name_that_kubernetes_takes(recipe, name):
    job = SETTINGS.job.model_copy(update={"recipe": recipe})
    settings = SETTINGS.model_copy(update={"name": "lt2", "job": job})
    assert ray_job(settings)["metadata"]["name"] == name


def test_rays_autoscaler_reads_the_pools_as_meant():
    """Ray's own translation of the resource: what the autoscaler believes each node offers."""
    resource = copy.deepcopy(CLUSTER)
    types = _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]
    assert types["headgroup"]["resources"].items() >= {"CPU": 0, "tune_driver": 1000}.items()
    assert types["gpu"]["resources"].items() >= {"CPU": 176, "GPU": 8}.items()
    assert (types["gpu"]["min_workers"], types["gpu"]["max_workers"]) == (1, 4)
    assert types["data"]["resources"]["CPU"] == 30
    assert "GPU" not in types["data"]["resources"]


def test_the_jobs_command_is_one_that_lt2_understands():
    command = shlex.split(JOB["spec"]["entrypoint"])
    assert command[:4] == [SETTINGS.python, "-P", "-m", "lt2_workflows.cli"]
    sets = [command[i + 1] for i, part in enumerate(command) if part == "--set"]
    workflow = load_workflow(command[5], sets)
    assert workflow.configs["pretrain"].resources.num_workers == 8


def test_versions_are_those_of_this_environment():
    assert SETTINGS.ray_version == ray.__version__
    assert SETTINGS.image.endswith(f":{importlib.metadata.version('lt2')}")
    assert f"ray:{ray.__version__}-" in SETTINGS.base_image


def test_the_slurm_script_is_valid_shell():
    subprocess.run(["bash", "-n", str(CLUSTERS / "lt2.sbatch")], check=True)


def test_a_credential_in_the_settings_is_refused(tmp_path):
    text = (CLUSTERS / "settings.yaml").read_text()
    (tmp_path / "s.yaml").write_text(text.replace("s3://lt2/", "s3://key:secret@lt2/"))
    with pytest.raises(ConfigError, match="s3.root: .*holds credentials"):
        read_settings(str(tmp_path / "s.yaml"))
    (tmp_path / "s.yaml").write_text(text.replace("max_nodes", "max_node", 1))
    with pytest.raises(ConfigError, match="gpu.max_node: unknown key 'max_node'; did you mean 'max_nodes'"):
        read_settings(str(tmp_path / "s.yaml"))


def test_the_dashboards_other_metrics_are_rays():
    """Ours are scraped from a running job in test_submit.py; these are in the dashboards that Ray itself ships."""
    folder = Path(ray.__file__).parent / "dashboard/modules"
    known = "".join(
        path.read_text() for path in [*folder.glob("metrics/dashboards/*.py"), *folder.glob("reporter/*.py")]
    )
    names = {name for _, expression, _, _ in PANELS for name in re.findall(r"ray_\w+", expression)}
    others = {name for name in names if not name.startswith("ray_lt2_")}
    assert len(others) == 5
    assert [name for name in others if name.removeprefix("ray_") not in known] == []


def test_the_dashboard_and_the_docs_name_the_gauges_there_are():
    ours = {STEP, TOKENS, RHO_NORM, PROGRESS, *GAUGES.values()}
    expressions = " ".join(expression for _, expression, _, _ in PANELS)
    shown = set(re.findall(r"ray_(lt2_\w+)", expressions))
    assert shown <= ours
    assert {"lt2_train_mfu", "lt2_train_lr", "lt2_train_data_wait_fraction", RHO_NORM, PROGRESS} <= shown
    page = (CLUSTERS.parent.parent / "docs/clusters.md").read_text()
    for name in ours:
        stem = name.removeprefix("lt2_train")
        assert f"`ray_{name}`" in page or f"`{stem}`" in page, name


def test_the_dashboard_is_json_with_a_panel_for_each_question():
    shown = json.loads((CLUSTERS / "grafana.json").read_text())
    titles = [panel["title"] for panel in shown["panels"]]
    assert {"Loss", "Share of a step spent waiting for data", "Workflow steps: fraction done"} <= set(titles)
