"""KubeRay resources: a RayCluster that stays, and a RayJob that brings its own cluster and takes it down."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from lt2_workflows.cluster.settings import ClusterSettings, Head, Pool

TUNE_DRIVERS = 1000  # trials wait for this resource of the head, which costs nothing


def ray_cluster(settings: ClusterSettings) -> dict[str, Any]:
    """A RayCluster, autoscaled between the pools' limits."""
    return _resource(settings, "RayCluster", settings.name, _cluster_spec(settings))


def ray_job(settings: ClusterSettings) -> dict[str, Any]:
    """A RayJob that runs the recipe; each retry is a new cluster, which skips the finished steps."""
    job = settings.job
    command = [settings.python, "-P", "-m", "lt2_workflows.cli", "run", job.recipe, "--storage", settings.s3.root]
    command += [part for item in job.set for part in ("--set", item)]
    spec = {
        "entrypoint": shlex.join(command),
        "submissionMode": "K8sJobMode",
        "submitterConfig": {"backoffLimit": 0},  # a lost submitter must not run the recipe a second time
        "backoffLimit": job.retries,
        "activeDeadlineSeconds": job.deadline_hours * 3600,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": _cluster_spec(settings),
    }
    # A recipe may be pretrain_06b:ROW or a file's path; KubeRay takes names of RayJobs up to 47 characters.
    recipe = re.sub(r"[^a-z0-9]+", "-", job.recipe.lower())
    return _resource(settings, "RayJob", f"{settings.name}-{recipe}"[:47].rstrip("-"), spec)


def _resource(settings: ClusterSettings, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": settings.namespace}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _cluster_spec(settings: ClusterSettings) -> dict[str, Any]:
    return {
        "rayVersion": settings.ray_version,
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300},
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {
                "num-cpus": "0",
                "dashboard-host": "0.0.0.0",
                "resources": f"'{json.dumps({'tune_driver': TUNE_DRIVERS})}'",
            },
            "template": _pod(settings, "ray-head", settings.head),
        },
        "workerGroupSpecs": [_group(settings, "gpu", settings.gpu), _group(settings, "data", settings.data)],
    }


def _group(settings: ClusterSettings, name: str, pool: Pool) -> dict[str, Any]:
    params = {"num-cpus": str(pool.cpus)} | ({"num-gpus": str(pool.gpus)} if pool.gpus else {})
    return {
        "groupName": name,
        "replicas": pool.min_nodes,
        "minReplicas": pool.min_nodes,
        "maxReplicas": pool.max_nodes,
        "rayStartParams": params,
        "template": _pod(settings, "ray-worker", pool),
    }


def _pod(settings: ClusterSettings, name: str, node: Head | Pool) -> dict[str, Any]:
    pool = node if isinstance(node, Pool) else None
    amounts: dict[str, str] = {"cpu": str(node.cpus), "memory": f"{node.memory_gib}Gi"}
    if pool and pool.gpus:
        amounts["nvidia.com/gpu"] = str(pool.gpus)
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "env": _environment(settings),
        # The same for both: a Ray node that is evicted or throttled stalls every other.
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if pool is None:
        ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
        container["ports"] = [{"containerPort": port, "name": port_name} for port_name, port in ports.items()]
    if settings.s3.secret:
        container["envFrom"] = [{"secretRef": {"name": settings.s3.secret}}]
    shm = {"medium": "Memory", "sizeLimit": f"{pool.shm_gib if pool else 8}Gi"}
    spec: dict[str, Any] = {"containers": [container], "volumes": [{"name": "shm", "emptyDir": shm}]}
    if settings.s3.service_account:
        spec["serviceAccountName"] = settings.s3.service_account
    if pool:
        spec["terminationGracePeriodSeconds"] = 60
        if pool.node_selector:
            spec["nodeSelector"] = dict(pool.node_selector)
        if pool.gpus:
            spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": {"app.kubernetes.io/part-of": settings.name}}, "spec": spec}


def _environment(settings: ClusterSettings) -> list[dict[str, str]]:
    values = ray_environment(settings) | {"LT2_STORAGE": settings.s3.root, "AWS_DEFAULT_REGION": settings.s3.region}
    if settings.s3.endpoint:
        values["AWS_ENDPOINT_URL"] = settings.s3.endpoint
    return [{"name": name, "value": value} for name, value in values.items()]


def ray_environment(settings: ClusterSettings) -> dict[str, str]:
    """What Ray's processes need on every kind of cluster: the Train page, Grafana, and time to save before an end."""
    return {
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
        "RAY_PROMETHEUS_HOST": settings.metrics.prometheus,
        "RAY_GRAFANA_HOST": settings.metrics.grafana,
    }
