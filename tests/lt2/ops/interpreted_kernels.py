"""Every fla kernel we dispatch to, against the fp64 oracles. Run by test_fla_kernels.py in a process of its own."""

from __future__ import annotations

import fla_interpreter  # first: it must come before anything that imports triton
import pytest
import torch

fla_interpreter.install()

from lt2.ops import dispatch  # noqa: E402
from lt2.ops.cross_entropy import cross_entropy_  # noqa: E402
from lt2.ops.kernels import fla as fla_kernels  # noqa: E402

# bf16 rounds inputs, outputs and intermediates to 8 bits: a few units of 2^-8.
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
# Around the kernels' chunk of 64, at a row's very first token, one-token documents, in one row only.
STARTS = [(0, 0), (0, 13), (0, 64), (1, 40), (1, 41)]


def _half_gates_stay_fp32(case, dtype):
    """q, k, v in `dtype`; gates, beta and states in fp32, as the mixers compute them."""
    single = case.map(torch.Tensor.float)
    return single.with_(q=single.q.to(dtype), k=single.k.to(dtype), v=single.v.to(dtype))


@pytest.fixture
def kernels(monkeypatch):
    """Names of the fla kernels called."""
    names = []
    for runner in ("_run", "_run_step"):
        original = getattr(fla_kernels, runner)

        def recording(kernel, *args, original=original):
            names.append(kernel.__name__)
            return original(kernel, *args)

        monkeypatch.setattr(fla_kernels, runner, recording)
    return names


@pytest.mark.parametrize(
    ("dtype", "starts", "length"),  # bf16 is about dtypes: a third of the tokens to interpret
    [(torch.float32, (), 70), (torch.float32, STARTS, 70), (torch.bfloat16, [(0, 5), (1, 16), (1, 17)], 24)],
    ids=["fp32-rows", "fp32-packed", "bf16-packed"],
)
@pytest.mark.parametrize(
    ("op", "decay", "kernel"),
    [
        ("linear", None, "chunk_simple_gla"),
        ("linear", "scalar", "chunk_simple_gla"),
        ("linear", "channel", "chunk_gla"),
        ("delta", None, "chunk_delta_rule"),
        ("delta", "scalar", "chunk_gated_delta_rule"),
        ("delta", "channel", "chunk_kda"),
    ],
)
def test_chunk_kernels(recurrence, assert_same, kernels, op, decay, kernel, starts, length, dtype):
    # K != V: a swapped layout cannot pass.
    case = recurrence(op, decay, length, starts=starts, key_dim=32, value_dim=16)
    case = _half_gates_stay_fp32(case, dtype)
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.map(torch.Tensor.double).gradients(lambda c: c.oracle())
    assert ours["o"].dtype == dtype
    assert ours["state"].dtype == torch.float32
    assert_same(ours, expected, BOUNDS[dtype])
    assert_same(grads, expected_grads, BOUNDS[dtype])
    if kernel == "chunk_delta_rule" and dtype == torch.float32:
        kernel = "chunk_gated_delta_rule"  # the ungated one rejects fp32
    assert kernels == [kernel]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("op", "decay", "kernel"),
    [
        ("linear", None, "fused_recurrent_simple_gla"),
        ("linear", "scalar", "fused_recurrent_simple_gla"),
        ("linear", "channel", "fused_recurrent_gla"),
        ("delta", None, "fused_recurrent_delta_rule"),
        ("delta", "scalar", "fused_recurrent_gated_delta_rule"),
        ("delta", "channel", "fused_recurrent_kda"),
    ],
)
def test_step_kernels(recurrence, assert_same, kernels, op, decay, kernel, dtype):
    case = _half_gates_stay_fp32(recurrence(op, decay, 3, key_dim=32, value_dim=16), dtype)
    expected_o, expected_state = case.map(torch.Tensor.double).oracle()
    state, outputs = case.initial_state, []
    for t in range(3):
        previous = state.clone()
        o, new = case.step(t, state)
        assert torch.equal(state, previous)  # the caller's state is left alone
        outputs.append(o)
        state = new
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    ours = {"o": torch.stack(outputs, dim=1), "state": state}
    assert_same(ours, {"o": expected_o, "state": expected_state}, BOUNDS[dtype])
    assert kernels == [kernel] * 3


@pytest.mark.parametrize(("op", "kernel"), [("linear", "chunk_gla"), ("delta", "chunk_kda")])
def test_scalar_gates_avoid_the_miscompiled_backward(recurrence, assert_same, kernels, monkeypatch, op, kernel):
    monkeypatch.setattr(dispatch, "scalar_gate_backward_is_broken", lambda delta=True: True)
    case = recurrence(op, "scalar", 20, starts=[(0, 5)], key_dim=32, value_dim=16).map(torch.Tensor.float)
    ours, grads = case.gradients(lambda c: c.run())
    expected, expected_grads = case.map(torch.Tensor.double).gradients(lambda c: c.oracle())
    assert_same(ours, expected, BOUNDS[torch.float32])
    assert_same(grads, expected_grads, BOUNDS[torch.float32])
    with torch.no_grad():
        case.run()
    assert kernels == [kernel, {"linear": "chunk_simple_gla", "delta": "chunk_gated_delta_rule"}[op]]


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "rows", "vocab"), [(torch.float32, 7, 1000), (torch.bfloat16, 7, 1000), (torch.bfloat16, 2, 70_000)]
)
def test_cross_entropy(assert_same, dtype, rows, vocab, z_loss):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[1] = -7
    targets[0] = vocab - 1
    options = {"ignore_index": -7, "z_loss": z_loss}
    names = ("loss", "ce", "grad")
    expected = dict(zip(names, cross_entropy_(logits.double(), targets, gradient=True, **options)))
    without = cross_entropy_(logits.clone(), targets, gradient=False, **options)
    given = logits.clone()
    ours = dict(zip(names, cross_entropy_(given, targets, gradient=True, **options)))
    assert without[2] is None
    assert torch.equal(without[0], ours["loss"])
    assert torch.equal(without[1], ours["ce"])
    assert ours["grad"].data_ptr() == given.data_ptr()  # no second block of the vocabulary's width
    assert not ours["grad"][1].any()
    assert (ours["loss"].dtype, ours["ce"].dtype, ours["grad"].dtype) == (torch.float32, torch.float32, dtype)
    assert_same(ours, expected, BOUNDS[dtype])
