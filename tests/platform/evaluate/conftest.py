"""A Ray for the tests that need model actors."""

import pytest

from tests.platform.one_ray import one_ray


@pytest.fixture(scope="module")
def ray_here():
    with one_ray():
        yield
