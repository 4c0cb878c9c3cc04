"""All files of a cluster from its settings, as {relative path: text}."""

from __future__ import annotations

import io
import json
from typing import Any

from lt2_workflows.cluster.grafana import dashboard
from lt2_workflows.cluster.kuberay import ray_cluster, ray_job
from lt2_workflows.cluster.settings import ClusterSettings
from lt2_workflows.cluster.slurm import batch_script
from lt2_workflows.cluster.vms import autoscaler

NOTE = "Made by `lt2 cluster render`: change settings.yaml and render again."

DOCKERFILE = """\
# {note}
# In the repository: docker build -f platform/clusters/Dockerfile -t {image} .
FROM {base_image}
WORKDIR /opt/lt2
COPY --chown=ray pyproject.toml README.md LICENSE ./
COPY --chown=ray lt2 lt2
COPY --chown=ray platform/lt2_platform platform/lt2_platform
COPY --chown=ray workflows/lt2_workflows workflows/lt2_workflows
COPY --chown=ray dashboards/lt2_dashboards dashboards/lt2_dashboards
# constraints.txt is for CPU machines.
RUN {python} -m pip install --no-cache-dir '.[fla]' && \\
    {python} -c "import ray; assert ray.__version__ == '{ray_version}', ray.__version__"
# flash-attn is compiled, with the nvcc of a base image whose CUDA is torch's: docker build --build-arg FLASH_ATTN=1.
# Without it softmax attention runs on PyTorch's flash kernels.
ARG FLASH_ATTN=0
RUN if [ "$FLASH_ATTN" = 1 ]; then \\
    {python} -m pip install --no-cache-dir setuptools ninja packaging psutil && \\
    {python} -m pip install --no-cache-dir --no-build-isolation flash-attn; fi
# Not the source tree: a folder called platform/ must not be where jobs start.
WORKDIR /home/ray
"""


def render(settings: ClusterSettings) -> dict[str, str]:
    """Manifests, scripts and dashboards; the same settings give the same bytes."""
    return {
        "Dockerfile": DOCKERFILE.format(
            note=NOTE,
            image=settings.image,
            base_image=settings.base_image,
            python=settings.python,
            ray_version=settings.ray_version,
        ),
        "raycluster.yaml": _yaml(ray_cluster(settings)),
        "rayjob.yaml": _yaml(ray_job(settings)),
        "autoscaler.yaml": _yaml(autoscaler(settings)),
        "lt2.sbatch": batch_script(settings),
        "prometheus.yaml": _yaml(_prometheus()),
        "grafana.json": json.dumps(dashboard(), indent=1) + "\n",
    }


def _prometheus() -> dict[str, Any]:
    # Ray lists the metrics address of each of its nodes there, and keeps the list up to date.
    discovery = [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"], "refresh_interval": "15s"}]
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": discovery}],
    }


def _yaml(value: dict[str, Any]) -> str:
    from ruamel.yaml import YAML

    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    writer.width = 4096
    text = io.StringIO()
    writer.dump(value, text)
    return f"# {NOTE}\n{text.getvalue()}"
