"""How items share tasks; that they run where and as often as they should is in test_prepare.py."""

import pickle
import re
import threading

import pytest
from botocore.exceptions import ClientError
from ray import cloudpickle
from ray.exceptions import ObjectLostError, RayTaskError
from s3fs.errors import translate_boto_error

from lt2.config import ConfigError
from lt2_platform.data.spread import MOST_PER_TASK, TASKS_LEFT, _call, grouped
from lt2_platform.failures import portably


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


class TwoPartsError(Exception):
    def __init__(self, file, why):
        super().__init__(f"{file}: {why}")


class HoldingError(Exception):
    def __init__(self, why):
        super().__init__(why)
        self.lock = threading.Lock()


class TheirError(ConfigError):
    __module__ = "lt2_user_readers"  # no other process finds it by that name


def refused(code, status):
    answer = {"Error": {"Code": code, "Message": "said S3"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(answer, "PutObject"))


def fails_at_bad(item, make):
    if item == "bad":
        raise make()
    return item


@pytest.mark.parametrize(("make", "kind", "says"), [
    (lambda: ConfigError("a.txt is damaged"), ConfigError, "a.txt is damaged"),
    (lambda: FileNotFoundError(2, "No such file", "a.txt"), FileNotFoundError, "[Errno 2] No such file: 'a.txt'"),
    (lambda: TwoPartsError("a.txt", "no title"), RuntimeError, "TwoPartsError: a.txt: no title"),
    (lambda: HoldingError("no title"), RuntimeError, "HoldingError: no title"),
    (lambda: TheirError("no title"), ConfigError, "no title"),
    (lambda: refused("SlowDown", 503), ConnectionError, "SlowDown: said S3"),
    (lambda: refused("AccessDenied", 403), PermissionError, "said S3"),
])  # fmt: skip
def test_what_a_task_raised_is_heard_whatever_its_class(make, kind, says):
    row = _call(cloudpickle.dumps((fails_at_bad, make, None)), {"items": pickle.dumps(["good", "bad", "unseen"])})
    raised, found = pickle.loads(row["results"])
    assert (type(raised), str(raised), found) == (kind, says, ["good"])
    assert "in fails_at_bad" in raised.__notes__[-1]


@pytest.mark.parametrize(("error", "kind"), [
    (ObjectLostError("ab" * 28, "owner", "here"), ObjectLostError),
    (RayTaskError("f", "trace", ValueError("no title")).as_instanceof_cause(), RayTaskError),
    (TwoPartsError("a.txt", "no title"), RuntimeError),
])  # fmt: skip
def test_what_is_raised_in_a_worker_of_ray_is_of_a_kind_that_others_know(error, kind):
    @portably
    def work():
        raise error

    with pytest.raises(kind, match=re.escape(str(error))):
        work()
