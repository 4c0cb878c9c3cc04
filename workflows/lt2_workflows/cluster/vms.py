"""The cluster file of Ray's own autoscaler (`ray up`) for virtual machines on AWS."""

from __future__ import annotations

import shlex
from typing import Any

from lt2_workflows.cluster.kuberay import TUNE_DRIVERS, ray_environment
from lt2_workflows.cluster.settings import ClusterSettings, Pool

TOKEN = "~/.lt2/ray_token"


def autoscaler(settings: ClusterSettings) -> dict[str, Any]:
    """A cluster file with an on-demand head, a GPU pool and a data pool."""
    vms = settings.vms
    variables = ray_environment(settings) | {
        "RAY_AUTH_MODE": "token",
        "LT2_STORAGE": settings.s3.root,
        "AWS_DEFAULT_REGION": settings.s3.region,
    }
    if settings.s3.endpoint:
        variables["AWS_ENDPOINT_URL"] = settings.s3.endpoint
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    prefix = f"export {exports} RAY_AUTH_TOKEN_PATH=$HOME/.lt2/ray_token; ulimit -n 65536;"
    return {
        "cluster_name": settings.name,
        "max_workers": settings.gpu.max_nodes + settings.data.max_nodes,
        "idle_timeout_minutes": 10,
        "provider": {"type": "aws", "region": vms.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": vms.ssh_user},
        "docker": {
            "image": settings.image,
            "container_name": "lt2",
            "pull_before_run": True,
            "run_options": [f"--shm-size={settings.gpu.shm_gib}g", "--ulimit nofile=65536:65536"],
        },
        "available_node_types": {
            "head": {
                "resources": {"CPU": 0, "tune_driver": TUNE_DRIVERS},
                "node_config": _machine(settings, settings.head.machine, spot=False),
                "max_workers": 0,
            },
            "gpu": _node_type(settings, settings.gpu),
            "data": _node_type(settings, settings.data),
        },
        "head_node_type": "head",
        # Ray refuses a token file that others can read.
        "file_mounts": {TOKEN: vms.token_file},
        "setup_commands": [f"chmod 600 {TOKEN}"],
        "head_start_ray_commands": [
            "ray stop",
            f"{prefix} ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml "
            "--dashboard-host=127.0.0.1 --metrics-export-port=8080",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            f"{prefix} ray start --address=$RAY_HEAD_IP:6379 --metrics-export-port=8080",
        ],
    }


def _node_type(settings: ClusterSettings, pool: Pool) -> dict[str, Any]:
    resources = {"CPU": pool.cpus} | ({"GPU": pool.gpus} if pool.gpus else {})
    return {
        "resources": resources,
        "node_config": _machine(settings, pool.machine, pool.spot),
        "min_workers": pool.min_nodes,
        "max_workers": pool.max_nodes,
    }


def _machine(settings: ClusterSettings, machine: str, spot: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"InstanceType": machine, "ImageId": settings.vms.machine_image}
    if settings.s3.instance_profile:
        config["IamInstanceProfile"] = {"Arn": settings.s3.instance_profile}
    if spot:
        config["InstanceMarketOptions"] = {"MarketType": "spot"}
    return config
