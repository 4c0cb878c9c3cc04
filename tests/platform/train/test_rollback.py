"""A batch that gives NaN: named, skipped after a rollback, and the run goes on as if it had never been in the data."""

import copy
import json
import math
import weakref
from pathlib import Path

import pytest
import torch

from lt2.model import Block, LoopedLM, build
from lt2.train import parallel
from lt2.train.loop import Batch, NonFiniteLossError, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw, param_groups
from lt2.train.schedules import learning_rate
from lt2_platform.data.stream import PackedDataset
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from tests.platform.train.packed import checkpoints, model_config, train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights
from tests.ranks import run_ranks

G = 8


class Poison:
    """Makes the state of one row NaN after (loop, layer), whenever that row's tokens are in the batch."""

    def __init__(self, monkeypatch, tokens, loop=1, layer=0):
        self.tokens, self.calls, self.armed = torch.as_tensor(tokens)[:-1], 0, False
        forward, block_forward, poison = LoopedLM.forward, Block.forward, self

        def watching(model, input_ids, **options):
            poison.armed = bool((input_ids == poison.tokens).all(-1).any()) and model.training
            poison.calls = 0
            return forward(model, input_ids, **options)

        def poisoned(block, *args, **options):
            h, aux = block_forward(block, *args, **options)
            hit = poison.armed and poison.calls == loop * 2 + layer
            poison.calls += 1
            return (h * math.nan if hit else h), aux

        monkeypatch.setattr(LoopedLM, "forward", watching)
        monkeypatch.setattr(Block, "forward", poisoned)


def row(root, position):
    batch = next(PackedDataset(str(root / "data"), "train").batches(position=position, global_batch_size=1, seed=5))
    return batch["tokens"][0], int(batch["ids"][0])


def curve_without(root, position, monkeypatch, **fields):
    """Losses of the same run that never sees the batch at `position`."""
    spec, original = open_run(root, pretrain_config(**fields), "clean"), worker.train
    with monkeypatch.context() as patch:
        patch.setattr(worker, "train", lambda *args, skip, **kwargs: original(*args, skip={position}, **kwargs))
        worker.run(spec)
    return losses(root, "clean"), weights(root / "clean")


@pytest.mark.parametrize("log_every", [1, 4])
def test_a_bad_batch_is_named_and_skipped_and_nothing_else_changes(tmp_path, monkeypatch, caplog, log_every):
    write_dataset(tmp_path / "data", n=80)
    fields = {"log_every": log_every, "micro_batch_size": 2}
    expected, theirs = curve_without(tmp_path, 3 * G, monkeypatch, **fields)
    tokens, sequence = row(tmp_path, 3 * G + 1)
    spec = open_run(tmp_path, pretrain_config(**fields))
    with monkeypatch.context() as patch:
        Poison(patch, tokens)
        result = worker.run(spec)
    assert (result["step"], result["position"]) == (6, 7 * G)
    assert losses(tmp_path) == expected
    assert all(torch.equal(value, theirs[name]) for name, value in weights(tmp_path / "run").items())
    (event,) = ResultsStore(Storage(str(tmp_path))).events("run")
    assert event["kind"] == "rollback"
    assert (event["step"], event["position"], event["to"]) == (4, 3 * G, "step-00000002")
    assert event["origin"]["place"] == "block"
    assert (event["origin"]["loop"], event["origin"]["layer"], event["origin"]["mixer"]) == (1, 0, "gdn")
    assert sequence in event["origin"]["sequences"]
    assert len(event["origin"]["sequences"]) == 2  # the micro-batch, not the step
    assert "first not finite: the output of loop 1, layer 0 (gdn), on rank 0" in caplog.text
    assert "ROLLBACK 1 of 2: going back to step-00000002" in caplog.text
    assert ResultsStore(Storage(str(tmp_path))).run("run").state == "finished"


def test_a_bad_batch_before_the_first_checkpoint_starts_the_run_again(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", n=80)
    expected, theirs = curve_without(tmp_path, 0, monkeypatch)
    spec = open_run(tmp_path, pretrain_config())
    Poison(monkeypatch, row(tmp_path, 0)[0])
    worker.run(spec)
    assert losses(tmp_path) == expected
    assert all(torch.equal(value, theirs[name]) for name, value in weights(tmp_path / "run").items())


def test_a_kill_after_a_rollback_forgets_neither_the_skip_nor_the_count(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", n=80)
    expected, _ = curve_without(tmp_path, 3 * G, monkeypatch)
    spec = open_run(tmp_path, pretrain_config(rollbacks=1))
    Poison(monkeypatch, row(tmp_path, 3 * G)[0])

    class Kill:
        def on_step(self, state, metrics):
            if state.step == 3 and Path(spec.out, "rollbacks.json").exists():
                raise KeyboardInterrupt  # between the rollback and the next checkpoint

    with pytest.raises(KeyboardInterrupt):
        worker.run(spec, callbacks=[Kill()])
    worker.run(spec)
    assert losses(tmp_path) == expected
    assert len(json.loads(Path(spec.out, "rollbacks.json").read_text())) == 1


def test_rollbacks_are_bounded_and_the_error_says_where(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", n=80)
    spec = open_run(tmp_path, pretrain_config(rollbacks=1))
    forward = Block.forward
    bad = lambda self, h, *args, **options: (forward(self, h, *args, **options)[0] * math.nan, None)  # noqa: E731
    monkeypatch.setattr(Block, "forward", bad)
    with pytest.raises(NonFiniteLossError, match=r"step 1: .*loop 0, layer 0 .* rolled back 1 of 1 times"):
        worker.run(spec)
    assert checkpoints(tmp_path / "run") == []
    assert [event["position"] for event in ResultsStore(Storage(str(tmp_path))).events("run")] == [0]


def ranks_with_a_bad_row(root):
    made, left, built = [], [], worker.build

    def building(*arguments, **options):
        left.extend(model() is not None for model in made)
        model = built(*arguments, **options)
        made.append(weakref.ref(model))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "build", building)
        Poison(patch, row(Path(root), 3 * G + 6)[0], loop=0, layer=1)  # rank 1 has the second half
        return worker.run(open_run(Path(root), pretrain_config())), left


def test_ranks_roll_back_together(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data", n=80)
    expected, _ = curve_without(tmp_path, 3 * G, monkeypatch)
    results = run_ranks(ranks_with_a_bad_row, 2, str(tmp_path))
    assert [result["position"] for result, _ in results] == [7 * G, 7 * G]
    assert [left for _, left in results] == [[False], [False]], "two models on one card may be too many"
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    (event,) = ResultsStore(Storage(str(tmp_path))).events("run")
    assert {key: event["origin"][key] for key in ("place", "loop", "layer", "mixer", "rank")} == {
        "place": "block", "loop": 0, "layer": 1, "mixer": "full", "rank": 1
    }  # fmt: skip
    assert event["origin"]["weight"] is None


def spoil(model, name):
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[0] = math.nan


@pytest.mark.parametrize(
    ("parameter", "place", "loop", "layer"),
    [
        ("embed.weight", "embedding", None, None),
        ("blocks.0.ffn.down_proj.weight", "block", 0, 0),
        ("blocks.1.mixer_norm.weight", "block", 0, 1),
        ("rho", "loop", 0, None),
        ("norm.weight", "output", None, None),
        ("head.weight", "loss", None, None),
    ],
)
def test_a_bad_weight_is_named_and_no_update_is_made(parameter, place, loop, layer):
    model = build(model_config(tie_embeddings=False, loop_residual=True), seed=0)
    spoil(model, parameter)
    before = copy.deepcopy(model.state_dict())
    error = diverge(model)
    assert (error.origin.place, error.origin.loop, error.origin.layer) == (place, loop, layer)
    assert error.origin.weight == parameter
    assert f"weight {parameter} is not finite" in str(error)
    assert all(
        torch.equal(
            value,
            before[name],
        )
        or name == parameter
        for name, value in model.state_dict().items()
    )


def diverge(model, objective=None, log_every=100, optimizer=None, sharding=None):
    """A NaN that must stop the run one step after it at the latest, although nothing is due for a long time."""
    tokens = torch.arange(26).view(2, 13) % 23
    tokens[0, 0] = 0  # the embedding row that is spoiled
    config = train_config(steps=50, global_batch_size=2, log_every=log_every)
    batches = (Batch(tokens=tokens.clone()) for _ in range(3))
    schedule = learning_rate(lr=1e-3, steps=50)
    objective, optimizer = objective or next_token_objective(), optimizer or adamw(model, lr=1e-3)
    with pytest.raises(NonFiniteLossError) as raised:
        train(model, objective, batches, optimizer, schedule, config, TrainState(), sharding=sharding)
    return raised.value


def test_a_gradient_that_alone_is_bad_is_told_from_the_forward_pass():
    def objective(model, batch):
        loss, n, metrics = next_token_objective()(model, batch)
        return loss + (model.head_weight[0, 0] * 0).abs().sqrt(), n, metrics  # 0, with an infinite slope times 0

    model = build(model_config(), seed=0)
    error = diverge(model, objective)
    assert error.origin.place == "gradient"
    assert error.step == 1
    assert "only the gradient; the forward pass is finite; all weights are finite" in str(error)


def test_a_fault_that_does_not_repeat_is_called_that(monkeypatch):
    calls = []

    def objective(model, batch):
        loss, n, metrics = next_token_objective()(model, batch)
        calls.append(1)
        return (loss * math.nan if len(calls) == 1 else loss), n, metrics

    error = diverge(build(model_config(), seed=0), objective)
    assert error.origin.place == "unknown"
    assert "repeated, is finite" in str(error)


def rank_freezes(fused):
    """The weights (this rank's shards) after a bad second step and a good third one, and before them."""
    calls, seen = [], []

    def objective(model, batch):
        loss, n, metrics = next_token_objective()(model, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            seen.append([parallel.local(p.detach()).clone() for p in net.parameters()])
        return (loss * math.nan if len(calls) == 2 else loss), n, metrics

    net = build(model_config(), seed=0)
    mesh = parallel.data_mesh("cpu")
    sharding = parallel.shard(net, mesh) if mesh is not None else None
    optimizer = torch.optim.AdamW(param_groups(net.named_parameters(), weight_decay=0.1), lr=1e-3, fused=fused)
    error = diverge(net, objective, optimizer=optimizer, sharding=sharding)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return error.step, len(calls), steps, [[parallel.local(p.detach()) for p in net.parameters()], *seen]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fused", [False, True])  # GPUs use the fused kernel, which skips a step without the host
def test_what_was_learned_before_a_bad_step_is_untouched_by_the_steps_after_it(fused, ranks):
    """The host hears of a bad step late; the device must not have gone on updating until then."""
    for step, calls, steps, (final, first, second, _) in (
        [rank_freezes(fused)] if ranks == 1 else run_ranks(rank_freezes, ranks, fused)
    ):
        assert (step, calls, steps) == (2, 3, {1})
        if ranks == 1:  # sharded blocks are gathered while the objective runs
            assert all(torch.equal(now, then) for now, then in zip(final, second))
            assert not all(torch.equal(now, then) for now, then in zip(final, first))
        assert all(value.isfinite().all() for value in final)
