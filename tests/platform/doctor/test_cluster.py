"""What a node of a cluster is asked, and what its answers mean. `lt2 doctor` asks a real one (test_doctor.py)."""

import os
import subprocess
import sys

import pytest
import ray
from ray import cloudpickle

from lt2_platform.doctor.cluster import SAME, _task, told, versions
from lt2_platform.storage import Storage

GOOD = {"versions": versions(SAME), "sees": True}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"missing": "No module named 'lt2_platform'"}, "cannot import LT2"),
        ({"refused": "storage root /root cannot be read (…)"}, "this one: storage root /root cannot be read"),
        (GOOD | {"sees": False}, "does not see what was written to /root"),
        (GOOD | {"versions": GOOD["versions"] | {"torch": "1.0"}}, "has torch 1.0 (here 2."),
        (GOOD | {"versions": {k: v for k, v in GOOD["versions"].items() if k != "ray"}}, "has ray None (here 2."),
        (GOOD | {"versions": GOOD["versions"] | {"python": "3.8.0"}}, "has python 3.8.0 (here 3."),
    ],
)
def test_a_node_that_is_not_like_the_others(answer, said):
    found = told("node 10.0.0.7", "8 CPUs", answer, "/root")
    assert found.state == "PROBLEM"
    assert said in found.said


def test_a_good_node():
    found = told("node 10.0.0.7", "8 CPUs, 4 GPUs", GOOD, "/root")
    assert (found.state, found.said) == ("ok", "8 CPUs, 4 GPUs, sees /root")


def test_a_node_looks_for_the_probe(tmp_path):
    Storage(str(tmp_path)).write_bytes("probe", b"")
    look = _task()
    assert look(str(tmp_path), "probe", SAME) == GOOD
    assert not look(str(tmp_path), "another", SAME)["sees"]
    (tmp_path / "file").write_text("")
    assert "a part of the path is a file" in look(str(tmp_path / "file"), "probe", SAME)["refused"]


def test_a_node_without_lt2_can_still_say_so(tmp_path):
    (tmp_path / "task").write_bytes(cloudpickle.dumps(_task()))
    # -S: packages without their .pth files, so without LT2.
    call = f"""
import pickle, sys; sys.path.append({os.path.dirname(os.path.dirname(ray.__file__))!r})
print(pickle.load(open("task", "rb"))("/root", "probe", ())["missing"])
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", call], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "No module named 'lt2'\n", done.stderr
