"""How items share tasks; that they run where and as often as they should is in test_prepare.py."""

import pytest

from lt2_platform.data.spread import MOST_PER_TASK, TASKS_LEFT, grouped


@pytest.mark.parametrize("lanes", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 107, 2000])
def test_groups_cover_every_item_in_order_and_shrink_towards_the_end(count, lanes):
    groups = list(grouped(count, lanes))
    assert [item for start, stop in groups for item in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes, default=0) <= MOST_PER_TASK
    if count >= TASKS_LEFT * lanes:
        assert sizes[-TASKS_LEFT * lanes :] == [1] * TASKS_LEFT * lanes
