"""Kill -9 at chosen and at arbitrary moments, two drivers, frozen holders: the result is always the undisturbed one."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from lt2_platform.storage import Storage
from lt2_workflows import cli
from lt2_workflows.engine import child, executor
from tests.workflows.conftest import Run, wait_until

SLOW = ("second.pause_s=0.1",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run = Run(str(folder / "storage"), folder / "trace")
    code, output = run.finish()
    assert code == 0, output
    return run.results()


def process_is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between opening and reading
        return True


# A step's spec is written before anything runs; its last line just before it returns.
POINTS = ["spec", "first.attempt1", "second.line0", "second.line2", "second.done"]


@pytest.mark.parametrize("point", POINTS)
def test_driver_killed_at_a_point(point, make_run, undisturbed):
    run = make_run(settings=SLOW)
    storage = Storage(run.root)
    reached = {
        "spec": lambda: storage.glob("steps/first-*/spec.json"),
        "second.done": lambda: storage.glob("steps/second-*/done.json"),
    }.get(point, lambda: run.seen(point))
    driver = run.start()
    wait_until(reached, point)
    driver.kill()
    driver.wait()
    code, output = run.finish()
    assert code == 0, output
    assert run.results() == undisturbed


def test_driver_killed_on_s3(s3_root, make_run, undisturbed):
    run = make_run(s3_root, settings=SLOW)
    driver = run.start()
    wait_until(lambda: run.seen("second.line1"), "second.line1")
    driver.kill()
    driver.wait()
    code, output = run.finish()
    assert code == 0, output
    assert run.results() == undisturbed
    log = Storage(s3_root).glob("steps/second-*/attempts/2/log")
    assert b"continues at line 2" in Storage(s3_root).read_bytes(log[0])


def test_driver_killed_again_and_again(make_run, undisturbed):
    run = make_run(settings=("first.pause_s=0.05", *SLOW))
    kills = 0
    for delay in (0.15, 0.3, 0.45, 0.6, 0.9, 1.2):
        driver = run.start()
        time.sleep(delay)
        kills += driver.poll() is None
        driver.kill()
        driver.wait()
    assert kills >= 4
    code, output = run.finish()
    assert code == 0, output
    assert run.results() == undisturbed


def test_attempt_dies_with_its_driver(make_run):
    run = make_run(settings=("first.lines=500", "first.pause_s=0.1"))
    driver = run.start()
    pid = run.pid("first.line0")
    driver.kill()
    driver.wait()
    wait_until(lambda: process_is_gone(pid), "the attempt to follow its driver", timeout_s=2)


def test_attempt_killed_is_retried_by_its_driver_and_not_counted(make_run, undisturbed):
    run = make_run(settings=("second.pause_s=0.1", "second.resources.retries=0"))
    driver = run.start()
    os.kill(run.pid("second.line0"), signal.SIGKILL)
    code, output = run.finish(driver)
    assert code == 0, output
    assert "was lost" in output
    assert run.attempts("second") == 2
    assert run.results() == undisturbed


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_releases_the_lease(number, expected, make_run, undisturbed):
    # With a time-to-live of ten minutes the second run can only start if the lease was released.
    run = make_run(settings=SLOW, options=("--lease-ttl", "600"))
    driver = run.start()
    pid = run.pid("second.line0")
    driver.send_signal(number)
    code, output = run.finish(driver)
    assert code == expected, output
    assert "Traceback" not in output
    assert process_is_gone(pid)
    (state,) = Storage(run.root).glob("steps/second-*/attempts/1/state.json")
    assert Storage(run.root).read_json(state)["state"] == "interrupted"
    code, output = run.finish()
    assert code == 0, output
    assert run.results() == undisturbed


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_step_that_can_saves_before_it_stops(number, expected, make_run, undisturbed):
    run = make_run(settings=("second.pause_s=4", "second.saves=yes"), options=("--lease-ttl", "600"))
    driver = run.start()
    run.pid("second.saves")
    driver.send_signal(number)
    code, output = run.finish(driver)
    assert code == expected, output
    assert "second     saves a checkpoint and stops within 60 s; interrupt again to stop at once\n" in output
    assert "second     interrupted: stopped as asked after line 0, which is saved\n" in output
    code, output = run.finish()
    assert code == 0, output
    assert run.results() == undisturbed


def test_a_second_signal_does_not_wait_for_the_save(make_run):
    run = make_run(settings=("second.pause_s=600", "second.saves=never"), options=("--lease-ttl", "600"))
    driver = run.start()
    pid = run.pid("second.saves")
    driver.send_signal(signal.SIGINT)
    assert any("saves a checkpoint and stops" in line for line in driver.stdout)
    began = time.monotonic()
    assert not process_is_gone(pid)
    driver.send_signal(signal.SIGINT)
    code, output = run.finish(driver)
    assert time.monotonic() - began < 15
    assert code == 130, output
    assert "Traceback" not in output
    assert "second     interrupted: stopped by SIGUSR1\n" in output
    assert process_is_gone(pid)
    (lease,) = Storage(run.root).glob("steps/second-*/attempts/1/lease.json")
    assert Storage(run.root).read_json(lease)["released"]


@pytest.mark.parametrize("ray", ["answers", "is gone"])
def test_a_step_that_never_saves_is_not_waited_for_for_ever(ray, make_run, monkeypatch):
    patience = {"RAY_GONE_S": 0.5, "SAVE_GRACE_S": 3600} if ray == "is gone" else {"SAVE_GRACE_S": 0.5}
    for name, seconds in patience.items():
        monkeypatch.setattr(child, name, seconds)
    run = make_run(steps=("first",), settings=("first.pause_s=600", "first.saves=never"))
    run.trace.mkdir()
    said = []

    def say(event):
        said.append((event["event"], event.get("error")))

    def interrupt():
        run.pid("first.saves")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        if ray == "answers":
            head.listen()
        with pytest.raises(KeyboardInterrupt):
            executor.run(run.workflow(), Storage(run.root), say=say)
    assert said[-2:] == [("stopping", None), ("interrupted", "stopped by SIGUSR1")]


def test_a_sigterm_that_comes_twice_at_once_is_one(monkeypatch):
    now = iter([100.0, 100.0 + cli.TWICE_S / 2, 100.0 + 3 * cli.TWICE_S])
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(now))
    terminate = cli._terminator()
    with pytest.raises(cli.Terminated):
        terminate(signal.SIGTERM, None)
    terminate(signal.SIGTERM, None)
    with pytest.raises(cli.Terminated):
        terminate(signal.SIGTERM, None)


def test_two_drivers_at_once_share_the_work(any_root, make_run, undisturbed):
    # No machine is so busy that a living driver is taken for lost, whose step the other would take over.
    run = make_run(any_root, settings=("first.pause_s=0.1", *SLOW), options=("--lease-ttl", "30"))
    one, two = run.start(), run.start()
    for driver in (one, two):
        code, output = run.finish(driver)
        assert code == 0, output
    assert [run.attempts(name) for name in run.steps] == [1, 1, 1]
    assert run.results() == undisturbed


def test_second_driver_refuses_with_no_wait(make_run):
    run = make_run(settings=("first.lines=100", "first.pause_s=0.1"))
    one = run.start()
    run.pid("first.line0")
    code, output = run.finish(run.start("--no-wait"))
    assert code == 2, output
    assert "lt2: step first is being run by process" in output
    assert "waiting" not in output
    assert "Traceback" not in output
    assert one.poll() is None


def test_lease_of_a_lost_machine_is_taken_over(make_run, undisturbed):
    run = make_run()
    storage, first = Storage(run.root), run.workflow().steps["first"]
    lease = {"attempt": 1, "beat": 7, "host": "gone", "machine": "gone/1/2", "pid": 1, "start": "1", "token": "x"}
    lease |= {"released": False, "time": time.time(), "ttl_s": 1.5}
    storage.write_json(f"{first.folder}/attempts/1/lease.json", lease)
    code, output = run.finish()
    assert code == 0, output
    assert "being run by process 1 on gone" in output
    assert storage.exists(f"{first.folder}/attempts/2/log")
    assert run.results() == undisturbed


def test_an_overtaken_holder_writes_no_more(any_root, make_run, undisturbed):
    # Its next heartbeat, which would end it, is 100 s away.
    run = make_run(any_root, settings=("second.pause_s=2", "second.pause_times=1"), options=("--lease-ttl", "600"))
    storage, second = Storage(run.root), run.workflow().steps["second"]
    driver = run.start()
    run.pid("second.line0")
    lease = storage.read_json(f"{second.folder}/attempts/1/lease.json")
    storage.write_json(f"{second.folder}/attempts/2/lease.json", lease | {"attempt": 2})
    storage.write_bytes(f"{second.folder}/out/lines", b"line 0\nline 1")
    output = []
    for line in driver.stdout:  # until the holder has tried to write
        output.append(line)
        if "was lost" in line:
            break
    assert storage.read_bytes(f"{second.folder}/out/lines") == b"line 0\nline 1"
    assert storage.read_json(f"{second.folder}/attempts/1/state.json")["state"] == "running"
    storage.write_json(f"{second.folder}/attempts/2/lease.json", lease | {"attempt": 2, "released": True})
    code, rest = run.finish(driver)
    assert code == 0, "".join(output) + rest
    assert run.results() == undisturbed


def test_a_frozen_holder_ends_itself_when_it_wakes(make_run, undisturbed):
    # Frozen for longer than its pause, it would write the moment it wakes.
    run = make_run(settings=("second.pause_s=2", "second.pause_times=1"))
    one = run.start()
    frozen = run.pid("second.line0")
    os.kill(frozen, signal.SIGSTOP)
    code, output = run.finish(run.start())
    assert code == 0, output
    os.kill(frozen, signal.SIGCONT)
    wait_until(lambda: process_is_gone(frozen), "the former holder's end", timeout_s=10)
    code, output = run.finish(one)
    assert code == 0, output
    assert run.results() == undisturbed


def test_on_s3_too_a_holder_that_ends_itself_says_so_in_its_log(s3_root, make_run, undisturbed):
    run = make_run(s3_root, settings=("second.pause_s=2", "second.pause_times=1"))
    one = run.start()
    frozen = run.pid("second.line0")
    os.kill(frozen, signal.SIGSTOP)
    code, output = run.finish(run.start())
    assert code == 0, output
    os.kill(frozen, signal.SIGCONT)
    wait_until(lambda: process_is_gone(frozen), "the former holder's end", timeout_s=10)
    storage = Storage(s3_root)
    logs = [storage.read_bytes(path).decode() for path in storage.glob("steps/second-*/attempts/*/log")]
    assert len(logs) == 2
    assert "lt2: attempt ended: another process took over" in logs[0]
    assert "attempt ended" not in logs[1]
    code, output = run.finish(one)
    assert code == 0, output
    assert run.results() == undisturbed
