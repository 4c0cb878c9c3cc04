"""What a plan traces and walks through, of configs and machines. Nothing is traced here, so all cases are cheap."""

import pytest
import torch

from lt2.config import ModelConfig
from lt2.memory import plan, plan_memory
from lt2.memory.plan import Traced
from lt2.memory.walk import Walk
from lt2.ops import outline
from lt2.ops.sparse import compressed, indexer
from lt2.train.config import TrainConfig
from tests.lt2.test_memory_walk import END, LOSS, LOWER, START, STATE, UPPER, WEIGHTS

L = 16
TRACED = Traced(WEIGHTS, [[LOWER, UPPER]] * 2, START, END, LOSS, STATE, teacher=9)


def model_config(**fields):
    layout = {"type": "uniform", "mixer": {"type": "full"}}
    sizes = {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_loops": 2, "num_heads": 2, "max_seq_len": L}
    return ModelConfig.model_validate({**sizes, "layout": layout, **fields})


@pytest.fixture
def planned(monkeypatch):
    """(what was traced, how it was walked, the plan) of settings; model, device_type, workers and the like are more."""

    def of(model=None, device_type="cuda", **settings):
        traces, walks, more = [], [], {}
        for name in ("workers", "sharded", "teacher", "bf16", "known", "seq_len"):
            if name in settings:
                more[name] = settings.pop(name)

        class Watched(Walk):
            def __init__(self, weights, **told):
                walks.append(told)
                super().__init__(weights, **told)

            def run(self, *given, recompute):
                walks[-1]["recompute"] = recompute
                super().run(*given, recompute=recompute)

        monkeypatch.setattr(plan, "Walk", Watched)
        monkeypatch.setattr(plan, "_trace", lambda step: traces.append(step) or TRACED)
        train, length = (
            TrainConfig.model_validate({"steps": 1, "global_batch_size": 8} | settings),
            more.pop("seq_len", L),
        )
        return traces, walks, plan_memory(model or model_config(), train, length, device_type=device_type, **more)

    return of


@pytest.mark.parametrize(("device", "settings", "bf16", "bytes_gathered", "shards"), [
    ("cuda", {}, True, 4, 1),
    ("cuda", {"workers": 4}, True, 2, 4),
    ("cuda", {"workers": 4, "shard_workers": 2}, True, 2, 2),
    ("cuda", {"workers": 4, "precision": "fp32"}, False, 4, 4),
    ("cuda", {"workers": 4, "sharded": False}, True, 4, 1),
    ("cuda", {"sharded": True}, True, 2, 1),
    ("cpu", {"workers": 4}, False, 4, 4),
    ("cpu", {"workers": 2, "precision": "bf16"}, True, 2, 2),
    ("cpu", {"workers": 2, "bf16": True}, True, 2, 2),
])  # fmt: skip
def test_dtypes_and_shards_are_those_of_the_run(planned, device, settings, bf16, bytes_gathered, shards):
    ((trace,), (walk,), _) = planned(device_type=device, **settings)
    dtype = torch.bfloat16 if bytes_gathered == 2 else torch.float32
    assert (trace.device_type, trace.bf16, trace.dtype, trace.shards) == (device, bf16, dtype, shards)
    assert (walk["itemsize"], walk["shards"], walk["sharded"]) == (bytes_gathered, shards, trace.sharded)
    assert walk["sharded"] == (settings.get("sharded", settings.get("workers", 1) > 1))


@pytest.mark.parametrize(("workers", "micro_batch_size", "sizes", "waiting"), [
    (1, None, [8], [False]),
    (1, 4, [4], [True]),
    (1, 3, [3], [True]),  # the last one is smaller, and gradients wait for the second too
    (1, 5, [5, 3], [False, True]),
    (2, 4, [4], [False]),
    (2, 99, [4], [False]),
])  # fmt: skip
def test_gradients_wait_where_a_step_has_several_micro_batches(planned, workers, micro_batch_size, sizes, waiting):
    traces, walks, _ = planned(workers=workers, micro_batch_size=micro_batch_size)
    assert [trace.size for trace in traces] == sizes
    assert [walk["waiting"] for walk in walks] == waiting


@pytest.mark.parametrize(
    ("optimizer", "device", "muon"), [("adamw", "cuda", 0), ("muon", "cuda", 2), ("muon", "cpu", 4)]
)
@pytest.mark.parametrize(("tied", "asked", "keep"), [(False, "auto", True), (True, False, False)])
def test_the_walk_knows_optimizer_head_and_what_stays(planned, optimizer, device, muon, tied, asked, keep):
    model, settings = model_config(tie_embeddings=tied), {"optimizer": {"type": optimizer}, "keep_gathered": asked}
    (_, (walk,), _) = planned(model, device, workers=2, **settings)
    assert (walk["muon"], walk["tied"], walk["keep"]) == (muon, tied, keep)


def test_a_teacher_counts_and_a_recomputed_loop_is_traced_as_blocks(planned):
    teacher = model_config(n_loops=3)
    ((trace,), (walk,), found) = planned(teacher=teacher, activation_checkpoint="loop")
    assert (trace.teacher, found.teacher) == (teacher, 9)
    assert (trace.recompute, walk["recompute"]) == ("block", "loop")


@pytest.mark.parametrize("changed", [
    {"seq_len": 8},
    {"global_batch_size": 4},
    {"micro_batch_size": 1},
    {"objective": {"type": "exit_gate"}},
    {"keep_gathered": False},
    {"teacher": model_config(n_loops=3)},
    {"workers": 1},
    {"workers": 4, "global_batch_size": 16},
    {"device_type": "cpu", "precision": "bf16"},
    {"precision": "fp32"},
    {"activation_checkpoint": True},
    {"model": model_config(norm_each_loop=True)},
], ids=str)  # fmt: skip
def test_what_was_traced_before_is_of_the_same_settings_alone(planned, changed):
    known, plain = {}, {"workers": 2}
    assert [len(planned(known=known, **settings)[0]) for settings in (plain, plain | changed, plain)] == [1, 1, 0]


def test_what_only_the_walk_differs_in_is_not_traced_again(planned):
    known, changes = {}, [{}, {"optimizer": {"type": "muon"}}, {"lr": 1.0}]
    assert [len(planned(known=known, **changed)[0]) for changed in changes] == [1, 0, 0]


def test_what_was_traced_is_put_into_the_order_of_the_layers():
    found = TRACED.reordered([1, 0])
    assert found.table == [[UPPER, LOWER]] * 2
    assert (found.weights.blocks, found.weights.learning_blocks) == ([40, 30], [40, 20])
    assert TRACED.reordered([0, 1]) == TRACED


@pytest.mark.parametrize("module", [indexer, compressed])
def test_a_plan_for_cuda_goes_through_the_pieces_of_a_card(module):
    """A CPU's are small: a plan for 16k tokens of DSA took minutes, and knew nothing of what a card's need."""
    q, k = (torch.empty(1, 4096, heads, 8, device="meta") for heads in (16, 1))
    others = (16 * k.shape[1],) if module is indexer else (k,)
    on_cpu = len(list(module._pieces(q, *others)))
    with outline.planning("cuda"):
        planned = len(list(module._pieces(q, *others)))
    assert on_cpu == planned * module.CUDA_PIECE // module.CPU_PIECE
