"""What a worker hands to the training loop and to what runs beside it. Nothing is trained."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from lt2.config import ConfigError
from lt2.model import build
from lt2.train import parallel
from lt2.train.loop import PreemptedError, TrainState
from lt2.train.schedules import learning_rate
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import ranks, worker
from lt2_platform.train.checkpoints.integrity import CheckpointError
from lt2_platform.train.config import PretrainConfig
from lt2_platform.train.reporting.observe import Observer
from tests.platform.train.packed import MODEL, SEQ_LEN, TOKENIZER, model_config, train_config, write_dataset
from tests.platform.train.test_worker import open_run, pretrain_config

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    write_dataset(tmp_path / "data")
    return tmp_path


@pytest.fixture
def handed(monkeypatch):
    """What worker.run gives to the loop, which makes no step; end: what the loop raises."""

    def of(spec, end=None, **options):
        got = SimpleNamespace()

        def loop(model, objective, data, optimizer, schedule, config, state, callbacks, **more):
            vars(got).update(data=data, optimizer=optimizer, schedule=schedule, callbacks=callbacks, **more)
            got.seed, got.batch = torch.initial_seed(), next(data)
            if end is not None:
                raise end

        monkeypatch.setattr(worker, "train", loop)
        worker.run(spec, **options)
        return got

    return of


def test_optimizer_and_schedule_are_the_configs(root, handed):
    fields = {"betas": (0.7, 0.8), "weight_decay": 0.3, "decay_all": True, "lr": 3e-2}
    rate = {"warmup_steps": 2, "min_lr_ratio": 0.5, "schedule": {"type": "linear"}}
    config = pretrain_config(**fields, **rate)
    got = handed(open_run(root, config))
    assert {(group["betas"], group["weight_decay"]) for group in got.optimizer.param_groups} == {((0.7, 0.8), 0.3)}
    known = learning_rate(config.train.schedule, lr=3e-2, steps=6, warmup_steps=2, min_lr_ratio=0.5)
    assert [got.schedule(step) for step in range(6)] == [known(step) for step in range(6)]


def test_what_runs_beside_the_loop_is_in_its_order_and_tied_together(root, handed):
    class Theirs:
        pass

    theirs, reported, stop = Theirs(), [], lambda: 0
    got = handed(open_run(root, pretrain_config()), callbacks=[theirs], report=reported.append, stop=stop)
    observer, cost, logger, evaluator, saver, last = got.callbacks
    # Metrics are added before they are written, and a loss is known before its checkpoint.
    assert [type(each).__name__ for each in (observer, cost, logger, evaluator, saver)] == [
        "Observer", "SaveCost", "Logger", "Evaluator", "Saver"
    ]  # fmt: skip
    assert last is theirs
    assert cost.saver is saver
    assert evaluator.logger is logger
    assert (saver.report, saver.flush, got.stop) == (reported.append, logger.writer.flush, stop)
    evaluator.last = {4: 2.5}
    assert saver.validation_losses() == {4: 2.5}
    assert ResultsStore(Storage(str(root))).run("run").summary == asdict(TrainState())


def test_a_checkpoint_takes_the_files_of_its_tokenizer(root, handed):
    Storage(str(root / "data")).write_bytes("tokenizer/tokenizer.json", b"{}")
    saver = handed(open_run(root, pretrain_config())).callbacks[-1]
    assert saver.about.tokenizer_files == {"tokenizer/tokenizer.json": b"{}"}
    dataset = Storage(str(root / "data")).read_json("manifest.json")
    assert (saver.about.data, saver.about.tokenizer) == (dataset["fingerprint"], dataset["tokenizer"])
    assert saver.about.train == saver.config.model_dump(mode="json")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_alone_writes_and_each_draws_numbers_of_its_own(root, handed, monkeypatch, rank):
    spec = replace(open_run(root, pretrain_config()), profile_steps=(1, 2))
    cleaned, traced, dogs, watchdog = [], [], [], worker.Watchdog
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(worker, "Watchdog", lambda **more: dogs.append(more["rank"]) or watchdog(**more))
    monkeypatch.setattr(worker.retention, "clean", cleaned.append)
    monkeypatch.setattr(worker, "traced", lambda data, *more: traced.append(more[1:]) or data)
    got = handed(spec)
    assert ("Logger" in [type(each).__name__ for each in got.callbacks]) == (rank == 0)
    assert (got.seed, dogs) == (5 + 1 + rank, [rank])
    assert (cleaned, traced) == (([str(root / "run/checkpoints")], [((1, 2), spec.out)]) if rank == 0 else ([], []))


@pytest.mark.parametrize("rest", [0.25, 0.0])
def test_a_student_begins_as_its_start_and_learns_from_its_teacher_at_two_rates(root, handed, monkeypatch, rest):
    kept = {"layout": {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "kept": [1]}}
    teacher = build(model_config(layout={"type": "uniform", "mixer": {"type": "full"}}))
    asked, seen, sizes, made = [], [], [], Observer.build
    monkeypatch.setattr(worker.checkpoint, "load_model", lambda place: (teacher, teacher.config, place))
    monkeypatch.setattr(worker.checkpoint, "read_info", lambda place: SimpleNamespace(model=teacher.config))
    monkeypatch.setattr(worker, "load_teacher", lambda *given, keep: asked.append((given[0], keep)) or teacher)
    monkeypatch.setattr(worker.Observer, "build", lambda *given: seen.append(given[1:]) or made(*given))
    monkeypatch.setattr(worker, "_keeps_gathered", lambda *given: sizes.append(given[3:]) or False)
    config = pretrain_config(objective={"type": "distill", "k": 4, "rest_lr_scale": rest})
    spec = open_run(root, PretrainConfig.model_validate({"model": MODEL | kept, "train": config.train.model_dump()}))
    got = handed(replace(spec, sources={"start": "begun", "teacher": "asked"}))
    assert (sizes, asked) == ([(SEQ_LEN, "asked")], [("asked", False)])
    assert seen == [(config.train, SEQ_LEN, CPU, teacher.config)]
    model = got.callbacks[0].model
    assert torch.equal(model.embed.weight, teacher.embed.weight)
    scales = {p: group["lr_scale"] for group in got.optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert (scales.get(named["embed.weight"]), named["embed.weight"].requires_grad) == (rest or None, rest > 0)
    assert {scales[p] for name, p in named.items() if ".mixers.gdn." in name} == {1.0}


def test_a_stored_top_k_comes_with_every_batch_of_documents_as_they_are_masked(root, handed, monkeypatch):
    asked, given = [], []

    class Stored:
        def __init__(self, *given, **more):
            asked.append((*given, more))

        def attach(self, batches):
            yield from (batch | {"topk_logits": batch["tokens"]} for batch in batches)

    def reader(dataset, **more):
        given.append((dataset, more["prefetch"]))
        yield from dataset.batches(**{key: more[key] for key in more if key != "limit"})

    monkeypatch.setattr(worker, "StoredTopK", Stored)
    spec = open_run(root, pretrain_config(document_mask=True))
    got = handed(replace(spec, sources={"topk": "there"}), reader=reader)
    ((dataset, prefetch),) = given
    assert asked == [("there", dataset, {"document_mask": True})]
    assert prefetch == 0, "read ahead once, with what belongs to it"
    assert torch.equal(got.batch.topk_logits, got.batch.tokens)


def test_a_run_that_goes_on_says_from_where(root, handed, monkeypatch):
    state, dogs, watchdog = TrainState(step=4, position=32, tokens=1), [], worker.Watchdog
    monkeypatch.setattr(worker, "_resume", lambda *given: (state, None))
    monkeypatch.setattr(worker, "Watchdog", lambda **more: dogs.append(more["step"]) or watchdog(**more))
    got = handed(open_run(root, pretrain_config()))
    assert (got.callbacks[2].began, dogs) == (4, [4])


def test_batches_come_from_the_reader_that_is_given(root, handed):
    asked, closed = [], []

    def reader(dataset, **more):
        asked.append(more)
        try:
            yield from dataset.batches(**{key: more[key] for key in more if key != "limit"})
        finally:
            closed.append(True)

    handed(open_run(root, pretrain_config()), reader=reader)
    assert [(each["position"], each["seed"], each["limit"], each["prefetch"]) for each in asked] == [(0, 5, 6, 2)]
    assert closed == [True]


@pytest.mark.parametrize("end", [None, RuntimeError("broken"), PreemptedError("saved")])
def test_whatever_ends_the_loop_leaves_nothing_at_work(root, handed, monkeypatch, end):
    dogs, order, watchdog = [], [], worker.Watchdog

    def watching(**more):
        dogs.append((watchdog(**more), more))
        return dogs[0][0]

    monkeypatch.setattr(worker, "Watchdog", watching)
    monkeypatch.setattr(worker.Saver, "settle", lambda saver, state: order.append("settled"))
    monkeypatch.setattr(worker.Saver, "__exit__", lambda *_: order.append("waited"))
    spec = open_run(root, pretrain_config(hang_factor=3.0, hang_floor_s=40.0))
    if end is None:
        handed(spec)
    else:
        with pytest.raises(type(end), match=str(end)):
            handed(spec, end)
    (dog, asked), *others = dogs
    assert asked == {"rank": 0, "step": 0, "factor": 3.0, "floor_s": 40.0}
    assert others == []
    assert dog.thread.ident is not None, "it watched"
    assert (dog.thread.is_alive(), dog.began is None) == (False, False)
    assert order == (["settled", "waited"] if isinstance(end, PreemptedError) else ["waited"])
    states = {type(None): "finished", RuntimeError: "failed", PreemptedError: "running"}
    assert ResultsStore(Storage(str(root))).run("run").state == states[type(end)]


def test_a_store_that_is_away_does_not_hide_that_all_is_saved(root, handed, monkeypatch, caplog):
    def away(*_):
        raise OSError("no route")

    monkeypatch.setattr(worker.ResultsStore, "log_event", away)
    with pytest.raises(PreemptedError, match="saved"):
        handed(open_run(root, pretrain_config()), PreemptedError("saved"))
    assert "the preemption of run is not among its events (no route)" in caplog.text


def test_workers_that_cannot_share_a_batch_are_refused_where_they_are(root, monkeypatch):
    spec = open_run(root, pretrain_config())
    monkeypatch.setattr(ranks, "world_size", lambda: 3)
    with pytest.raises(ConfigError, match="global_batch_size 8 is not divisible by 3 workers"):
        worker.run(spec)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_blocks_are_wrapped_and_sharded_as_the_config_says(monkeypatch, dtype):
    asked = {}
    monkeypatch.setattr(parallel, "wrap_blocks", lambda model, **more: asked.update(more))
    monkeypatch.setattr(parallel, "data_mesh", lambda *where: asked.update(where=where) or "mesh")
    monkeypatch.setattr(parallel, "shard", lambda model, mesh, **more: asked.update(more, mesh=mesh))
    config = train_config(activation_checkpoint=True, compile=True, shard_workers=2, precision=dtype)
    worker._build_model(model_config(), config, CPU, SEQ_LEN, keep=False, start=None)
    assert asked == {
        "recompute": "block", "compile": True, "where": ("cpu", 2), "mesh": "mesh", "keep": False,
        "param_dtype": torch.bfloat16 if dtype == "bf16" else None,
    }  # fmt: skip


@pytest.mark.parametrize(("asked", "workers", "expected"), [
    (True, 4, True), (False, 4, False), (False, 1, False), ("auto", 1, True), ("auto", 4, True),
])  # fmt: skip
def test_gathered_blocks_are_kept_where_it_was_asked_for_or_nothing_is_against_it(
    monkeypatch, asked, workers, expected
):
    monkeypatch.setattr(ranks, "world_size", lambda: workers)
    config = train_config(keep_gathered=asked)
    assert worker._keeps_gathered(model_config(), config, CPU, SEQ_LEN, None) is expected


def test_on_cards_the_plan_for_all_workers_and_the_teacher_decides(monkeypatch):
    asked = []
    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(worker, "keeps_gathered", lambda *given, **more: asked.append((given, more)) or False)
    monkeypatch.setattr(worker.checkpoint, "resolve", lambda place: f"{place}/newest")
    monkeypatch.setattr(worker.checkpoint, "read_info", lambda uri: SimpleNamespace(model=f"of {uri}"))
    monkeypatch.setattr(ranks, "from_rank_zero", lambda mine: not mine)  # whose card is larger than this rank's
    config = train_config(keep_gathered="auto")
    assert worker._keeps_gathered(model_config(), config, torch.device("cuda"), SEQ_LEN, "teacher") is True
    more = {"workers": 4, "card_bytes": 80, "teacher": "of teacher/newest"}
    assert asked == [((model_config(), config, SEQ_LEN), more)]


def test_a_folder_of_another_model_is_not_resumed(root, monkeypatch):
    """Its own checkpoints come first, and are looked at as those of others are."""
    seen, info = [], SimpleNamespace(uri="own", model=model_config(n_loops=3), tokenizer=TOKENIZER)
    monkeypatch.setattr(worker.integrity, "latest", lambda folder: f"{folder}/own")
    monkeypatch.setattr(worker.checkpoint, "intact", lambda place: pytest.fail("looked for another's"))
    monkeypatch.setattr(worker.checkpoint, "read_info", lambda uri: info)
    monkeypatch.setattr(worker.checkpoint, "load", lambda uri, *_: seen.append(uri) or TrainState(step=3))
    folder, optimizer = str(root / "checkpoints"), torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(CheckpointError, match="model differs in n_loops"):
        worker._resume(folder, "before", torch.nn.Module(), optimizer, model_config(), TOKENIZER)
    assert seen == []
    state, found = worker._resume(folder, "before", torch.nn.Module(), optimizer, info.model, TOKENIZER)
    assert (state.step, found, seen) == (3, f"{folder}/own", [f"{folder}/own"])
