"""Whoever asked for a signal keeps it, and hears of one that arrives while Ray has its own handler in place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lt2_platform.signals import kept
from tests.ranks import PATHS

PATH = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}


class Heard(KeyboardInterrupt):
    pass


def ours(number, frame):
    raise Heard


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGTERM, ours)
    yield
    signal.signal(signal.SIGTERM, before)


def rays(number, frame):  # as ray.init's
    sys.exit(number)


def starting_ray():
    with kept(signal.SIGTERM):
        signal.signal(signal.SIGTERM, rays)
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("handler")
def test_a_signal_within_the_block_reaches_the_handler_from_before():
    with pytest.raises(Heard):
        starting_ray()
    assert signal.getsignal(signal.SIGTERM) is ours


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("code", [1, None, "a reason"])
def test_another_exit_stays_one(code):
    with pytest.raises(SystemExit) as stop, kept(signal.SIGTERM):
        sys.exit(code)
    assert stop.value.code == code


AFTER = """
import signal, sys, time
from lt2_platform.signals import kept
with kept(signal.SIGTERM):
    signal.alarm(1)
time.sleep(1.5)
print("alive")
"""


def test_an_alarm_that_rays_library_has_set_for_a_signal_aborts_nobody():
    ran = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True, env=os.environ | PATH)
    assert (ran.returncode, ran.stdout) == (0, "alive\n")


def test_a_signal_that_nobody_asked_for_ends_the_process_by_rays_code():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stop:
            starting_ray()
        assert stop.value.code == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
