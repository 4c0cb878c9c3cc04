"""One decode step with static shapes: what capturing it as a CUDA graph has to put back, on a CPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lt2 import decode
from lt2.cache import Cache
from lt2.config import ActHalting, ModelConfig
from lt2.decode import DecodeStep, Recording, merge_projections
from lt2.generate import WORTH_RECORDING, generate
from lt2.model import LoopedLM, build
from lt2.ops import dispatch
from tests.lt2.mixers.samples import samples

CONFIGS = {name: sample.config for name, sample in samples().items()}


def prefilled(config: ModelConfig, rows: torch.Tensor) -> tuple[LoopedLM, Cache]:
    model = build(config, seed=3).eval()
    cache = model.init_cache(len(rows), 40)
    model(rows, cache=cache)
    return model, cache


@pytest.mark.parametrize("name", sorted(CONFIGS))
@torch.no_grad()
def test_a_rehearsed_step_leaves_nothing_behind(name):
    """Rehearse two steps on other tokens and put back what `overwritten` names: the next tokens are the same."""
    rows = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))
    model, plain = prefilled(CONFIGS[name], rows)
    _, rehearsed = prefilled(CONFIGS[name], rows)
    step = DecodeStep(model, rehearsed)
    kept = step.overwritten()
    step(torch.tensor([5, 6]))
    step(torch.tensor([7, 8]))
    for tensor, value in kept:
        tensor.copy_(value)
    rehearsed.rewind(13)

    token = other = rows[:, -1]
    for _ in range(9):
        hidden = model(token[:, None], cache=plain).hidden
        token, other = model.logits(hidden[:, 0]).argmax(-1), step(other).argmax(-1)
        assert torch.equal(token, other)
    for ours, theirs in zip(plain.layers, rehearsed.layers):
        for layer, kinds, wanted in zip(ours, plain.by_position[0], theirs):
            for key in layer:
                held = slice(0, 22) if key in kinds else slice(None)
                assert torch.equal(layer[key][:, held], wanted[key][:, held]), key


class AsksTheDevice(TorchDispatchMode):
    """Fails on what would wait for a GPU or copy to it from the host, neither of which a CUDA graph can hold."""

    WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "lift_fresh"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITS, name
        if name in {"index", "index_put", "index_put_"}:
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(CONFIGS))
@torch.no_grad()
def test_a_step_can_be_recorded(name, monkeypatch):
    monkeypatch.setattr(dispatch, "furthest", lambda ends, capacity, plus=0: capacity)  # its answer on CUDA
    model, cache = prefilled(CONFIGS[name], torch.zeros(2, 13, dtype=torch.int64))
    step = DecodeStep(model, cache)
    token = torch.tensor([5, 6])
    with AsksTheDevice():
        step(token)


def test_what_cannot_be_recorded_is_seen():
    for ask in (lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: torch.tensor(2.0) * x):
        with pytest.raises(AssertionError), AsksTheDevice():
            ask(torch.ones(3))


class PretendedGraph:
    """Runs the step anew at each replay and puts its results where the recording's are, as a CUDA graph does."""

    def __init__(self, step: DecodeStep):
        self.step = weakref.proxy(step)
        self.replays = 0
        self.output, self.logits = self.once()

    def once(self):
        used, lengths = self.step.cache.used, self.step.cache.lengths
        output, logits = self.step.run(self.step.model.forward)
        self.step.cache.used = used
        self.length_after = lengths
        return output, logits

    def replay(self):
        self.replays += 1
        output, logits = self.once()
        self.output.hidden.copy_(output.hidden)
        self.logits.copy_(logits)


@pytest.fixture
def pretended(monkeypatch):
    """A CUDA device as far as DecodeStep can tell; the graphs made."""
    made = []

    def capture(step):
        kept, lengths = step.overwritten(), step.cache.lengths.clone()
        graph = PretendedGraph(step)
        for tensor, value in kept:
            tensor.copy_(value)
        step.cache.lengths.copy_(lengths)
        made.append(graph)
        return Recording(graph, graph.output, graph.logits)

    init = DecodeStep.__init__

    def on_cuda(step, *args, record=True, **kwargs):
        init(step, *args, record=record, **kwargs)
        step.wanted = record

    monkeypatch.setattr(DecodeStep, "capture", capture)
    monkeypatch.setattr(DecodeStep, "__init__", on_cuda)
    return made


PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["full", "gdn", "window"])
def test_generation_by_replays_is_the_same_and_hooks_see_it(name, temperature, pretended, monkeypatch):
    model = build(CONFIGS[name], seed=3).eval()
    seen = []
    model.register_forward_hook(lambda *args: seen.append((args[2].hidden.shape[:2], args[0].depth)))
    request = {"max_new_tokens": WORTH_RECORDING, "temperature": temperature, "seed": 4}
    replayed = generate(model, PROMPTS, **request)
    (graph,) = pretended
    assert graph.replays == WORTH_RECORDING - 1
    counted, seen[:] = list(seen), []
    monkeypatch.undo()
    assert generate(model, PROMPTS, **request) == replayed
    assert counted == seen


def test_a_step_is_recorded_on_cuda_where_it_is_asked_for_and_nothing_halts(monkeypatch):
    halting = CONFIGS["full"].model_copy(update={"halting": ActHalting()})
    steps = [(CONFIGS["full"], True, True), (CONFIGS["full"], False, True), (halting, True, True)]
    found = []
    for config, record, on_cuda in [*steps, (CONFIGS["full"], True, False)]:
        model = build(config)
        cache = model.init_cache(1, 4)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", lambda _, on_cuda=on_cuda: SimpleNamespace(is_cuda=on_cuda))
            found.append(DecodeStep(model, cache, record=record).wanted)
    assert found == [True, False, False, False]


def test_few_tokens_are_not_worth_a_recording(pretended):
    generate(build(CONFIGS["gdn"], seed=3).eval(), PROMPTS, max_new_tokens=WORTH_RECORDING - 1)
    assert not pretended


def test_a_step_frees_its_cache_without_the_garbage_collector(pretended):
    model, cache = prefilled(CONFIGS["gdn"], torch.zeros(2, 13, dtype=torch.int64))
    step, held = DecodeStep(model, cache), weakref.ref(cache)
    gc.disable()
    try:
        step(torch.tensor([5, 6]))
        step(torch.tensor([5, 6]))
        del step, cache
        assert held() is None
    finally:
        gc.enable()


def test_a_replay_beyond_the_cache_is_refused(pretended):
    model, cache = prefilled(CONFIGS["full"], torch.zeros(2, 13, dtype=torch.int64))
    step = DecodeStep(model, cache)
    for _ in range(cache.max_len - 13):
        step(torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="cache of 40 tokens is full"):
        step(torch.tensor([5, 6]))


def test_a_step_that_waits_for_the_device_is_told_from_one_that_fails(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    model, cache = prefilled(CONFIGS["full"], torch.zeros(2, 13, dtype=torch.int64))
    step = DecodeStep(model, cache)
    assert step.synchronises() == ""

    def raising(message):
        def forward(*_, **__):
            raise RuntimeError(message)

        return forward

    monkeypatch.setattr(model, "forward", raising("called a synchronizing CUDA operation"))
    assert step.synchronises() == "called a synchronizing CUDA operation"
    monkeypatch.setattr(model, "forward", raising("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        step.synchronises()
    assert modes == ["error", 0] * 3


class Idle:
    """A CUDA stream or graph that does nothing."""

    def wait_stream(self, other):
        pass


@pytest.fixture
def idle_cuda(monkeypatch):
    """Calls to the device that do nothing, so that what is recorded runs once, where it stands."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Idle)
    for name in ("stream", "graph", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("name", ["full", "window", "gdn", "nsa"])
@torch.no_grad()
def test_recording_leaves_the_cache_as_it_was(name, refused, idle_cuda, monkeypatch):
    rows = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))
    model, plain = prefilled(CONFIGS[name], rows)
    _, cache = prefilled(CONFIGS[name], rows)
    step, expected = DecodeStep(model, cache), DecodeStep(model, plain)
    runs, said, forward = [], [], model.forward
    monkeypatch.setattr(decode, "announce", lambda *told: said.append(told[-1]))

    def watched(*args, **kwargs):
        output = forward(*args, **kwargs)
        runs.append(cache.used)
        if refused and len(runs) == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        return output

    monkeypatch.setattr(model, "forward", watched)
    step.wanted = True
    recording = step.capture()
    assert runs == [14] * (2 if refused else 3), "each of them begins where the cache stood"
    assert (recording is None, step.wanted) == (refused, not refused)
    assert said == ["called a synchronizing CUDA operation"] * refused
    assert (cache.used, cache.lengths.tolist()) == (13, [13, 13])
    monkeypatch.undo()
    step.wanted = False
    for token in rows.T[:5]:
        assert torch.equal(step(token), expected(token))


def test_only_what_a_step_loses_is_kept():
    rows = torch.zeros(2, 13, dtype=torch.int64)
    lost = {"full": set(), "mla": set(), "dsa": set(), "window": {"k", "v"}, "gdn": {"conv", "state"}}
    for name, kept in (lost | {"nsa": {"k_pooled", "v_pooled"}}).items():
        _, cache = prefilled(CONFIGS[name], rows)
        assert set(cache.layers[0][0]) - cache.by_position[0][0] == kept, name


def test_merged_projections_are_the_same_weights_under_the_same_names():
    rows = torch.randint(60, (2, 13), generator=torch.Generator().manual_seed(1))
    model = build(CONFIGS["gdn"], seed=3)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(rows).hidden
    merge_projections(model)
    assert model.state_dict().keys() == names.keys()
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())
    ffn = model.blocks[0].ffn
    assert ffn.in_weight.data_ptr() == ffn.gate_proj.weight.data_ptr()
    with torch.no_grad():
        assert (model(rows).hidden - expected).abs().max() < 1e-5
    # With gradients the layers' own weights are used, and what they learn is in the merged ones.
    hidden = model(rows).hidden
    assert torch.equal(hidden, expected)
    hidden.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    learned = model(rows).hidden.detach()
    assert (learned - expected).abs().max() > 1e-3
    with torch.no_grad():
        assert (model(rows).hidden - learned).abs().max() < 1e-5
