"""Which checkpoints of a folder are there, intact, and meant; what is damaged or half is passed over or refused."""

import logging
from pathlib import Path

import pytest

from lt2_platform.train.checkpoints import checkpoint, integrity, retention
from tests.platform.train.checkpoints.test_checkpoint import save, trained


def test_only_the_newest_are_kept(tmp_path):
    model, optimizer = trained()
    for step in (1, 2, 3, 10):
        save(tmp_path, model, optimizer, step, keep=2)
    assert integrity.complete(str(tmp_path)) == ["step-00000003", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000010")


def test_an_incomplete_checkpoint_is_invisible_and_cleaned(tmp_path):
    model, optimizer = trained()
    save(tmp_path, model, optimizer, 1)
    uri = save(tmp_path, model, optimizer, 2)
    Path(uri, "COMPLETE").unlink()
    assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000001")
    with pytest.raises(integrity.CheckpointError, match="no complete checkpoint here"):
        checkpoint.read_info(uri)
    assert retention.clean(str(tmp_path)) == ["step-00000002"]
    assert not Path(uri).exists()
    assert retention.clean(str(tmp_path)) == []


@pytest.mark.parametrize("fault", ["flipped byte", "short", "missing", "info", "metadata", "complete"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog, fault):
    model, optimizer = trained()
    save(tmp_path, model, optimizer, 1)
    uri = Path(save(tmp_path, model, optimizer, 2))
    names = {"info": "checkpoint.json", "metadata": ".metadata", "complete": "COMPLETE"}
    file = uri / names.get(fault, "__0_0.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(b"sha256") if fault == "complete" else len(data) // 2] ^= 1
    file.write_bytes(data[:-1] if fault == "short" else data)
    if fault == "missing":
        file.unlink()
    with caplog.at_level(logging.ERROR):
        assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000001")
    assert f"step-00000002 is damaged and skipped: {file.name}: " in caplog.text
    with pytest.raises(integrity.CheckpointError, match=f"damaged checkpoint \\({file.name}"):
        checkpoint.load_model(str(uri))
    save(tmp_path, model, optimizer, 2)  # the resumed run reaches step 2 again
    assert integrity.latest(str(tmp_path)) == str(uri)


def test_what_is_saved_after_going_back_on_a_damaged_checkpoint_stays(tmp_path):
    model, optimizer = trained()
    for step in (1, 4):
        uri = save(tmp_path, model, optimizer, step)
    Path(uri, ".metadata").unlink()
    assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000001")
    save(tmp_path, model, optimizer, 2, keep=1)
    assert integrity.latest(str(tmp_path)) == str(tmp_path / "step-00000002")
    save(tmp_path, model, optimizer, 6, keep=1)
    assert integrity.complete(str(tmp_path)) == ["step-00000006"]


def test_when_everything_is_damaged_nothing_starts_over_by_itself(tmp_path):
    model, optimizer = trained()
    uri = save(tmp_path, model, optimizer)
    Path(uri, ".metadata").unlink()
    with pytest.raises(integrity.CheckpointError, match="all checkpoints are damaged"):
        integrity.latest(str(tmp_path))


def test_a_steps_folder_means_its_newest_checkpoint(tmp_path):
    model, optimizer = trained()
    uri = save(tmp_path / "out" / "checkpoints", model, optimizer)
    for folder in (tmp_path, tmp_path / "out", tmp_path / "out" / "checkpoints"):
        assert checkpoint.resolve(str(folder)) == str(uri)


def test_no_checkpoint_at_all(tmp_path):
    assert integrity.latest(str(tmp_path / "nowhere")) is None
    with pytest.raises(integrity.CheckpointError, match=r"no complete checkpoint in it .* a run's folder \(steps/NAME"):
        checkpoint.load_model(str(tmp_path))
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text("{}")
    with pytest.raises(integrity.CheckpointError, match="exported is a Hugging Face folder"):
        checkpoint.resolve(str(tmp_path / "exported"))


def test_a_finished_run_without_an_intact_checkpoint_names_the_folder_to_remove(tmp_path):
    model, optimizer = trained()
    step = tmp_path / "steps" / "pretrain-12345678"
    uri = save(step / "out" / "checkpoints", model, optimizer)
    (step / "done.json").write_text("{}")
    Path(uri, ".metadata").unlink()
    advice = rf"; remove the finished step's folder \(rm -r {step}\) and run its workflow again$"
    for place in (step, step / "out", uri):
        with pytest.raises(integrity.CheckpointError, match=rf"damaged checkpoint .*{advice}"):
            checkpoint.load_model(str(place))
    Path(uri, "COMPLETE").unlink()
    with pytest.raises(integrity.CheckpointError, match=rf"no complete checkpoint in it .*{advice}"):
        checkpoint.load_model(str(step / "out"))
