"""Answers that an evaluation keeps are of the code that gave them: after a change of that they are computed anew."""

import pytest

from lt2_platform.evaluate.harness import code
from lt2_platform.evaluate.harness.dispatch import Dispatcher, Work
from lt2_platform.evaluate.harness.models import ModelSource, load
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Pair
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
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


def test_answers_of_another_kind_of_device_are_computed_anew(tmp_path, calls, monkeypatch):
    checkpoint = save(tmp_path / "run", model())
    first = calls(checkpoint)
    monkeypatch.setattr(Dispatcher, "device", "cuda")
    assert calls(checkpoint) == first > 0
    assert calls(checkpoint) == 0


def test_actors_exit_where_this_process_does_and_answers_at_another_threshold_are_others(tmp_path):
    place = save(tmp_path / "run", model(halting={"type": "exit_gate", "threshold": 0.6}))
    own, early = ModelSource(place), ModelSource(place, exit_threshold=0.3)
    found = [load(source).scorer.model.config.halting.threshold for source in (own, early)]
    assert found == [0.6, 0.3]
    assert own.identity() != early.identity()


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda")])
def test_actors_answer_on_the_devices_of_the_cluster(tmp_path, monkeypatch, gpus, device):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(gpus)})
    assert Dispatcher(ModelSource(""), str(tmp_path), actors=2).device == device


def test_an_evaluation_that_has_ended_drops_the_answers_of_others_only(tmp_path, calls):
    old, new = save(tmp_path / "old", model(seed=1)), save(tmp_path / "new", model())
    calls(old)
    (batches,) = tmp_path.glob("out/**/batches")
    (before,) = batches.iterdir()
    (batches / "0123456789abcdef.json").write_text("{}")  # as they lay before each had a folder
    assert calls(new) > 0
    (after,) = batches.iterdir()
    assert after.name != before.name
    assert calls(new) == 0


def test_answers_that_are_dropped_meanwhile_are_not_missed(tmp_path, monkeypatch):
    """Another evaluation of the same place, of other code, ends while this one runs."""
    net = model()
    dispatcher = Dispatcher(ModelSource(save(tmp_path / "run", net)), str(tmp_path / "out"), scorer=LoopedScorer(net))
    works = [Work("loglikelihood", pairs=(Pair((1,), (number,)),)) for number in (2, 3, 4)]
    first = dispatcher.run(works[:1], lambda values: None)
    other = Dispatcher(ModelSource(save(tmp_path / "other", model(seed=1))), str(tmp_path / "out"))
    found = dispatcher.run(works, lambda values: other.forget_others())
    assert found[:1] == first
    assert (dispatcher.tally.batches, dispatcher.tally.resumed) == (4, 1)
    monkeypatch.setattr(Storage, "delete", lambda *_: (_ for _ in ()).throw(PermissionError("not yours")))
    other.forget_others()  # no reason to end an evaluation that has its numbers


def test_the_code_of_an_answer_is_the_model_library_and_what_reads_weights_and_answers():
    paths = {path.as_posix() for root in code.ROOTS for path in ([root] if root.is_file() else root.rglob("*.py"))}
    ours = ("lt2/model.py", "lt2/ops/recurrence/scan.py", "harness/scoring.py", "evaluate/tasks.py")
    for name in (*ours, "data/tokenizers/tokenize.py", "train/checkpoints/shards.py"):
        assert any(path.endswith(name) for path in paths), name
