"""What a rank reads: packed shards to the end, text that is tokenised meanwhile exactly on from any resume."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lt2.config import ConfigError
from lt2.train.loop import STOP, PreemptedError, TrainState
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing as sources
from lt2_platform.train import worker
from lt2_platform.train.config import Sources
from lt2_platform.train.feed import Feed
from tests.platform.data.conftest import no_ray  # noqa: F401
from tests.platform.train.packed import train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights
from tests.ranks import run_ranks

STEPS = 8


@pytest.fixture
def root(tmp_path, no_ray, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sources, "UNIT_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    lines = [json.dumps({"text": f"document {number} " + "abcdef " * (number % 9)}) + "\n" for number in range(300)]
    (tmp_path / "corpus.jsonl").write_text("".join(lines))
    config = PrepareConfig(source=f"{tmp_path}/corpus.jsonl", seq_len=12, seed=3, tokenize="on_the_fly")
    prepare(config, str(tmp_path / "data"))
    return tmp_path


def config(**train):
    return pretrain_config(**{"steps": STEPS, "checkpoint_every": 4, "eval_every": 4} | train)


def part(root, name):
    """Until somebody asks to stop at the sixth step, which is saved then."""
    asked = []

    def stop():
        asked.append(1)
        return STOP if len(asked) == 6 else 0

    with pytest.raises(PreemptedError):
        worker.run(open_run(Path(root), config(), name), stop=stop)
    if dist.is_initialized():
        dist.barrier()


def test_a_resume_goes_on_exactly_also_with_another_number_of_ranks(root):
    worker.run(open_run(root, config(), "whole"))
    expected = losses(root, "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))

    part(root, "one")
    cursors = json.loads((root / "one/checkpoints/step-00000006/cursors.json").read_text())
    assert (cursors["position"], cursors["lanes"], len(cursors["cursors"])) == (48, 8, 8)
    assert worker.run(open_run(root, config(), "one"))["position"] == 8 * STEPS
    assert losses(root, "one") == expected
    assert all(torch.equal(value, weights(root / "whole")[name]) for name, value in weights(root / "one").items())

    run_ranks(part, 2, str(root), "two", timeout_s=400)
    worker.run(open_run(root, config(), "two"))
    assert losses(root, "two") == pytest.approx(expected, rel=1e-4)  # two ranks add in another order

    branch = Sources(continue_from=str(root / "whole/checkpoints/step-00000004"))
    worker.run(open_run(root, config(), "branch", sources=branch))
    assert losses(root, "branch") == {step: expected[step] for step in range(5, STEPS + 1)}

    (root / "corpus.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"the corpus has changed since it was listed: .* bytes instead of"):
        open_run(root, config(), "two")


def test_packed_shards_are_read_for_the_steps_left_and_the_batches_to_be_skipped(tmp_path):
    asked = []

    def reader(dataset, **how):
        asked.append(how)
        return iter(())

    feed = Feed.open(write_dataset(tmp_path / "data"), train_config(steps=6), 1, 2)
    state = TrainState(step=2, position=24)  # the batch at 0 was skipped before, the next one and another are to be
    feed.batches(state, None, str(tmp_path), {0, 24, 40}, prefetch=3, reader=reader)
    place = {"position": 24, "global_batch_size": 8, "rank": 1, "world_size": 2, "seed": 5}
    assert asked == [{**place, "prefetch": 3, "limit": 6}]
