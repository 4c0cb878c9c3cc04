"""Packages beside what LT2 asks for; torch beside the card."""

import pytest

from lt2_platform.doctor.software import packages, software, torch_and_card


def test_this_environment_is_as_asked():
    found = {finding.name: finding for finding in software()}
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert "torch" in found["packages"].said


@pytest.mark.parametrize(
    ("required", "said"),
    [
        ("torch<2.1", "torch<2.1 is needed, 2."),
        ("no-such-package>=3", "no-such-package>=3 is missing"),
        # An extra's package need not be there; where it is, it must be the right one.
        ('torch<2.1; extra == "cuda"', "torch<2.1 is needed, 2."),
    ],
)
def test_packages_that_are_not(required, said):
    found = packages(["numpy", required])
    assert found.state == "PROBLEM"
    assert said in found.said
    assert "pip install" in found.said


@pytest.mark.parametrize(
    "required",
    ["torch>=2.11", 'no-such-package; extra == "cuda"', 'torch<1; extra == "dev"', 'torch<1; python_version < "3"'],
)
def test_packages_that_are_as_asked(required):
    assert packages([required]).state == "ok"


def test_a_checkout_that_is_not_installed_is_a_note():
    assert packages(None).state == "note"


@pytest.mark.parametrize(
    ("available", "built_for", "there", "state", "said"),
    [
        (True, "13.0", True, "ok", "for CUDA 13.0"),
        (False, None, False, "ok", "runs on the CPU"),
        (False, "13.0", False, "ok", "runs on the CPU"),
        (False, None, True, "PROBLEM", "built for CPUs"),
        (False, "13.0", True, "PROBLEM", "driver"),
    ],
)
def test_torch_and_the_card(available, built_for, there, state, said):
    found = torch_and_card(available, built_for, there)
    assert found.state == state
    assert said in found.said
