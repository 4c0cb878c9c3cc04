"""The loop itself: what is accumulated, reduced, scheduled, reported and resumed."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from lt2.config import ConfigError
from lt2.train import parallel
from lt2.train.config import check_model
from lt2.train.loop import Batch, NonFiniteLossError, TrainConfig, TrainState, autocast_dtype, train
from lt2.train.loss import IGNORE, next_token_objective
from lt2.train.optim import adamw
from lt2.train.schedules import learning_rate
from tests.lt2 import tiny
from tests.lt2.looped_toy import toy
from tests.ranks import run_ranks

L, G = 6, 8
CONFIG = TrainConfig(steps=5, global_batch_size=G, lr=1e-2, warmup_steps=2, log_every=1, seed=3)


class Recorder:
    def __init__(self):
        self.steps, self.checkpoints, self.evals, self.ended = [], [], [], 0

    def on_step(self, state, metrics):
        self.steps.append((state.step, metrics))

    def on_checkpoint(self, state, model, optimizer):
        assert all(parameter in optimizer.state for parameter in model.parameters())
        self.checkpoints.append(
            (copy.copy(state), copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
        )

    def on_eval(self, state, model):
        model.eval()
        with torch.no_grad():  # gathers every block; the checkpoint that follows must see the shards again
            model(torch.zeros(1, L, dtype=torch.int64))
        self.evals.append(state.step)

    def on_end(self, state):
        self.ended += 1

    @property
    def losses(self):
        return [metrics["loss"] for _, metrics in self.steps]


def batches(position=0, rank=0, world=1):
    """Rows with different numbers of counted tokens, so that weighting by rows instead of tokens is caught."""
    for step in range(position // G, 100):
        g = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 17, (G, L + 1), generator=g)
        mask = torch.rand(G, L + 1, generator=g) < torch.linspace(0.1, 1, G).unsqueeze(1)
        share = slice(rank * G // world, (rank + 1) * G // world)
        yield Batch(tokens=tokens[share], loss_mask=mask[share])


def run(
    config=CONFIG, *, state=None, model=None, optimizer=None, sharding=None, data=None, stop=lambda: 0, **toy_options
):
    model = model if model is not None else toy(**toy_options)
    optimizer = optimizer or adamw(model, lr=config.lr)
    schedule = learning_rate(lr=config.lr, steps=CONFIG.steps, warmup_steps=config.warmup_steps)
    recorder = Recorder()
    state = state or TrainState()
    objective = next_token_objective(z_loss=config.z_loss)
    data = data or batches(state.position)
    train(model, objective, data, optimizer, schedule, config, state, [recorder], sharding=sharding, stop=stop)
    return recorder, model, state


def plain_loop(aux):
    """The same training written naively: full logits, one batch, mean over counted tokens, torch's own clipping."""
    model = toy(aux=aux)
    decay = [p for n, p in model.named_parameters() if p.ndim == 2 and n != "rho"]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or n == "rho"]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses, norms = [], []
    for step, batch in zip(range(CONFIG.steps), batches()):
        for group in optimizer.param_groups:
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / (CONFIG.steps - 3)))
            group["lr"] = 1e-2 * ((step + 1) / 2 if step < 2 else cosine)
        output = model(batch.tokens[:, :-1])
        targets = batch.tokens[:, 1:].masked_fill(~batch.loss_mask[:, 1:], IGNORE)
        loss = F.cross_entropy((output.hidden @ model.head_weight.T).flatten(0, 1), targets.flatten())
        loss = loss + sum(output.aux.values())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


@pytest.mark.parametrize("aux", [0.0, 0.3])
def test_one_batch_equals_a_naive_loop(aux):
    losses, norms, reference = plain_loop(aux)
    recorder, model, _ = run(aux=aux)
    assert recorder.losses == pytest.approx(losses, rel=1e-10)
    assert [m["grad_norm"] for _, m in recorder.steps] == pytest.approx(norms, rel=1e-9)
    assert max(norms) > 1  # clipping did something
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulation_weights_by_tokens(micro):
    losses, _, _ = plain_loop(0.0)
    recorder, _, state = run(CONFIG.model_copy(update={"micro_batch_size": micro}))
    assert recorder.losses == pytest.approx(losses, rel=1e-10)
    assert state.position == CONFIG.steps * G
    counted = sum(int(b.loss_mask[:, 1:].sum()) for _, b in zip(range(CONFIG.steps), batches()))
    assert state.tokens == counted


def test_a_micro_batch_runs_at_a_time_and_a_bad_step_is_looked_at_so_too():
    model, sizes = toy(), []

    def objective(model, batch):
        sizes.append(len(batch.tokens))
        loss, n_tokens, metrics = next_token_objective()(model, batch)
        return loss * math.nan, n_tokens, metrics

    config = CONFIG.model_copy(update={"micro_batch_size": 3})
    with pytest.raises(NonFiniteLossError):
        train(model, objective, batches(), adamw(model, lr=1e-2), lambda step: 1e-2, config, TrainState())
    assert sizes == [3, 3, 2] * 2


def rank_runs():
    return [rank_run(micro) for micro in (None, 2)]


def rank_run(micro):
    model = toy()
    sharding = parallel.shard(model, parallel.data_mesh("cpu"))
    rank = dist.get_rank()
    config = CONFIG.model_copy(update={"micro_batch_size": micro, "eval_every": 2, "checkpoint_every": 2})
    recorder, model, state = run(config, model=model, sharding=sharding, data=batches(0, rank, 2))
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    return recorder.losses, [m["grad_norm"] for _, m in recorder.steps], whole, state, recorder.evals


def test_two_ranks_equal_one_process():
    losses, norms, reference = plain_loop(0.0)
    for runs in run_ranks(rank_runs, 2):
        for rank_losses, rank_norms, weights, state, evals in runs:
            assert rank_losses == pytest.approx(losses, rel=1e-10)
            assert rank_norms == pytest.approx(norms, rel=1e-9)
            assert evals == [2, 4]
            assert state.position == CONFIG.steps * G
            for name, value in reference.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-7, atol=1e-9)


def test_resume_from_a_checkpoint_is_bit_equal():
    config = CONFIG.model_copy(update={"checkpoint_every": 2})
    whole, final, _ = run(config)
    assert [state.step for state, _, _ in whole.checkpoints] == [2, 4, 5]
    state, weights, moments = whole.checkpoints[0]
    model = toy(seed=99)
    model.load_state_dict(weights)
    optimizer = adamw(model, lr=1.0)
    optimizer.load_state_dict(moments)
    resumed, again, _ = run(config, state=state, model=model, optimizer=optimizer)
    assert resumed.losses == whole.losses[2:]
    assert all(torch.equal(a, b) for a, b in zip(final.parameters(), again.parameters()))


def test_callbacks_come_when_due_and_the_last_step_is_always_logged_and_saved():
    config = CONFIG.model_copy(update={"log_every": 2, "checkpoint_every": 3, "eval_every": 4})
    recorder, model, _ = run(config)
    assert [step for step, _ in recorder.steps] == [2, 4, 5]
    assert [state.step for state, _, _ in recorder.checkpoints] == [3, 5]
    assert recorder.checkpoints[-1][0].loss == recorder.losses[-1]
    assert recorder.evals == [4]
    assert model.training
    assert recorder.ended == 1
    assert run(CONFIG.model_copy(update={"steps": 1}), model=toy().eval())[1].training
    expected = {"loss", "ce", "lr", "grad_norm", "tokens_per_s", "step_time", "data_wait", "data_wait_fraction"}
    assert all(metrics.keys() == expected for _, metrics in recorder.steps)


def test_times_are_those_of_steps_without_what_is_called_between(monkeypatch):
    """Every batch takes a second to come, every step three, and every callback a hundred that count nowhere."""
    now = [0.0]
    monkeypatch.setattr("lt2.train.loop.time.perf_counter", lambda: now[0])

    def later(value, seconds):
        now[0] += seconds
        return value

    class Slow(Recorder):
        def on_step(self, *args):
            super().on_step(*later(args, 100))

        def on_checkpoint(self, *args):
            later(None, 100)

    recorder, model, state = Slow(), toy(), TrainState()
    data = (later(batch, 1) for batch in batches())
    tokens = [int(batch.loss_mask[:, 1:].sum()) for _, batch in zip(range(5), batches())]
    objective = lambda *args: later(next_token_objective()(*args), 3)  # noqa: E731
    config = CONFIG.model_copy(update={"log_every": 2, "checkpoint_every": 2})
    train(model, objective, data, adamw(model, lr=1e-2), lambda step: 1e-2, config, state, [recorder])
    for (_, metrics), seen, steps in zip(recorder.steps[1:], [sum(tokens[2:4]), tokens[4]], [2, 1], strict=True):
        assert metrics["tokens_per_s"] == seen / (4 * steps)
        assert (metrics["step_time"], metrics["data_wait"], metrics["data_wait_fraction"]) == (4, 1, 0.25)


def test_no_clipping_leaves_the_gradient_alone():
    clipped, _, _ = run()
    free, _, _ = run(CONFIG.model_copy(update={"grad_clip": None}))
    assert free.losses[0] == clipped.losses[0]
    assert free.losses[-1] != clipped.losses[-1]
    wide, _, _ = run(CONFIG.model_copy(update={"grad_clip": 1e6}))
    assert wide.losses == free.losses, "a gradient within the limit is left as it is"


def test_a_step_without_a_single_counted_token_changes_no_gradient():
    empty = Batch(tokens=torch.zeros(G, L + 1, dtype=torch.int64), loss_mask=torch.zeros(G, L + 1, dtype=torch.bool))
    recorder, _, _ = run(CONFIG.model_copy(update={"steps": 1, "warmup_steps": 0}), data=iter([empty]))
    assert recorder.losses == [0.0]
    assert recorder.steps[0][1]["grad_norm"] == 0.0


@pytest.mark.parametrize("fast", [True, False])
def test_precision_is_what_was_asked_for_and_auto_follows_the_device(fast, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: fast)
    found = {(p, d): autocast_dtype(p, torch.device(d)) for p in ("fp32", "auto", "bf16") for d in ("cpu", "cuda")}
    bf16 = {("bf16", "cpu"), ("bf16", "cuda")} | ({("auto", "cuda")} if fast else set())
    assert {asked for asked, dtype in found.items() if dtype == torch.bfloat16} == bf16
    assert {dtype for asked, dtype in found.items() if asked not in bf16} == {None}


def test_bf16_runs_matmuls_in_bf16_and_keeps_fp32_weights():
    recorder, model, _ = run(CONFIG.model_copy(update={"precision": "bf16"}), dtype=torch.float32)
    exact, _, _ = run(dtype=torch.float32)
    assert recorder.losses == pytest.approx(exact.losses, rel=2e-2)
    assert recorder.losses != exact.losses
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("betas", [(1.0, 0.95), (0.9, -0.1)])
def test_betas_that_adam_cannot_take_are_refused(betas):
    with pytest.raises(ValidationError, match=r"betas\.[01]"):
        TrainConfig(steps=5, global_batch_size=1, betas=betas)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_seeds_that_torch_cannot_take_are_refused(seed):
    with pytest.raises(ValidationError, match=r"^1 validation error.*\nseed"):
        TrainConfig(steps=1, global_batch_size=1, seed=seed)
    torch.manual_seed(TrainConfig(steps=1, global_batch_size=1, seed=2**63 - 1).seed + 1 + 2**20)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValidationError, match="warmup_steps 5 leaves no step of 5 .*; lower it"):
        TrainConfig(steps=5, global_batch_size=1, warmup_steps=5)


def test_dsa_that_would_train_densely_throughout_is_refused():
    sparse = {"type": "dsa", "top_k": 4, "index_dim": 8, "index_rope_dim": 4, "warmup_steps": 20}
    config = tiny.model({"type": "hybrid", "attention": sparse, "mixer": {"type": "gdn"}, "ratio": "1:1"}).config
    check_model(config, TrainConfig(steps=21, global_batch_size=1))
    with pytest.raises(ConfigError, match="dsa: warmup_steps 20 leaves none of 20 training steps sparse"):
        check_model(config, TrainConfig(steps=20, global_batch_size=1))
