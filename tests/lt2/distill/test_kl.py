"""The top-k KL against its definition in fp64, and what is alive while it is computed."""

import pytest
import torch

from lt2.distill.kl import TopK, chunked_topk_kl, top_k
from lt2.memory import LiveStorages

N, D, V, T = 13, 8, 31, 3
SHARES = (0.25, 0.0, 0.75)


def case(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    loops = [draw(N, D).requires_grad_() for _ in range(T)]
    weight = draw(V, D).requires_grad_()
    states, head = [draw(N, D) for _ in range(T)], draw(V, D)
    return loops, weight, states, head, torch.arange(N) % 4 != 2


def definition(loops, weight, states, head, counted, k, temperature):
    """From whole logits, one loop and token at a time."""
    found = []
    for hidden, state in zip(loops, states):
        total = torch.zeros((), dtype=torch.float64)
        for n in range(N):
            if not counted[n]:
                continue
            z_t, z_s = head @ state[n], weight @ hidden[n]
            chosen = z_t.argsort(descending=True)[:k]
            p = torch.softmax(z_t[chosen] / temperature, 0)
            q = torch.softmax(z_s[chosen] / temperature, 0)
            total = total + (p * (p / q).log()).sum()
        found.append(total)
    return torch.stack(found)


def chunked(loops, weight, states, head, counted, k, temperature=1.0, rows=None):
    teacher = lambda loop, start, stop: top_k(states[loop][start:stop], head, k)  # noqa: E731
    return chunked_topk_kl(
        loops, weight, teacher, loop_weights=SHARES, counted=counted, temperature=temperature, chunk_rows=rows
    )


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (5, 1.0), (5, 2.5), (V, 1.0), (None, 0.5)])
def test_equals_its_definition_with_gradients_whatever_the_chunks(k, temperature, rows):
    args = case()
    found = chunked(*args, k, temperature, rows)
    expected = definition(*args, V if k is None else k, temperature)
    torch.testing.assert_close(found.kl, expected, rtol=1e-12, atol=1e-12)
    assert not found.kl.requires_grad
    loss = (expected * torch.tensor(SHARES, dtype=torch.float64)).sum()
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(loss, [args[1], args[0][0], args[0][2]])
    (2 * found.loss).backward()
    for grad, want in zip((args[1].grad, args[0][0].grad, args[0][2].grad), wanted):
        torch.testing.assert_close(grad, 2 * want, rtol=1e-11, atol=1e-12)
    assert args[0][1].grad.abs().max() == 0  # a loop that weighs nothing


def test_frozen_states_or_a_frozen_head_leave_the_others_gradient():
    loops, weight, *rest = case()
    chunked(loops, weight, *rest, 5, rows=4).loss.backward()
    frozen = [hidden.detach() for hidden in loops]
    head = weight.detach().requires_grad_()
    chunked(frozen, head, *rest, 5, rows=4).loss.backward()
    assert torch.equal(head.grad, weight.grad)
    free = [hidden.requires_grad_() for hidden in frozen]
    chunked(free, weight.detach(), *rest, 5, rows=4).loss.backward()
    assert all(torch.equal(ours.grad, hidden.grad) for ours, hidden in zip(free, loops))


def test_k_of_the_whole_vocabulary_is_the_full_kl():
    loops, weight, states, head, counted = case(1)
    by_id = TopK(*(states[0] @ head.T).topk(V, dim=-1))  # as a cache would store it
    shares = {"loop_weights": (1.0,), "counted": counted}
    stored = chunked_topk_kl(loops[:1], weight, lambda loop, a, b: TopK(*(t[a:b] for t in by_id)), **shares)
    z_t, z_s = states[0] @ head.T, loops[0] @ weight.T
    full = torch.nn.functional.kl_div(z_s.log_softmax(-1), z_t.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(stored.loss, full.sum(-1)[counted].sum(), rtol=1e-12, atol=1e-12)
    whole = chunked(loops, weight, states, head, counted, V)
    torch.testing.assert_close(whole.kl[0], stored.kl[0], rtol=1e-12, atol=1e-12)


def test_an_equal_student_has_no_loss_and_no_gradient():
    _, _, states, head, counted = case(2)
    loops, weight = [s.clone().requires_grad_() for s in states], head.clone().requires_grad_()
    found = chunked(loops, weight, states, head, counted, 6)
    found.loss.backward()
    assert found.kl.abs().max() < 1e-13
    assert weight.grad.abs().max() < 1e-13


def test_bf16_autocast_keeps_statistics_in_fp32():
    loops, weight, states, head, counted = case(3, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked(loops, weight, states, head, counted, 5)
    assert found.loss.dtype == torch.float32
    rounded = [[t.detach().bfloat16().float() for t in group] for group in (loops, states)]
    head16, weight16 = head.bfloat16().float(), weight.detach().bfloat16().float()
    logits = [[(h @ w.T).bfloat16().double() for h in group] for group, w in zip(rounded, (weight16, head16))]
    expected = 0.0
    for z_s, z_t in zip(*logits):
        values, ids = z_t.topk(5, dim=-1)
        p, q = values.softmax(-1), z_s.gather(1, ids).softmax(-1)
        expected += float((p * (p / q).log()).sum(-1)[counted].sum())
    assert float(found.kl.sum()) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("k", [2, None])
def test_gradients_under_bf16_autocast_are_those_of_fp32_but_for_rounding(k):
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        loops, weight, states, head, counted = case(3, torch.float32)
        logits = [state @ head.T for state in states]
        stored = [TopK(z, None) if k is None else TopK(*z.topk(k, dim=-1)) for z in logits]
        teacher = lambda loop, a, b: TopK(*(None if t is None else t[a:b] for t in stored[loop]))  # noqa: B023, E731
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            found = chunked_topk_kl(loops, weight, teacher, loop_weights=(0.2, 0.3, 0.5), counted=counted, chunk_rows=4)
        found.loss.backward()
        grads.append([weight.grad, *(hidden.grad for hidden in loops)])
    for rounded, exact in zip(*grads):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() <= 2e-2 * exact.norm()


def test_second_backward_is_an_error_not_a_wrong_gradient():
    found = chunked(*case(), 4)
    found.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        found.loss.backward()


def live_bytes(length, loops, vocab, rows):
    """Peak of forward and backward above the states, less the gradients of states and head that it returns."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    states, head = [draw(length, D) for _ in range(loops)], draw(vocab, D)
    ours, weight = [draw(length, D).requires_grad_() for _ in range(loops)], draw(vocab, D).requires_grad_()
    teacher = lambda loop, start, stop: top_k(states[loop][start:stop], head, 8)  # noqa: E731
    shares = {"loop_weights": (1 / loops,) * loops, "counted": torch.ones(length, dtype=torch.bool)}
    with LiveStorages() as live:
        chunked_topk_kl(ours, weight, teacher, **shares, chunk_rows=rows).loss.backward()
    return live.peak - 4 * (length * loops + vocab) * D


def test_peak_memory_is_a_chunk_whatever_the_length_and_the_loops():
    vocab, rows = 1000, 16
    chunk = 4 * rows * vocab
    short, long = live_bytes(64, 1, vocab, rows), live_bytes(1024, 4, vocab, rows)
    assert chunk <= short <= 4 * chunk
    assert abs(long - short) < 0.05 * chunk
    assert long < 4 * 1024 * vocab / 10  # one loop's logits are ten times as large
    assert live_bytes(1024, 4, 2 * vocab, rows) < 2.1 * long
