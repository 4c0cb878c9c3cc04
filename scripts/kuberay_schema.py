"""Derive workflows/lt2_workflows/cluster/kuberay.schema.json from KubeRay's own RayJob resource definition.

    python scripts/kuberay_schema.py ray.io_rayjobs.yaml[.gz] > workflows/lt2_workflows/cluster/kuberay.schema.json

Kept: everything of the v1 RayJob spec (it contains the RayCluster spec), except descriptions and the parts of a pod
that no file of ours uses. Objects with known properties allow no others, so that a typo is an error as it is on a
strict server.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

POD = {"containers", "imagePullSecrets", "nodeSelector", "restartPolicy", "runtimeClassName", "serviceAccountName"}
POD |= {"priorityClassName", "securityContext", "terminationGracePeriodSeconds", "tolerations", "volumes"}
CONTAINER = {"args", "command", "env", "envFrom", "image", "imagePullPolicy", "name", "ports", "resources"}
CONTAINER |= {"securityContext", "volumeMounts", "workingDir"}
VOLUME = {"configMap", "emptyDir", "hostPath", "name", "persistentVolumeClaim", "secret"}
NOT_USED = {"networkPolicy", "historyServerOptions", "ingressOptions", "headService", "tlsOptions"}


def derive(definition: dict[str, Any]) -> dict[str, Any]:
    """{"RayJob": schema of its spec, "RayCluster": likewise}, sharing one pod template in $defs."""
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    job = _strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    cluster = job["properties"]["rayClusterSpec"]
    for name in NOT_USED:
        cluster["properties"].pop(name, None)
        cluster["properties"]["headGroupSpec"]["properties"].pop(name, None)
    pod = cluster["properties"]["headGroupSpec"]["properties"]["template"]
    _keep(pod["properties"]["spec"], POD)
    _keep(pod["properties"]["spec"]["properties"]["containers"]["items"], CONTAINER)
    _keep(pod["properties"]["spec"]["properties"]["volumes"]["items"], VOLUME)
    pod["properties"]["metadata"] = _strings("annotations", "labels")
    shared = {"$ref": "#/$defs/pod"}
    cluster["properties"]["headGroupSpec"]["properties"]["template"] = shared
    cluster["properties"]["workerGroupSpecs"]["items"]["properties"]["template"] = shared
    job["properties"]["submitterPodTemplate"] = shared
    job["properties"]["rayClusterSpec"] = {"$ref": "#/$defs/RayCluster"}
    return {"$defs": {"RayJob": job, "RayCluster": cluster, "pod": pod}}


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in ("description", "default", "format")}
    kept = {key: value for key, value in kept.items() if not key.startswith("x-kubernetes")}
    kept = {key: _strict(value) for key, value in kept.items()}
    if "properties" in node:  # also when a property itself is called "description"
        kept["properties"] = {name: _strict(value) for name, value in node["properties"].items()}
        kept.setdefault("additionalProperties", False)
    if node.get("x-kubernetes-int-or-string"):
        kept.pop("type", None)
    return kept


def _keep(schema: dict[str, Any], names: set[str]) -> None:
    missing = names - schema["properties"].keys()
    assert not missing, missing
    schema["properties"] = {name: schema["properties"][name] for name in sorted(names)}


def _strings(*names: str) -> dict[str, Any]:
    mapping = {"type": "object", "additionalProperties": {"type": "string"}}
    return {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(names, mapping)}


def main() -> None:
    path = Path(sys.argv[1])
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    definition = YAML(typ="safe").load(text)
    source = {
        "definition": definition["metadata"]["name"],
        "version": "ray.io/v1",
        "generator": definition["metadata"]["annotations"],
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    print(json.dumps({"$comment": "Made by scripts/kuberay_schema.py", "source": source} | derive(definition)))


if __name__ == "__main__":
    main()
