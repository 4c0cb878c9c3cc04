"""Answers that an evaluation keeps are of the code that gave them: after a change of that they are computed anew."""

import pytest

from lt2_platform.evaluate.harness import code, packs
from lt2_platform.evaluate.harness.scoring import LoopedScorer
from tests.platform.evaluate.items import copa, write
from tests.platform.evaluate.test_harness import run
from tests.platform.evaluate.tiny import model, save

OWN_MIXER = """
from typing import Literal
from lt2.mixer_configs.linear import LinearAttentionConfig
class Own(LinearAttentionConfig):
    type: Literal["harness_own"] = "harness_own"
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """How many batches the model is asked when this checkpoint is evaluated, in the same folder each time."""
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", copa=copa()))
    asked = []
    original = LoopedScorer.loglikelihoods
    monkeypatch.setattr(LoopedScorer, "loglikelihoods", lambda self, pairs: asked.append(1) or original(self, pairs))

    def evaluate(checkpoint):
        asked.clear()
        run(checkpoint, str(tmp_path / "pack"), tmp_path / "out", tasks=("copa",))
        return len(asked)

    return evaluate


@pytest.fixture
def fresh():
    """Code is hashed once per process; a call is as good as a new process."""
    code._ours.cache_clear()
    yield code._ours.cache_clear
    code._ours.cache_clear()


def test_answers_of_other_code_of_ours_are_computed_anew(tmp_path, calls, fresh, monkeypatch):
    (tmp_path / "lt2").mkdir()
    file = tmp_path / "lt2/model.py"
    file.write_text("scale = 1\n")
    monkeypatch.setattr(code, "ROOTS", (tmp_path / "lt2",))
    checkpoint = save(tmp_path / "run", model())
    first = calls(checkpoint)
    assert first > 0
    fresh()
    assert calls(checkpoint) == 0  # nothing changed
    file.write_text("scale = 2\n")
    fresh()
    assert calls(checkpoint) == first
    monkeypatch.setattr(code, "version_of", lambda package: "another")
    fresh()
    assert calls(checkpoint) == first


def test_answers_of_another_version_of_the_users_own_mixer_are_computed_anew(tmp_path, calls):
    file = tmp_path / "own.py"
    file.write_text(OWN_MIXER)
    layout = {"type": "uniform", "mixer": {"type": "harness_own", "source": str(file)}}
    checkpoint = save(tmp_path / "run", model(layout=layout))
    first = calls(checkpoint)
    assert first > 0
    assert calls(checkpoint) == 0
    file.write_text(OWN_MIXER + "# mended\n")
    assert calls(checkpoint) == first


def test_the_code_of_an_answer_is_the_model_library_and_what_reads_its_answers():
    paths = {path.as_posix() for root in code.ROOTS for path in ([root] if root.is_file() else root.rglob("*.py"))}
    for name in ("lt2/model.py", "lt2/ops/scan.py", "harness/scoring.py", "evaluate/tasks.py", "data/tokenize.py"):
        assert any(path.endswith(name) for path in paths), name
