"""What a killed driver's Ray leaves in the temporary folder is removed by the next one; a living driver's is not."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from lt2_platform.step_records import this_process
from lt2_workflows.engine.local_ray import OWNER, PREFIX, _sweep


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
