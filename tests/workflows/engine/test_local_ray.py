"""What a killed driver's Ray leaves in the temporary folder is removed by the next one; a living driver's is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile

import pytest

from lt2_platform.step_records import this_process
from lt2_workflows.engine.local_ray import OWNER, PREFIX, _sweep, unanswered


def folder(tmp_path, name, owner):
    made = tmp_path / f"{PREFIX}{name}"
    made.mkdir()
    if owner is not None:
        (made / OWNER).write_text(json.dumps(owner))
    return made


def test_only_the_folders_of_dead_drivers_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import json; from lt2_platform.step_records import this_process; print(json.dumps(this_process()))"
    ended = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    dead = folder(tmp_path, "dead", ended)
    kept = [
        folder(tmp_path, "alive", this_process()),
        folder(tmp_path, "elsewhere", ended | {"machine": "another/boot/namespace"}),
        folder(tmp_path, "new", None),
    ]
    _sweep()
    assert not dead.exists()
    assert all(each.exists() for each in kept)


IMPORTED_BEFORE = """
import os, ray
from ray._raylet import AuthenticationTokenLoader
from lt2_workflows.engine import local_ray

def start(**options):
    token = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read()
    print(AuthenticationTokenLoader.instance().get_token_for_http_header() == {"authorization": "Bearer " + token})
    raise SystemExit

AuthenticationTokenLoader.instance().get_token_for_http_header()
local_ray._start = start
try:
    with local_ray.ray_head(1):
        pass
except SystemExit:
    left = [key for key in os.environ if key.startswith("RAY_AUTH")]
    print(AuthenticationTokenLoader.instance().get_token_for_http_header(), left)
"""


def test_a_recipe_may_import_ray_before_it_is_started_and_use_it_afterwards(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    environment |= {
        "TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, "-c", IMPORTED_BEFORE], capture_output=True, text=True, env=environment)
    assert done.stdout == "True\n{} []\n", done.stderr


def test_a_cluster_that_is_gone_is_told_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert f"nothing answers at RAY_ADDRESS=127.0.0.1:{port}" in unanswered(f"127.0.0.1:{port}")
    assert "nothing answers" in unanswered(f"ray://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("family", "host", "written"), [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")]
)
def test_a_cluster_that_is_there(family, host, written):
    with socket.socket(family) as head:
        try:
            head.bind((host, 0))
        except OSError:
            pytest.skip(f"{host} is not on this machine")
        head.listen()
        assert unanswered(f"{written}:{head.getsockname()[1]}") == ""
        assert unanswered(f"ray://{written}:{head.getsockname()[1]}") == ""


@pytest.mark.parametrize("address", ["auto", "local"])
def test_addresses_that_name_no_port_are_left_to_ray(address):
    assert unanswered(address) == ""
