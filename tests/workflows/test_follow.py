"""Following and cancelling a job while its cluster answers now and then, or not at all."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from ray import job_submission
from requests.exceptions import ConnectionError as NoConnection

from lt2.config import ConfigError
from lt2_workflows import submit

AWAY = NoConnection("HTTPConnectionPool(host='head', port=8265): Connection refused")


class Client:
    """Gives its answers one after another, the last one for ever; an exception is raised."""

    def __init__(self, *answers, code=0):
        self.answers = list(answers)
        self.code = code

    def get_job_info(self, job):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status=SimpleNamespace(value=answer), driver_exit_code=self.code, message="")

    def get_job_status(self, job):
        return self.get_job_info(job).status

    def stop_job(self, job):
        return True

    async def tail_job_logs(self, job):
        yield "a line\n"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(submit, "time", clock)
    return clock


def test_a_cluster_that_is_away_for_a_moment_is_asked_again():
    shown = []
    assert submit.follow(Client("RUNNING", AWAY, AWAY, "SUCCEEDED"), "w-attempt1", shown.append) == 0
    assert "".join(shown) == "a line\n"  # once
    assert submit.cancel(Client(AWAY, "RUNNING", "STOPPED"), "w-attempt1")


def test_a_driver_that_was_killed_is_said_to_be():
    for job, more in (("w-attempt1", "; `lt2 resume w` resumes from its last checkpoints"), ("other", "")):
        shown = []
        assert submit.follow(Client("FAILED", code=-9), job, shown.append) == 137
        assert shown == ["a line\n", f"lt2: the process of {job} was killed by SIGKILL{more}\n"]
    assert submit.follow(Client("FAILED", code=3), "w-attempt1", lambda text: None) == 3


def test_one_that_stays_away_is_one_line(clock):
    with pytest.raises(
        ConfigError, match=r"no longer answers \(.*refused\); w-attempt1 may still be running: .*`lt2 resume w` on ano"
    ):
        submit.follow(Client(AWAY), "w-attempt1", lambda text: None)
    assert submit.LOST_S < clock.now < submit.LOST_S + 2
    with pytest.raises(
        ConfigError, match=r"was asked to stop, but after 120 s the cluster no longer answers .*refused"
    ):
        submit.cancel(Client(AWAY), "w-attempt1")
    with pytest.raises(ConfigError, match="was asked to stop, but after 120 s it is still running"):
        submit.cancel(Client("RUNNING"), "w-attempt1")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(""), "RuntimeError"),
        (ConnectionError("\n"), "ConnectionError"),
        (RuntimeError("Request failed: 404\n<html>"), "Request failed: 404"),
    ],
)
def test_a_cluster_that_refuses_without_a_word_is_one_line(monkeypatch, error, said):
    def refuse(address):
        raise error

    monkeypatch.setattr(job_submission, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError, match=f"^no Ray answers at http://head:8265: {said}$"):
        submit.connect("http://head:8265")


def test_the_address_that_was_given_is_asked_whatever_ones_the_environment_has(monkeypatch):
    """Ray's client prefers the environment's: a job would be cancelled on another cluster than was named."""
    monkeypatch.setenv("RAY_ADDRESS", "other:6379")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    monkeypatch.setattr(job_submission.JobSubmissionClient, "_check_connection_and_version", lambda *_, **__: None)
    assert submit.connect("http://head:8265").get_address() == "http://head:8265"
    assert os.environ["RAY_API_SERVER_ADDRESS"] == "http://another:8265"
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    assert submit.connect("http://head:8265").get_address() == "http://head:8265"
    assert "RAY_API_SERVER_ADDRESS" not in os.environ
