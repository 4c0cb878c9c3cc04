"""The one settings file of a cluster: what every rendered manifest and script is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, ValidationError

from lt2.config import Config, ConfigError
from lt2.explain import explain


def _no_credentials(value: str) -> str:
    if "://" in value and "@" in value:
        raise ValueError("holds credentials; they come from a secret or a role, never from this file")
    return value


Place = Annotated[str, AfterValidator(_no_credentials)]


class Pool(Config):
    """One kind of node. `cpus` and `memory_gib` are what Ray and the container get of it."""

    min_nodes: int = Field(default=0, ge=0)
    max_nodes: PositiveInt
    cpus: PositiveInt
    memory_gib: PositiveInt
    gpus: int = Field(default=0, ge=0)
    shm_gib: PositiveInt = Field(default=16, description="/dev/shm: Ray's object store and NCCL live there")
    node_selector: dict[str, str] = {}
    machine: str = Field(description="the cloud's machine type, for VMs")
    spot: bool = False


class Head(Config):
    """Runs the drivers of jobs and no work of Ray's (num-cpus 0); never a spot machine."""

    cpus: PositiveInt = 8
    memory_gib: PositiveInt = 32
    machine: str


class S3(Config):
    """Where results go. Keys come from a Kubernetes secret with AWS_* entries, or from the role of the account."""

    root: Place = Field(description="s3://bucket/prefix, the storage root")
    endpoint: Place | None = None
    region: str = "us-east-1"
    secret: str | None = None
    service_account: str | None = None
    instance_profile: str | None = Field(default=None, description="ARN, for VMs")


class Job(Config):
    """The recipe of the rendered RayJob and Slurm script."""

    recipe: str = "quickstart"
    set: tuple[str, ...] = ()
    retries: int = Field(default=2, ge=0, description="new clusters after a failure; finished steps are skipped")
    deadline_hours: PositiveInt = 168


class Vms(Config):
    """Ray's own autoscaler on AWS machines."""

    region: str = "us-east-1"
    ssh_user: str = "ubuntu"
    machine_image: str
    token_file: str = Field("~/.lt2/ray_token", description="on this machine; copied to the nodes")


class Slurm(Config):
    """One Slurm allocation with Ray on all of its nodes. `root` is on a file system that all of them share."""

    partition: str
    nodes: PositiveInt
    gpus_per_node: int = Field(default=8, ge=0)
    cpus_per_node: PositiveInt
    hours: PositiveInt = 24
    python: str = Field(description="absolute, of the environment LT2 is installed in")
    root: Place


class Metrics(Config):
    """Where Prometheus and Grafana are, as the head and the browser reach them."""

    prometheus: Place = "http://prometheus:9090"
    grafana: Place = "http://grafana:3000"


class ClusterSettings(Config):
    """Everything that differs between sites."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    namespace: str = "default"
    ray_version: str
    image: str
    base_image: str
    python: str = Field(description="absolute path of the interpreter in the image")
    head: Head
    gpu: Pool
    data: Pool
    s3: S3
    job: Job = Job()
    vms: Vms
    slurm: Slurm
    metrics: Metrics = Metrics()


def read_settings(path: str) -> ClusterSettings:
    """The settings in a YAML 1.2 file. Raises ConfigError naming the key and the fix."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not Path(path).is_file():
        raise ConfigError(f"settings file {path} does not exist; start from platform/clusters/settings.yaml")
    try:
        raw: Any = YAML(typ="safe", pure=True).load(Path(path).read_text())
        return ClusterSettings.model_validate(raw)
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except ValidationError as error:
        raise ConfigError(explain(error, path)) from None
