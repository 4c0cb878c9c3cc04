"""gated_linear and gated_delta: chunkwise and one-token forms against the token-by-token oracles."""

from __future__ import annotations

import pytest
import torch

from lt2 import ops
from lt2.ops.recurrence import chunking

OPS = ["linear", "delta"]
DECAYS = [None, "scalar", "channel"]
# One token, inside / at / just past a sub-block (8), a chunk (32, 64), several chunks with a ragged tail.
LENGTHS = [1, 7, 8, 31, 32, 33, 64, 65, 100]
# A document start at the very first token, at and around chunk edges, twice in a chunk, and in one row only.
STARTS = [(0, 0), (0, 31), (0, 32), (0, 33), (0, 50), (1, 64), (1, 70), (1, 99)]

pytestmark = pytest.mark.parametrize("op", OPS)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunkwise_equals_the_oracle(recurrence, assert_same, op, decay, length):
    case = recurrence(op, decay, length)
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.gradients(lambda c: c.oracle())
    assert_same(ours, expected, 1e-13)
    assert_same(grads, expected_grads, 1e-12)


@pytest.mark.parametrize("decay", DECAYS)
def test_documents_equal_the_oracle(recurrence, assert_same, op, decay):
    case = recurrence(op, decay, 100, starts=STARTS)
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.gradients(lambda c: c.oracle())
    assert_same(ours, expected, 1e-13)
    assert_same(grads, expected_grads, 1e-12)


@pytest.mark.parametrize("decay", DECAYS)
def test_spans_equal_the_oracle(recurrence, assert_same, monkeypatch, op, decay):
    """Long sequences go span by span; here three spans and a bit, with documents starting in and at the edge of one."""
    monkeypatch.setattr(chunking, "SPAN", 64)
    case = recurrence(op, decay, 200, starts=[(0, 5), (0, 64), (0, 70), (1, 128)])
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.gradients(lambda c: c.oracle())
    assert_same(ours, expected, 1e-13)
    assert_same(grads, expected_grads, 1e-12)


@pytest.mark.parametrize("decay", DECAYS)
def test_nothing_crosses_a_document_start(recurrence, op, decay):
    case = recurrence(op, decay, 80, starts=[(0, 45), (1, 45)])
    changed = case.map(lambda x: torch.cat([x[:, :45] * 3, x[:, 45:]], dim=1) if x.shape[1] == 80 else x * 3)
    (o, state), (o_changed, state_changed) = case.run(), changed.run()
    assert not torch.equal(o[:, :45], o_changed[:, :45])
    # The in-chunk sums of log-decays carry the first document's values, exactly cancelled up to rounding.
    torch.testing.assert_close(o[:, 45:], o_changed[:, 45:], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, state_changed, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_extreme_gates(recurrence, assert_same, op, decay):
    case = recurrence(op, decay, 70)
    generator = torch.Generator().manual_seed(3)
    choice = torch.randint(0, 5, case.g.shape, generator=generator)
    g = torch.tensor([0.0, -1e-9, -30.0, -1e3, -1e8], dtype=torch.float64)[choice]
    case = case.with_(g=g)
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.gradients(lambda c: c.oracle())
    assert_same(ours, expected, 1e-12)
    assert_same(grads, expected_grads, 1e-12)

    ours, grads = case.map(torch.Tensor.float).gradients(lambda c: c.run())
    assert_same(ours, expected, 1e-6)
    assert_same(grads, expected_grads, 2e-6)


@pytest.mark.parametrize("decay", ["scalar", "channel"])
def test_a_gate_of_zero_forgets_everything(recurrence, op, decay):
    case = recurrence(op, decay, 40)
    g = case.g.clone()
    g[:, 20] = float("-inf")
    o, state = case.with_(g=g).run()
    after = case.map(lambda x: x[:, 20:] if x.shape[1] == 40 else torch.zeros_like(x))
    o_after, state_after = after.run()
    torch.testing.assert_close(o[:, 20:], o_after, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, state_after, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", DECAYS)
def test_padding_the_tail_keeps_the_final_state(recurrence, op, decay):
    case = recurrence(op, decay, 37)
    o, state = case.run()
    padded = case.map(lambda x: torch.cat([x, torch.zeros_like(x[:, :30])], dim=1) if x.shape[1] == 37 else x)
    o_padded, state_padded = padded.run()
    torch.testing.assert_close(o_padded[:, :37], o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state_padded, state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("cut", [1, 32, 45])
def test_two_calls_equal_one(recurrence, op, decay, cut):
    case = recurrence(op, decay, 77, starts=[(0, 10), (1, 60)])

    def part(span: slice):
        piece = case.map(lambda x: x[:, span] if x.shape[1] == 77 else x)
        return piece.with_(reset=case.reset[:, span])

    o, state = case.run()
    o_first, middle = part(slice(None, cut)).run()
    o_second, state_second = part(slice(cut, None)).with_(initial_state=middle).run()
    torch.testing.assert_close(torch.cat([o_first, o_second], dim=1), o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state_second, state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", DECAYS)
def test_steps_equal_the_oracle(recurrence, op, decay):
    case = recurrence(op, decay, 12)
    expected, expected_state = case.oracle()
    state, outputs = case.initial_state, []
    for t in range(12):
        o, state = case.step(t, state)
        outputs.append(o)
    torch.testing.assert_close(torch.stack(outputs, dim=1), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state, expected_state, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_row_does_not_depend_on_its_batch(recurrence, op, decay):
    case = recurrence(op, decay, 50, starts=[(0, 20), (2, 40)], batch=3)
    o, state = case.run()
    for row in range(3):
        alone = case.map(lambda x, row=row: x[row : row + 1]).with_(reset=case.reset[row : row + 1])
        o_alone, state_alone = alone.run()
        torch.testing.assert_close(o_alone, o[row : row + 1], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(state_alone, state[row : row + 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("decay", DECAYS)
def test_fp32_and_bf16(recurrence, assert_same, op, decay):
    case = recurrence(op, decay, 150, key_dim=32, value_dim=16)
    o, state = case.oracle()
    expected = {"o": o, "state": state}
    o, state = case.map(torch.Tensor.float).run()
    assert (o.dtype, state.dtype) == (torch.float32, torch.float32)
    assert_same({"o": o, "state": state}, expected, 2e-6)

    half = case.map(torch.Tensor.bfloat16)
    o, state = half.map(torch.Tensor.double).oracle()
    o_half, state_half = half.run()
    assert (o_half.dtype, state_half.dtype) == (torch.bfloat16, torch.float32)
    assert_same({"state": state_half}, {"state": state}, 2e-6)  # computed in fp32 from the bf16 inputs
    assert_same({"o": o_half}, {"o": o}, 4e-3)  # rounded once, on the way out


def test_autocast_does_not_lower_the_precision(recurrence, op):
    case = recurrence(op, "scalar", 40).map(torch.Tensor.float)
    o, state = case.run()
    with torch.autocast("cpu", torch.bfloat16):
        o_auto, state_auto = case.run()
        step_o, _ = case.step(0, case.initial_state)
    assert torch.equal(o, o_auto)
    assert torch.equal(state, state_auto)
    torch.testing.assert_close(step_o, o[:, 0], rtol=1e-5, atol=1e-6)


def test_scale_and_optional_state(recurrence, op):
    case = recurrence(op, "scalar", 20)
    o, _ = case.run()
    scaled, none = case.run(scale=2 * 8**-0.5, output_final_state=False)
    torch.testing.assert_close(scaled, 2 * o, rtol=1e-12, atol=0)
    assert none is None


def test_wrong_shapes_are_named(recurrence, op):
    case = recurrence(op, "scalar", 10)
    with pytest.raises(ValueError, match="g must be"):
        case.with_(g=case.g[:, :5]).run()
    with pytest.raises(ValueError, match="initial_state must be"):
        case.with_(initial_state=case.initial_state.transpose(-1, -2)).run()
    with pytest.raises(ValueError, match="v must be .* repeat q and k first"):
        case.with_(v=case.v.repeat(1, 1, 2, 1)).run()
    with pytest.raises(ValueError, match="state must be"):
        case.step(0, case.initial_state[:1])
    with pytest.raises(ValueError, match="backend must be one of"):
        ops.gated_linear_attention(case.q, case.k, case.v, backend="cuda")
