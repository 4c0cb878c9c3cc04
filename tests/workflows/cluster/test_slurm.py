"""The rendered batch script on a stand-in for Slurm with one node: Ray comes up, the recipe runs, nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from lt2_platform.storage import Storage
from lt2_workflows.cluster.settings import read_settings
from lt2_workflows.cluster.slurm import batch_script
from tests.workflows.conftest import wait_until

pytestmark = pytest.mark.ray

CLUSTERS = Path(__file__).resolve().parents[3] / "platform" / "clusters"

# srun runs the command here, without its own options; the first node is this machine, others never come up.
SRUN = """#!/bin/bash
export SLURMD_NODENAME=node1
while [ $# -gt 0 ]; do
    case "$1" in -w) shift 2;; -x) exec sleep 1000;; -*) shift;; *) break;; esac
done
exec "$@"
"""


@pytest.fixture
def home():
    """Short, since Unix sockets go below it; Ray's processes of the script end with the script."""
    folder = Path(tempfile.mkdtemp(prefix="lt2-s-"))
    (folder / "bin").mkdir()
    scripts = {"srun": SRUN, "scontrol": "#!/bin/bash\necho node1\n", "hostname": "#!/bin/bash\necho 127.0.0.1\n"}
    for name, text in scripts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(home: Path, *settings: str, **variables: str) -> subprocess.Popen:
    site = read_settings(str(CLUSTERS / "settings.yaml"))
    node = {"python": sys.executable, "root": str(home / "storage"), "cpus_per_node": 2, "gpus_per_node": 0}
    script = home / "lt2.sbatch"
    script.write_text(batch_script(site.model_copy(update={"slurm": site.slurm.model_copy(update=node)})))
    shutil.copy(Path(__file__).parents[1] / "remote_steps.py", home / "mine.py")
    (home / "trace").mkdir()
    environment = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "LT2_RAY_OPTIONS": f"--temp-dir={home / 'r'} --ray-client-server-port={22000 + os.getpid() % 1000 * 7} "
        f"--dashboard-agent-listen-port={30000 + os.getpid() % 1000 * 7} --object-store-memory=100000000",
        **variables,
    }
    sets = [part for value in (f"only.trace={home / 'trace'}", *settings) for part in ("--set", value)]
    command = ["bash", str(script), "mine.py:one", *sets]
    return subprocess.Popen(
        command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_slurms_signal_releases_the_lease_and_ends_ray(home):
    batch = start(home, "only.pause_s=60")
    family: list[psutil.Process] = []
    try:
        wait_until(lambda: (home / "trace/worker").exists() or batch.poll() is not None, "the recipe's Ray task", 120)
        assert batch.poll() is None, batch.communicate()[0]
        family = descendants(batch)
        batch.send_signal(signal.SIGTERM)
        output, _ = batch.communicate(timeout=60)
    finally:
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        batch.kill()
    assert batch.returncode == 143, output
    assert len(family) > 5
    assert alive == []
    storage = Storage(str(home / "storage"))
    (lease,) = storage.glob("steps/only-*/attempts/1/lease.json")
    assert storage.read_json(lease)["released"] is True
    assert not (home / f".lt2/slurm-{os.getpid()}").exists(), "the token stayed"


def test_a_recipe_runs_on_the_allocation(home):
    batch = start(home)
    output, _ = batch.communicate(timeout=150)
    assert batch.returncode == 0, output
    assert "only       done" in output


def test_nodes_that_never_join_end_the_job_by_name_before_the_recipe_starts(home):
    (home / "bin/scontrol").write_text("#!/bin/bash\nprintf 'node1\\nnode2\\nnode3\\n'\n")
    batch = start(home, SLURM_JOB_NUM_NODES="3", LT2_NODES_S="2")
    output, _ = batch.communicate(timeout=150)
    assert batch.returncode == 1, output
    assert "after 2 s, 2 of 3 nodes have not joined Ray: node2, node3; " in output
    assert "sbatch --exclude=node2,node3" in output
    assert not (home / "storage").exists(), "the recipe ran"
