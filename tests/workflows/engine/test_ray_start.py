"""A Ray that does not start is started again, then one line; signals meanwhile end the command as they do elsewhere."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lt2_platform.step_records import this_process
from lt2_workflows import cli
from lt2_workflows.cluster import nodes
from lt2_workflows.engine import local_ray
from lt2_workflows.engine.endings import INFRASTRUCTURE, classify
from lt2_workflows.engine.local_ray import PREFIX, STARTS, NoRayError, join_ray, ray_for, ray_head
from tests.workflows.conftest import as_at_a_terminal, wait_until

# Word for word Ray's own, with its class.
TIMED_OUT = Exception(
    "The current node timed out during startup. This could happen because some of the raylet failed to startup or the "
    "GCS has become overloaded."
)


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Ray's start fails so often as the list has errors, and leaves a process each time; what it left."""
    import ray

    errors, left = [], []

    def init(**options):
        if errors:
            left.append(
                subprocess.Popen(["bash", "-c", "sleep 600; exit", f"{os.path.dirname(ray.__file__)}/gcs_server"])
            )
            raise errors.pop(0)

    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    yield errors, left
    for process in left:
        process.kill()
        process.wait()


def test_a_start_that_timed_out_is_made_again_without_its_remains(starts, caplog):
    errors, left = starts
    errors.append(TIMED_OUT)
    other = subprocess.Popen(["sleep", "600"])  # a child that is none of Ray's
    assert join_ray() == {"CPU": 2.0}
    assert other.poll() is None
    other.kill()
    other.wait()
    assert [Path(f"/proc/{process.pid}").exists() for process in left] == [False]
    assert "Ray did not start (The current node timed out during startup." in caplog.text


@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_signals_stay_ours_and_only_a_ray_of_our_own_starts_processes(starts, monkeypatch, address):
    import ray
    from ray._private import services

    seen = []

    def init(**options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray puts in a handler of its own
        how = getattr(services.ConsolePopen, "keywords", {})
        seen.append((options.get("address"), options["include_dashboard"], options["log_to_driver"], how))

    monkeypatch.setattr(ray, "init", init)
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    before = signal.getsignal(signal.SIGTERM)
    join_ray()
    assert signal.getsignal(signal.SIGTERM) is before
    assert seen == [(address or "local", False, True, {} if address else {"start_new_session": True})]


def test_a_ray_that_does_not_start_is_one_line(starts, tmp_path, monkeypatch, capfd):
    errors, left = starts
    errors += [TIMED_OUT] * STARTS
    monkeypatch.setattr(sys, "argv", ["lt2", "run", "quickstart", "--storage", str(tmp_path / "s")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert (
        "lt2: Ray did not start on this machine, tried 3 times (The current node timed out during startup. This could "
        "happen because some of the raylet failed to startup or the GCS has become overloaded.); stop what else keeps "
        "it busy, check free memory, disk and process limits, and run the same command again\n"
    ) in capfd.readouterr().err
    assert [Path(f"/proc/{process.pid}").exists() for process in left] == [False] * STARTS
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_ray_that_does_not_answer_is_lost_infrastructure(starts, monkeypatch, capsys):
    errors, _ = starts
    errors += [
        RuntimeError("Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n…")
    ] * 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    line = r"no Ray answers at 10.0.0.1:6379 \(Failed to connect to GCS.\); check that it still runs there"
    with pytest.raises(NoRayError, match=f"^{line}$") as failure:
        join_ray()
    assert classify(failure.value) == INFRASTRUCTURE
    assert nodes.main("10.0.0.1:6379", "1", "a") == 1
    assert capsys.readouterr().err.startswith("lt2: no Ray answers at 10.0.0.1:6379 (")


def test_what_ends_while_ray_is_imported_leaves_no_folder(starts, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError), ray_head(2):
        pass
    assert not list(tmp_path.glob(f"{PREFIX}*"))


@pytest.fixture
def head(monkeypatch, tmp_path):
    """What `ray_head` starts its Ray with, where nothing is started."""
    import ray

    options = []
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local_ray, "_start", lambda **given: options.append(given))
    monkeypatch.setattr(local_ray, "_stop", lambda: options.append("stopped"))
    monkeypatch.setattr(local_ray, "_read_token_again", lambda: options.append(os.environ.get("RAY_AUTH_TOKEN_PATH")))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    return options


def test_a_head_is_found_and_entered_by_its_environment_alone_and_leaves_nothing(head, tmp_path):
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / local_ray.OWNER).write_text(json.dumps(this_process() | {"start": "long ago"}))
    with ray_head(3, log_to_driver=True) as environment:
        (folder,) = tmp_path.iterdir()  # nothing is left of the dead driver
        token = folder / "token"
        assert environment == {**os.environ, "RAY_ADDRESS": "here:1"}
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", str(token))
        assert (len(token.read_text()), token.stat().st_mode & 0o777) == (64, 0o600)
        ours = [environment[name] for name in (local_ray.WATCHER, local_ray.POLLS, local_ray.PRESTART)]
        assert ours == ["0", "0.5", "0"]
        assert "RAY_ADDRESS" not in os.environ
    where = {"num_cpus": 3, "log_to_driver": True, "_temp_dir": str(folder), "logging_level": logging.WARNING}
    assert head == [str(token), where, "stopped", None]  # Ray reads the token when it is set, and that it is gone
    assert not any(name.startswith("RAY_") for name in os.environ)
    assert list(tmp_path.iterdir()) == []


def test_a_token_of_the_users_own_is_used_or_put_back(head, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "theirs")
    with ray_head(1) as environment:
        assert environment["RAY_AUTH_TOKEN_PATH"] != "theirs"  # which is not asked for: nothing says the mode
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "theirs"
    assert local_ray.WATCHER not in os.environ
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv(local_ray.WATCHER, "1")
    monkeypatch.setenv(local_ray.POLLS, "7")
    monkeypatch.setenv(local_ray.PRESTART, "1")
    with ray_head(1) as environment:
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", "theirs")
        theirs = [environment[name] for name in (local_ray.WATCHER, local_ray.POLLS, local_ray.PRESTART)]
        assert theirs == ["1", "7", "1"]
    assert os.environ[local_ray.WATCHER] == "1"


def test_rays_processes_start_in_sessions_of_their_own(monkeypatch):
    from ray._private import services

    started = []

    def popen(command, **how):
        started.append(how)
        raise OSError("no such raylet")

    monkeypatch.setattr(services, "ConsolePopen", popen)
    with pytest.raises(OSError, match="no such raylet"), local_ray._out_of_our_group():
        services.ConsolePopen(["raylet"])
    assert started == [{"start_new_session": True}]
    assert services.ConsolePopen is popen


def test_a_command_joins_the_cluster_it_is_told_of_or_starts_a_ray_with_places_enough(head, monkeypatch):
    joined = []
    monkeypatch.setattr(local_ray, "connect", lambda address, **options: joined.append(address))
    monkeypatch.setattr(local_ray, "leave_ray", lambda: joined.append("left"))
    monkeypatch.setattr(local_ray, "usable", lambda: 2)
    for workers, cpus in ((1, 2), (5, 5)):
        with ray_for(workers):
            assert head[-1]["num_cpus"] == cpus
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    monkeypatch.setattr(local_ray, "unanswered", lambda address: "")
    with pytest.raises(KeyError), ray_for(5):
        raise KeyError
    assert joined == ["head:1", "left"]
    monkeypatch.setattr(local_ray, "unanswered", lambda address: f"nothing at {address}")
    with pytest.raises(NoRayError, match="^nothing at head:1$"), ray_for(5):
        pass
    assert joined == ["head:1", "left"]


@pytest.mark.ray
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ray_starts(number, expected, tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="lt2-st-"))  # short: Ray's sockets lie below it
    command = [sys.executable, "-m", "lt2_workflows.cli", "run", "quickstart", "--storage", str(tmp_path / "s")]
    driver = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=as_at_a_terminal() | {"TMPDIR": str(folder)},
    )
    try:
        # By then Ray has put its own handlers in place, and waits for its processes.
        wait_until(lambda: list(folder.glob(f"{PREFIX}*/session_*/logs/gcs_server.out")), "Ray's start", timeout_s=120)
        driver.send_signal(number)
        output, _ = driver.communicate(timeout=120)
        assert driver.returncode == expected, output
        assert output.endswith("lt2: stopped; the same command continues from here\n")
        assert "Traceback" not in output
        assert not list(folder.glob(f"{PREFIX}*"))
    finally:
        driver.kill()
        driver.wait()
        shutil.rmtree(folder, ignore_errors=True)
