"""A step's timeline in numbers small enough to follow: what is live at every moment that could be its peak."""

from dataclasses import replace

import pytest

from lt2.memory.walk import Loss, Memory, Unit, Walk, Weights
from lt2.train.optim import freeze
from tests.lt2 import tiny

PEAK = 10**6
WEIGHTS = Weights(
    all=100, blocks=[30, 40], learning=90, learning_blocks=[20, 40], largest=25, head=10, embedding=10, matrices=50,
    largest_matrix=(5, 4),
)  # fmt: skip
LOWER, UPPER = Unit(1000, 100, 80, 0, 0), Unit(2000, 200, 160, 0, 0)  # kept, once, gradients; peaks are set in tests
END = Unit(500, 0, 0, 0, 0)
LOSS = Loss(peak=0, state=5000, states=3, given=17)
START, STATE = 7, 600
FORWARD, BACKWARD = {"forward_peak": PEAK}, {"backward_peak": PEAK}


def peak(
    recompute="none", *, unit=None, end=None, loss=None, weights=None, loops=2, waiting=False, shards=1, keep=True,
    tied=False, muon=0,
):  # fmt: skip
    """unit: (loop, layer, its peak); end, loss, weights: what is another there."""
    table = [[LOWER, UPPER] for _ in range(loops)]
    if unit is not None:
        loop, layer, changes = unit
        table[loop][layer] = replace(table[loop][layer], **changes)
    walk = Walk(
        replace(WEIGHTS, **weights or {}), waiting=waiting, sharded=shards > 1, shards=shards, keep=keep, itemsize=2,
        tied=tied, muon=muon,
    )  # fmt: skip
    walk.add(teacher=1)
    walk.run(table, START, replace(END, **end or {}), replace(LOSS, **loss or {}), STATE, recompute=recompute)
    return walk.peak


def alone(gradients=0, activations=0, workspace=PEAK):
    return Memory(400, 1, 720, gradients, 0, activations, workspace)


def sharded(gradients=0, gathered=0, activations=0, workspace=PEAK):
    return Memory(200, 1, 360, gradients, gathered, activations, workspace)


def test_what_is_frozen_has_neither_gradients_nor_moments():
    model = tiny.model(tiny.FULL, n_layers=2)
    sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    matrix, rest = model.embed.weight.numel(), model.rho.numel() + model.norm.weight.numel()
    total = sum(sizes) + 2 * matrix + rest
    largest = max(p.numel() for p in model.parameters())
    linear = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    assert Weights.of(model) == Weights(
        total, sizes, total, sizes, largest, matrix, matrix, sum(p.numel() for p in linear), (24, 16)
    )
    freeze(model, lambda name: float(name.startswith("blocks.1.ffn_norm")))
    assert Weights.of(model) == Weights(total, sizes, 16, [0, 16], 16, 0, 0, 0, (0, 0))


def test_before_the_students_forward_its_teacher_is_asked():
    assert peak(loss={"asking": PEAK}) == alone()
    assert peak(loss={"asking": PEAK}, waiting=True) == alone(gradients=360)


def test_what_the_forward_pass_leaves_adds_up():
    before = START + 17
    assert peak(unit=(0, 0, FORWARD)) == alone(activations=before)
    assert peak(unit=(0, 1, FORWARD)) == alone(activations=before + 1100)
    first = before + 1100 + 2200 + 500 + 3
    assert peak(unit=(1, 0, FORWARD)) == alone(activations=first)
    assert peak(end=FORWARD) == alone(activations=first + 3000)
    assert peak(loss={"peak": PEAK}) == alone(activations=first + 3503)


def test_a_loop_that_runs_again_leaves_its_input():
    once = START + 17 + 300
    assert peak("loop", loss={"peak": PEAK}) == alone(activations=once + 2 * (STATE + 3))
    again = START + 5000 + STATE + 3 + 3500  # that of the loop before; its own makes way for what it becomes
    assert peak("loop", end=BACKWARD) == alone(gradients=40, activations=again)
    assert peak("loop", unit=(0, 1, BACKWARD)) == alone(gradients=40 + 240, activations=START + 5000 + 3000)


def test_the_backward_pass_frees_what_the_forward_pass_left():
    last = START + 5000 + 3803 + 3000
    assert peak(end=BACKWARD) == alone(gradients=40, activations=last + 500)
    assert peak(unit=(1, 1, BACKWARD)) == alone(gradients=40, activations=last)
    # Without recomputation gradients are those of autocast's copies until the first loop's.
    assert peak(unit=(1, 0, BACKWARD)) == alone(gradients=240, activations=last - 2000)
    assert peak(unit=(0, 1, BACKWARD)) == alone(gradients=340, activations=last - 3503)
    assert peak(unit=(0, 0, BACKWARD)) == alone(gradients=300, activations=last - 3503 - 2200)


@pytest.mark.parametrize("recompute", ["none", "block", "loop"])
@pytest.mark.parametrize("together", [0, 50])
def test_in_the_end_only_the_state_and_its_gradient_are_left(recompute, together):
    found = peak(recompute, loss={"together": together}, weights={"embedding": PEAK // 2})
    assert found == alone(gradients=40 + 240, activations=START + 5000)


def test_gradients_of_all_loops_in_one_tensor_stay_until_the_first():
    last = START + 5000 + 3800 + 3000
    assert peak(unit=(1, 1, BACKWARD), loss={"together": 50}) == alone(gradients=40, activations=last + 50)
    assert peak(unit=(0, 1, BACKWARD), loss={"together": 50}) == alone(gradients=340, activations=last - 3500)


def test_what_waits_is_added_to_and_a_tied_head_waits_for_its_embedding():
    end = {"weights": {"embedding": PEAK // 2}, "waiting": True}
    assert peak(**end).gradients == 360
    assert peak(**end, tied=True).gradients == 400
    assert peak(unit=(0, 0, BACKWARD), waiting=True).gradients == 360 + 100  # the upper one's sum is already added
    assert peak(unit=(0, 0, BACKWARD), waiting=True, loops=1).gradients == 360
    # Of one loop each gradient is added at once; of several, a block's are summed first.
    assert peak("block", unit=(0, 1, {"gradients": PEAK}), waiting=True, loops=1).total < PEAK
    assert peak("block", unit=(1, 1, {"gradients": PEAK}), waiting=True).gradients == 360 + PEAK


def test_blocks_are_gathered_once_or_each_time():
    kept, freed = {"shards": 2}, {"shards": 2, "keep": False}
    assert peak(unit=(0, 0, FORWARD), **kept) == sharded(gathered=60 + 60, activations=START + 17)
    assert peak(unit=(1, 0, FORWARD), **kept).gathered == 60 + 60 + 80
    for unit in ((1, 0, FORWARD), (1, 0, BACKWARD)):
        found = peak(unit=unit, **freed)
        assert (found.gathered, found.workspace) == (60, PEAK + 2 * 60)
    assert peak(unit=(1, 0, FORWARD), keep=False).workspace == PEAK


@pytest.mark.parametrize("waiting", [False, True])
def test_a_block_is_reduced_when_its_gradient_is_whole(waiting):
    whole = {"learning_blocks": [20, PEAK // 4]}
    waits, head = (360, 0) if waiting else (0, 40)
    found = peak("block", weights=whole, shards=2, waiting=waiting)
    assert (found.gradients, found.workspace) == (waits + head + 240, PEAK)
    found = peak("block", weights={"embedding": PEAK // 2}, shards=2, waiting=waiting)
    assert found.gradients == waits + head + 40 + 80 - (240 if waiting else 0)


def test_the_update_has_all_gradients_and_nothing_else():
    assert peak(weights={"largest": PEAK}) == alone(gradients=360, workspace=8 * PEAK)
    assert peak(weights={"largest": PEAK}, shards=2) == sharded(gradients=180, workspace=4 * PEAK)


def test_muon_has_one_moment_of_a_matrix_and_orthogonalises_a_whole_one():
    moments = 8 * 90 - 4 * 50
    weights = {"largest_matrix": (300, 200)}
    whole = peak(weights=weights, muon=4)
    assert whole == Memory(400, 1, moments, 360, 0, 0, 4 * (3 * 300 * 200 + 2 * 200 * 200))
    in_bf16 = peak(weights=weights, muon=2, shards=2)
    assert in_bf16 == Memory(200, 1, moments // 2, 180, 0, 0, 2 * (4 * 300 * 200 + 2 * 200 * 200))
    assert peak(muon=4, unit=(0, 0, FORWARD)).optimizer == moments
