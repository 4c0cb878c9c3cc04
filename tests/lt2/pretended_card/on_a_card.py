"""Training, prefill and decoding on a pretended card; run by test_pretended_card.py in a process of its own."""

from __future__ import annotations

from tests.lt2.pretended_card import card

card.install()

from collections.abc import Iterator  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from lt2.config import ModelConfig  # noqa: E402
from lt2.decode import DecodeStep  # noqa: E402
from lt2.model import LoopedLM  # noqa: E402
from lt2.train import parallel  # noqa: E402
from lt2.train.loop import Batch, TrainConfig, TrainState, train  # noqa: E402
from lt2.train.loss import next_token_objective  # noqa: E402
from lt2.train.optim import adamw, muon  # noqa: E402
from lt2.train.schedules import learning_rate  # noqa: E402

B, L, V = 2, 256, 512
MIXERS = {
    **{name: {"type": name} for name in ("full", "la", "retnet", "mamba2", "gla", "hgrn2", "deltanet", "gdn", "kda")},
    "mla": {"type": "mla"},
    "window": {"type": "window", "window": 64},
    "nsa": {"type": "nsa", "num_heads": 16, "num_kv_heads": 1},
    "dsa": {"type": "dsa", "top_k": 64},
    "dsa, chosen tokens only": {"type": "dsa", "top_k": 64, "warmup_steps": 0},
}
# fla asks itself how many pieces packed documents come to, for every layer of the first six.
COUNTS_PIECES = {**dict.fromkeys(("la", "retnet", "mamba2", "gla", "hgrn2"), "chunk_h"), "nsa": "parallel"}
OF_FLA = (*COUNTS_PIECES, "deltanet", "gdn", "kda")
HYBRID = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"}


def looped(layout: Any, n_layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> LoopedLM:
    sizes = {"vocab_size": V, "dim": 256, "n_layers": n_layers, "n_loops": 2, "num_heads": 2, "max_seq_len": L}
    sizes |= settings
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return LoopedLM(ModelConfig(**sizes, layout=layout))
    finally:
        torch.set_default_dtype(torch.float32)


def tokens(rows: int = B, device: str = "cuda") -> torch.Tensor:
    return torch.zeros(rows, L + 1, dtype=torch.int64, device=device)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_training_step_stays_on_the_card_and_does_not_wait(name, packed):
    with card.running():
        model = looped({"type": "uniform", "mixer": MIXERS[name]}).train()
        batch = Batch(tokens=tokens(), doc_ids=tokens() if packed else None, step=5)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _, _ = next_token_objective(document_mask=packed)(model, batch)
        loss.backward()
        assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.is_cuda] == []
    assert card.launched["cross_entropy_fwd_kernel"] == card.launched["cross_entropy_bwd_kernel"] == 1
    assert (len(card.launched) > 2) == (name in OF_FLA or "chosen" in name), card.launched
    waits = dict(card.waits)
    if packed:
        assert (
            waits.pop("documents._packed_layout", 0) <= 2
        )  # once for attention, once for recurrences, whatever N and T
        for place in [place for place in waits if place.split(".")[0] == COUNTS_PIECES.get(name)]:
            del waits[place]
    assert waits == {}


@pytest.mark.parametrize("name", MIXERS)
def test_prefill_and_decoding_stay_on_the_card_and_do_not_wait(name):
    with card.running(), torch.no_grad():
        model = looped({"type": "uniform", "mixer": MIXERS[name]}, dtype=torch.bfloat16).eval()
        cache = model.init_cache(B, L)
        model(tokens()[:, :100], cache=cache, lengths=torch.full((B,), 100, device="cuda"))
        step = DecodeStep(model, cache, record=False)
        for _ in range(2):
            assert step(tokens()[:, 0]).shape == (B, V)
    assert card.waits == {}


def eight_ranks() -> DeviceMesh:
    """A process group whose collectives move nothing."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    return dist.device_mesh.init_device_mesh("cuda", (8,), mesh_dim_names=("data",))


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("recompute", "make"), [("none", adamw), ("selective", adamw), ("block", adamw), ("loop", adamw), ("none", muon)]
)
def test_the_loop_listens_to_the_step_before_only(recompute, make, ranks):
    """Once a step, when the next one is on its way; and where it logs, for five figures."""

    def data() -> Iterator[Batch]:
        while True:
            yield Batch(tokens=tokens(4, "cpu"))

    mesh = eight_ranks() if ranks > 1 else None
    with card.running():
        model = looped(HYBRID)
        parallel.wrap_blocks(model, recompute=recompute)
        sharding = None if mesh is None else parallel.shard(model, mesh, param_dtype=torch.bfloat16)
        config = TrainConfig(steps=3, global_batch_size=4 * ranks, micro_batch_size=2, lr=1e-3, log_every=3)
        optimizer, schedule = make(model, lr=1e-3), learning_rate(lr=1e-3, steps=3)
        state = TrainState()
        train(model, next_token_objective(), data(), optimizer, schedule, config, state, sharding=sharding)
    assert card.waits.pop("guard.read") == 3
    assert {place.split(".")[0] for place in card.waits} == {"loop"}
    assert card.waits.total() == 5


OURO = {"sandwich_norm": True, "norm_each_loop": True, "loop_residual": False, "halting": {"type": "exit_gate"}}
FULL = {"type": "uniform", "mixer": {"type": "full"}}
KEPT = {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "kept": [1]}
RANDOM = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.5}
OTHERS = {  # name -> (objective, the model's settings)
    "exit gate": ({"type": "exit_gate"}, {"layout": FULL, **OURO}),
    "act": ({"type": "next_token"}, {"layout": HYBRID, "halting": {"type": "act"}}),
    "random layout": ({"type": "next_token"}, {"layout": RANDOM}),
    "align": ({"type": "align"}, {"layout": {**KEPT, "both": True, "kept": []}}),
    "distill": ({"type": "distill", "k": 16}, {"layout": KEPT}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objectives_stay_on_the_card_and_do_not_wait(name):
    kind, settings = OTHERS[name]
    config = TrainConfig(steps=3, global_batch_size=B, lr=1e-3, objective=kind)
    with card.running():
        model = looped(**settings).train()
        teacher = looped(FULL).eval().requires_grad_(False) if name == "distill" else None
        objective = config.objective.build(config, teacher)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _, metrics = objective(model, Batch(tokens=tokens(), step=1))
        loss.backward()
        assert loss.is_cuda
        assert all(value.is_cuda for value in metrics.values())
    assert card.waits == {}


def test_layers_and_loops_share_what_is_compiled():
    """fla's kernels break a block's graph; what is between them is compiled once, whatever N and T."""
    from torch._dynamo.utils import counters

    frames = []
    for n_layers in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        with card.running():
            model = looped(HYBRID, n_layers).train()
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="eager")
            for step in (5, 6):
                with torch.autocast("cuda", torch.bfloat16):
                    next_token_objective()(model, Batch(tokens=tokens(), step=step))[0].backward()
        frames.append(dict(counters["frames"]))
        assert counters["graph_break"]
        assert all("chunk_gated_delta_rule" in reason for reason in counters["graph_break"]), counters["graph_break"]
    assert frames[0] == frames[1]


SIZES_13B = {"dim": 2048, "num_heads": 16, "max_seq_len": 32768}


def test_our_kernels_compile_and_fit_a_block_at_the_papers_sizes():
    """A layer of every mixer that has kernels of ours, with its defaults, decoding eight rows of up to 32k tokens and,
    for selected attention, training."""
    card.shared.clear()
    names = ("full", "mla", "nsa", "dsa", "la", "retnet", "mamba2", "gla", "hgrn2", "deltanet", "gdn", "kda")
    for mixer in ({"type": "full", "num_kv_heads": 4}, *({"type": name} for name in names)):
        layout = {"type": "uniform", "mixer": mixer}
        with card.running(), torch.no_grad():
            model = looped(layout, 1, torch.bfloat16, **SIZES_13B).eval()
            cache = model.init_cache(8, 32768)
            DecodeStep(model, cache, record=False)(tokens(8)[:, 0])
    with card.running():
        model = looped({"type": "uniform", "mixer": {"type": "dsa", "warmup_steps": 0}}, 1, **SIZES_13B).train()
        with torch.autocast("cuda", torch.bfloat16):
            next_token_objective()(model, Batch(tokens=torch.zeros(1, 4097, dtype=torch.int64, device="cuda")))[
                0
            ].backward()
    assert card.shared.keys() == {
        "_partial",
        "_combine",
        "_step",
        "_delta_decode",
        "_forward_kernel",
        "_backward_kernel",
    }
    assert max(card.shared.values()) <= card.SHARED_MEMORY, card.shared
