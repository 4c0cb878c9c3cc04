"""Habits of the repository that no linter checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_platform_folder_does_not_shadow_the_standard_library():
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, sysconfig; print(platform.__file__); print(sysconfig.get_path('stdlib'))"
    found, stdlib = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert Path(found).is_relative_to(stdlib)


def test_lt2_imports_and_trains_without_ray():
    """The GPU check and torchrun users have no Ray: importing the training path must not ask for it."""
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import lt2.train.loop, lt2.train.parallel, lt2.train.loss, lt2.train.optim, lt2.generate, lt2.decode\n"
        "import lt2_platform.train.checkpoints.checkpoint, lt2_platform.data.stream\n"
        "import lt2_platform.evaluate.throughput.task\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_configs_import_nothing_heavy():
    """Each command that reads a recipe does, and each attempt at a step."""
    code = (
        "import sys; import lt2.config, lt2.layout, lt2_workflows.recipes.quickstart as q; q.quickstart()\n"
        "import lt2_workflows.recipes.distill as d; d.distill_small(); d.distill_ouro_14b()\n"
        "import lt2_workflows.recipes.upcycle as u; u.upcycle()\n"
        "import lt2_workflows.sweeps; heavy = {'torch', 'ray', 'scipy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, f'a config module imports {heavy}'\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_constraints_name_no_registry_host():
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
