"""Every node of a Ray cluster: that it runs a task, has the same packages, and reaches the same store."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator
from typing import Any

from lt2.packages import version_of
from lt2_platform.doctor.finding import Finding
from lt2_platform.storage import Storage
from lt2_platform.wording import one_line

PART = "ray"
SAME = ("lt2", "torch", "ray", "transformers", "pyarrow", "flash-linear-attention")
PATIENCE_SECONDS = 60.0


def nodes(storage: Storage) -> Iterator[Finding]:
    """A finding for each living node of the cluster that this process is connected to; all are asked at once."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = f".lt2-doctor-{uuid.uuid4().hex}"
    storage.write_bytes(probe, b"")
    task = ray.remote(num_cpus=0, max_retries=0)(_task())
    try:
        asked = []
        for node in (node for node in ray.nodes() if node["Alive"]):
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked.append((node, task.options(scheduling_strategy=place).remote(storage.root, probe, SAME)))
        for node, answer in asked:
            name = f"node {node['NodeManagerAddress']}"
            has = {kind: node["Resources"].get(kind, 0) for kind in ("CPU", "GPU")}
            what = ", ".join(f"{count:g} {kind}{'s' if count != 1 else ''}" for kind, count in has.items() if count)
            try:
                yield told(name, what or "no CPUs", ray.get(answer, timeout=PATIENCE_SECONDS), storage.root)
            except GetTimeoutError:
                yield Finding(PART, name, "PROBLEM", f"no answer within {PATIENCE_SECONDS:.0f} s; check its logs")
            except RayError as error:
                yield Finding(PART, name, "PROBLEM", f"runs no task ({one_line(error)[-300:]})")
    finally:
        storage.delete(probe)


def told(name: str, resources: str, answer: dict[str, Any], root: str) -> Finding:
    """The finding about a node from its answer (see `_task`), compared with this process."""
    if "missing" in answer:
        said = f"cannot import LT2 ({answer['missing']}); install it on every node, or submit jobs with lt2 submit"
        return Finding(PART, name, "PROBLEM", said)
    if "refused" in answer:
        return Finding(PART, name, "PROBLEM", f"every node must reach the storage; this one: {answer['refused']}")
    if not answer["sees"]:
        said = f"does not see what was written to {root} from here; use s3://… or a folder that all nodes mount"
        return Finding(PART, name, "PROBLEM", said)
    ours = versions(SAME)
    off = [
        f"{package} {answer['versions'].get(package)} (here {ours.get(package)})"
        for package in ours | answer["versions"]
        if ours.get(package) != answer["versions"].get(package)
    ]
    if off:
        return Finding(PART, name, "PROBLEM", f"has {', '.join(off)}; give all nodes one image or environment")
    return Finding(PART, name, "ok", f"{resources}, sees {root}")


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version for name in packages if (version := version_of(name))}


def _task() -> Any:
    """A function inside one, so that it is sent whole: on a node without LT2 it can still say so."""

    def look(root: str, probe: str, packages: tuple[str, ...]) -> dict[str, Any]:
        try:
            from lt2.config import ConfigError
            from lt2_platform.doctor import cluster
            from lt2_platform.storage import Storage
            from lt2_platform.storage_errors import STORAGE_ERRORS
        except ImportError as error:
            return {"missing": str(error)}
        try:
            storage = Storage(root)
            storage.check_readable(new=True)
            return {"versions": cluster.versions(packages), "sees": storage.is_file(probe)}
        except (ConfigError, *STORAGE_ERRORS) as error:
            return {"refused": str(error)}

    return look
