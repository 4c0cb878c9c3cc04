"""What is kept, what is best, and what `lt2 checkpoints` says and deletes."""

import errno
import json
import math

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint, integrity, inventory, retention
from lt2_platform.train.checkpoints.integrity import CheckpointError
from lt2_platform.train.checkpoints.retention import Keep, kept, note_best, read_best
from lt2_workflows.cli import app
from tests.platform.train.packed import checkpoints, write_dataset
from tests.platform.train.test_worker import open_run, pretrain_config

NAMES = [f"step-{step:08d}" for step in (2, 4, 6, 8, 10)]


@pytest.mark.parametrize(
    ("policy", "best", "expected"),
    [
        (Keep(1), None, [10]),
        (Keep(2), NAMES[0], [2, 8, 10]),
        (Keep(2, best=False), NAMES[0], [8, 10]),
        (Keep(1, every=4), None, [4, 8, 10]),
        (Keep(99), None, [2, 4, 6, 8, 10]),
        (Keep(1), "step-00000099", [10]),  # a pointer at one that was deleted by hand
    ],
)
def test_policy(policy, best, expected):
    assert sorted(kept(NAMES, policy, best)) == [f"step-{step:08d}" for step in expected]


def test_policy_as_typed():
    assert Keep.parse("last=3,every=100,best") == Keep(3, 100, True)
    assert Keep.parse("best") == Keep(1, None, True)
    for wrong in ("last=0", "first=2", "last", "every=-1", "best=1"):
        with pytest.raises(ConfigError, match="is not last=N, every=N or best"):
            Keep.parse(wrong)
    for empty in ("", " , "):
        with pytest.raises(ConfigError, match="the keep policy is empty; give last=N"):
            Keep.parse(empty)


def test_best_is_replaced_by_a_better_one_by_itself_and_when_it_is_gone(tmp_path):
    storage = Storage(str(tmp_path))
    for name in NAMES:
        storage.write_bytes(f"{name}/COMPLETE", b"{}")
    steps = []
    for name, loss in ((NAMES[0], 2.0), (NAMES[1], 3.0), (NAMES[2], 1.0), (NAMES[2], 1.5), (NAMES[3], 1.6)):
        note_best(str(tmp_path), name, loss)
        steps.append(read_best(str(tmp_path))["step"])
    assert steps == [2, 2, 6, 6, 6]
    assert read_best(str(tmp_path))["validation_loss"] == 1.5
    storage.delete(NAMES[2])
    note_best(str(tmp_path), NAMES[4], 9.0)
    assert read_best(str(tmp_path))["step"] == 10


def test_a_loss_that_is_no_number_is_never_the_best(tmp_path):
    storage = Storage(str(tmp_path))
    for name in NAMES:
        storage.write_bytes(f"{name}/COMPLETE", b"{}")
    note_best(str(tmp_path), NAMES[0], math.nan)
    assert read_best(str(tmp_path)) is None
    storage.write_json("BEST", {"checkpoint": NAMES[0], "step": 2, "validation_loss": math.nan})
    note_best(str(tmp_path), NAMES[1], 5.0)
    assert read_best(str(tmp_path))["step"] == 4


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"checkpoinu": "step-00000002", "validation_loss": 1.0}'])
def test_a_damaged_pointer_is_written_anew(tmp_path, content):
    Storage(str(tmp_path)).write_bytes("BEST", content)
    assert read_best(str(tmp_path)) is None
    note_best(str(tmp_path), NAMES[1], 5.0)
    assert read_best(str(tmp_path))["step"] == 4


def test_a_run_may_be_called_best(tmp_path):
    Storage(str(tmp_path)).write_bytes(f"best/checkpoints/{NAMES[0]}/COMPLETE", b"{}")
    assert checkpoint.resolve(f"{tmp_path}/best") == f"{tmp_path}/best/checkpoints/{NAMES[0]}"


def test_a_kill_right_after_complete_costs_no_best(tmp_path):
    storage = Storage(str(tmp_path))
    for name, loss in ((NAMES[0], 2.0), (NAMES[1], 1.0)):
        storage.write_json(f"{name}/checkpoint.json", {"validation_loss": loss})
        storage.write_bytes(f"{name}/COMPLETE", b"{}")
    note_best(str(tmp_path), NAMES[0], 2.0)
    assert retention.clean(str(tmp_path)) == []
    assert read_best(str(tmp_path))["step"] == 4


def test_a_best_checkpoint_that_is_gone_is_said_to_be(tmp_path):
    note_best(str(tmp_path), NAMES[0], 2.0)
    with pytest.raises(
        CheckpointError, match=r"/best: the best checkpoint was .*/step-00000002, which is gone; use an"
    ):
        checkpoint.load_model(f"{tmp_path}/best")


def test_a_checkpoint_whose_description_is_cut_is_said_to_be_damaged(tmp_path):
    Storage(str(tmp_path)).write_bytes(f"{NAMES[0]}/COMPLETE", b"{}")
    (tmp_path / NAMES[0] / "checkpoint.json").write_text('{"schema_ver')
    with pytest.raises(
        CheckpointError, match=r"step-00000002: damaged checkpoint \(checkpoint\.json: .*\); use another"
    ):
        checkpoint.read_info(f"{tmp_path}/{NAMES[0]}")


def test_old_checkpoints_that_cannot_be_deleted_cost_no_new_one(tmp_path, monkeypatch, caplog):
    def busy(folder, keep, pinned, *, newest):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")  # NFS, while somebody reads a file in it

    monkeypatch.setattr(checkpoint, "drop", busy)
    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(steps=4, save_patience_s=0)))
    assert checkpoints(tmp_path / "run") == ["step-00000002", "step-00000004"]
    assert "were not deleted ([Errno 39] Directory not empty); the next save tries again" in caplog.text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("retention")
    write_dataset(root / "data")
    # The rate is so high that the loss gets worse: the best is an early one.
    fields = {"eval_every": 2, "checkpoint_every": 1, "keep_checkpoints": 1, "keep_every": 3, "lr": 1.0, "steps": 5}
    worker.run(open_run(root, pretrain_config(**fields, warmup_steps=3)))
    return root


def test_training_keeps_newest_every_and_best(run):
    best = read_best(str(run / "run/checkpoints"))
    assert best["step"] == 2
    assert checkpoints(run / "run") == ["step-00000002", "step-00000003", "step-00000005"]
    assert checkpoint.resolve(f"{run}/run/best") == f"{run}/run/checkpoints/step-00000002"
    assert checkpoint.read_info(checkpoint.resolve(f"{run}/run/best")).state.step == 2


def invoke(*arguments):
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_lists_verifies_and_prunes(run):
    folder = run / "run/checkpoints"
    (folder / "step-00000007").mkdir()
    (folder / "step-00000007/__0_0.distcp").write_bytes(b"half")
    shard = folder / "step-00000005/__0_0.distcp"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    code, output = invoke(run / "run", "--json")
    listed = json.loads(output)
    assert (code, listed["folder"]) == (0, str(folder))
    by_step = {record["step"]: record for record in listed["checkpoints"]}
    assert [(step, record["complete"], record["best"]) for step, record in by_step.items()] == [
        (2, True, True), (3, True, False), (5, True, False), (7, False, False)
    ]  # fmt: skip
    assert by_step[7]["bytes"] == 4
    assert by_step[5]["bytes"] == sum(path.stat().st_size for path in shard.parent.rglob("*"))
    assert by_step[3]["validation_loss"] is None
    assert by_step[2]["validation_loss"] > 0
    assert {record["problems"] for record in by_step.values()} == {None}

    code, output = invoke(run / "run", "--verify")
    assert code == 1
    assert "__0_0.distcp: content changed (sha256)" in output
    assert output.count(" yes ") >= 4

    code, _ = invoke(folder, "--verify", "--prune", "last=1")
    assert code == 1
    assert checkpoints(run / "run") == ["step-00000003"]  # the newest intact one; the damaged one is gone
    assert (folder / "step-00000007").exists()  # somebody may be writing it
    assert invoke(folder, "--verify") == invoke(folder, "--verify")
    assert invoke(folder, "--verify")[0] == 0


def test_pruning_keeps_the_best_and_counts_no_damaged_one(tmp_path):
    folder, storage = str(tmp_path), Storage(str(tmp_path))
    for name in NAMES:
        storage.write_json(f"{name}/COMPLETE", {"files": {}})
    newest_is_damaged = [{"checkpoint": name, "problems": ["x"] * (name == NAMES[4])} for name in NAMES]
    note_best(folder, NAMES[1], 1.0)
    gone = inventory.prune(folder, Keep.parse("last=1,best"), verified=newest_is_damaged)
    assert gone == [NAMES[0], NAMES[2], NAMES[4]]
    assert integrity.complete(folder) == [NAMES[1], NAMES[3]]
    storage.delete("BEST")
    assert inventory.prune(folder, Keep.parse("last=1,best")) == [NAMES[1]]


def test_nothing_intact_is_ever_pruned_away(tmp_path):
    Storage(str(tmp_path)).write_bytes("step-00000001/COMPLETE", b"{}")
    with pytest.raises(CheckpointError, match="no intact checkpoint; nothing is pruned"):
        inventory.prune(str(tmp_path), Keep(1), verified=inventory.entries(str(tmp_path), verify=True))
    with pytest.raises(CheckpointError, match="no checkpoint in it or in"):
        inventory.folder_of(str(tmp_path / "other"))


def test_a_damaged_newest_checkpoint_of_a_folder_is_refused_and_the_newest_intact_one_named(tmp_path):
    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(steps=4, checkpoint_every=1, keep_checkpoints=4)))
    folder = tmp_path / "run/checkpoints"
    for step in (3, 4):
        (folder / f"step-0000000{step}/__0_0.distcp").unlink()
    intact = folder / "step-00000002"  # so is the first
    for place in (tmp_path / "run", folder / "step-00000004"):
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load_model(str(place))
        assert str(refusal.value) == (
            f"{folder}/step-00000004: damaged checkpoint (__0_0.distcp: missing); "
            f"the newest intact one is {intact}: name that, or remove the damaged one"
        )
    checkpoint.load_model(str(intact))
