"""Jobs on a real Ray head with token authentication, from a folder that is not the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from lt2_platform.storage import Storage
from lt2_workflows.cluster.grafana import PANELS
from tests.platform.train.packed import write_dataset
from tests.workflows.conftest import wait_until
from tests.workflows.remote_head import Head, ray_cluster

pytestmark = pytest.mark.ray

REPOSITORY = Path(__file__).resolve().parents[2]
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIA-canary-access-key",
    "AWS_SECRET_ACCESS_KEY": "canary-secret-key-of-s3",
    "AWS_SESSION_TOKEN": "canary-session-token",
    "WANDB_API_KEY": "canary-wandb-key",
    "HF_TOKEN": "canary-hub-token",
}


@pytest.fixture(scope="module")
def head():
    with ray_cluster() as started:
        yield started


class Client:
    """A user's shell in a folder of their own, holding only their recipe."""

    def __init__(self, head: Head, folder: Path):
        self.head, self.folder, self.root = head, folder, folder / "storage"
        self.trace = folder / "trace"
        self.trace.mkdir()
        shutil.copy(Path(__file__).with_name("remote_steps.py"), folder / "mine.py")

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "lt2_workflows.cli", *arguments, "--address", self.head.address]

    def submit(self, *settings: str) -> list[str]:
        values = [f"only.trace={self.trace}", *settings]
        sets = [part for value in values for part in ("--set", value)]
        return self.command("submit", "mine.py:one", "--storage", str(self.root), *sets)

    def run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.head.client_environment(**environment),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def done(self) -> dict:
        storage = Storage(str(self.root))
        (path,) = storage.glob("steps/only-*/done.json")
        return storage.read_json(path)

    def pid(self, name: str) -> int:
        mark = self.trace / name
        wait_until(lambda: mark.exists() and mark.read_text(), f"the {name} process", 90)
        return int(mark.read_text())


@pytest.fixture
def client(head, tmp_path) -> Client:
    return Client(head, tmp_path)


def holding(folder: Path, texts: list[str]) -> list[Path]:
    """The files under `folder` that contain any of the texts."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and any(text.encode() in path.read_bytes() for text in texts)
    ]


def checked_out() -> str | None:
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


@pytest.mark.timeout(600)
def test_a_job_and_its_trials_run_the_snapshot_show_their_log_and_carry_no_secret(client):
    commits = {checked_out()}
    command = client.command("submit", "mine.py:swept", "--storage", str(client.root))
    done = client.run([*command, "--set", f"only.steps.only.trace={client.trace}"], **SECRETS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only       done" in done.stdout
    job = done.stderr.splitlines()[0].split()[0]
    assert job.startswith("swept-")
    assert job.endswith("-attempt1")

    storage = Storage(str(client.root))
    (trial,) = (storage.read_json(path) for path in storage.glob("steps/only-*/out/trials/*.json"))
    assert trial["state"] == "done", trial["error"]
    result = storage.read_json(f"steps/{trial['steps']['only']}/done.json")["result"]
    for process in ("attempt", "worker"):
        assert Path(result[process]).is_relative_to(client.head.folder), "not the shipped code"
    made = {storage.read_json(path)["provenance"]["git"] for path in storage.glob("steps/only-*/done.json")}
    assert made <= commits | {checked_out()}  # someone may have committed meanwhile

    shown = client.run([sys.executable, "-c", DESCRIBE, client.head.address, job])
    described = json.loads(shown.stdout)
    assert set(described["runtime_env"]) == {"working_dir", "py_modules", "env_vars"}
    assert set(described["runtime_env"]["env_vars"]) == {"PYTHONSAFEPATH", "RAY_JOB_STOP_WAIT_TIME_S"}
    token = client.head.token.read_text()
    assert not [value for value in (*SECRETS.values(), token) if value in shown.stdout]
    # The whole session too: packages, logs, Ray's own records; the token is where we put it and nowhere else.
    assert holding(client.head.folder, [*SECRETS.values()]) == []
    assert holding(client.head.folder, [token]) == [client.head.token]
    assert holding(client.root, [*SECRETS.values(), token]) == []
    assert holding(client.root, [job.rpartition("-attempt")[0]]), "the search finds nothing at all"


DESCRIBE = """
import json, sys
from ray.job_submission import JobSubmissionClient
print(JobSubmissionClient(sys.argv[1]).get_job_info(sys.argv[2]).json())
"""


def ours() -> set[str]:
    """The dashboard's metrics that LT2 itself must publish."""
    names = {name for _, expression, _, _ in PANELS for name in re.findall(r"ray_lt2_\w+", expression)}
    assert len(names) == 14
    return names


def scraped(head: Head) -> set[str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(head.metrics, timeout=10).read().decode()
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_a_job_outlives_its_client_and_cancelling_frees_everything(client):
    (client.folder / "own").mkdir()
    (client.folder / "own/part.py").touch()
    submit = client.submit("only.pause_s=60", "only.source=own/part.py")
    submitting = subprocess.Popen(submit, cwd=client.folder, env=client.head.client_environment())
    pids = [client.pid("attempt"), client.pid("worker")]
    submitting.kill()
    submitting.wait(10)
    seen: set[str] = set()  # Ray gives out a gauge once for each time it is set
    deadline = time.monotonic() + 60
    while not seen >= ours():
        assert time.monotonic() < deadline, f"Prometheus never saw {ours() - seen}"
        time.sleep(1.0)
        seen |= scraped(client.head)
    again = client.run(submit)
    assert again.returncode == 2
    assert "is running; `lt2 logs one-" in again.stderr
    assert all(psutil.pid_exists(pid) for pid in pids), "the job ended with its client"

    stopped = client.run(client.command("cancel", "one"))
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the job's processes", 10)
    storage = Storage(str(client.root))
    (lease,) = storage.glob("steps/only-*/attempts/1/lease.json")
    wait_until(lambda: storage.read_json(lease)["released"], "the release of the lease", 20)
    assert client.run(client.command("logs", "one")).returncode == 143

    (client.folder / "mine.py").unlink()  # what resume needs is on record
    (client.folder / "own/part.py").unlink()
    (client.trace / "go").touch()
    resumed = client.run(client.command("resume", "one", "--storage", str(client.root)))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "-attempt2" in resumed.stderr
    done = client.done()
    assert done["attempt"] == 2
    for process in ("attempt", "worker"):
        assert Path(done["result"][process]).is_relative_to(client.head.folder), "not the shipped code"


def test_cancelling_lets_training_save(client):
    command = client.command("submit", "mine.py:training", "--storage", str(client.root), "--no-follow")
    data = write_dataset(client.folder / "data")
    submitted = client.run([*command, "--set", f"train.data={data}", "--set", "train.resources.data_reader=direct"])
    assert submitted.returncode == 0, submitted.stderr
    wait_until(lambda: list(client.root.glob("steps/train-*/out/progress.json")), "training", 200)
    stopped = client.run(client.command("cancel", "training"))
    assert stopped.returncode == 0, stopped.stderr
    (saved,) = client.root.glob("steps/train-*/out/checkpoints/*/COMPLETE")
    step = int(saved.parent.name.removeprefix("step-"))
    (attempt,) = client.root.glob("steps/train-*/attempts/1")
    state, lease = (json.loads((attempt / f"{name}.json").read_text()) for name in ("state", "lease"))
    error = f"stopped as asked after step {step} of 1000000, which is saved"
    assert (state["state"], state["error"], lease["released"]) == ("interrupted", error, True)


def test_the_exit_code_is_the_jobs(client):
    failed = client.run(client.submit("only.code=7", "only.resources.retries=0"))
    assert failed.returncode == 1
    assert "ValueError: asked to fail with 7" in failed.stdout
    assert "WebSocket" not in failed.stderr
    absent = client.run([*client.submit("only.code=8"), "--python", "/no/such/python"])
    assert absent.returncode == 127
    assert "/no/such/python" in absent.stdout


def test_a_stranger_is_refused_in_one_line(client):
    other = client.folder / "other-token"
    other.write_text("0" * 64)
    refused = client.run(client.submit(), RAY_AUTH_TOKEN_PATH=str(other))
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert "RAY_AUTH_TOKEN_PATH" in line


def test_plain_ray_job_submit(client):
    """As docs/clusters.md has it, with the code in the interpreter's environment."""
    (client.folder / "job").mkdir()
    shutil.copy(client.folder / "mine.py", client.folder / "job")
    ray = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", client.head.address]
    ray += ["--submission-id", f"plain-{os.getpid()}-attempt1", "--working-dir", "job", "--"]
    run = [sys.executable, "-P", "-m", "lt2_workflows.cli", "run", "mine.py:one", "--storage", str(client.root)]
    done = client.run([*ray, *run, "--set", f"only.trace={client.trace}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only       done" in done.stdout
    assert client.done()["attempt"] == 1
