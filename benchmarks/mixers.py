"""Sequence ops on CPU, forward + backward, against transformers' torch paths and fla's naive ones on the same
tensors.

python benchmarks/mixers.py [--quick] [--json FILE]. Peers whose time explodes with length run up to a limit. A
second set of rows compares our own time per token with that at the shortest length: 1 means flat.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from comparison import interleaved, print_rows, row, write_rows
from torch import Tensor

from lt2.ops import causal_attention, gated_delta_rule, gated_linear_attention, windowed_attention

HEADS, DIM, WINDOW = 4, 64, 256
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384), (2048,)
FLAT_LENGTHS, QUICK_FLAT_LENGTHS = (1024, 2048, 4096, 8192, 16384), (1024, 4096)


@dataclass(frozen=True)
class Inputs:
    """Random leaves, (1, L, HEADS, DIM) or (1, L, HEADS): g per head, gk per channel, dt > 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    gk: Tensor
    beta: Tensor
    dt: Tensor
    A: Tensor


@dataclass(frozen=True)
class Work:
    """One op of ours, and its peers by name with the longest sequence each is run at."""

    ours: Callable[[Inputs], Tensor]
    peers: dict[str, tuple[Callable[[Inputs], Tensor], int]]


def make_inputs(length: int) -> Inputs:
    generator = torch.Generator().manual_seed(length)

    def random(*shape):
        return torch.randn(1, length, HEADS, *shape, generator=generator)

    leaves = Inputs(
        q=F.normalize(random(DIM), dim=-1),
        k=F.normalize(random(DIM), dim=-1),
        v=random(DIM),
        g=F.logsigmoid(random() + 3),
        gk=F.logsigmoid(random(DIM) + 3),
        beta=random().sigmoid(),
        dt=F.softplus(random() - 2),
        A=-torch.linspace(1, 4, HEADS),
    )
    for leaf in vars(leaves).values():
        leaf.requires_grad_()
    return leaves


def works() -> dict[str, Work]:
    """Peers are imported here: fla warns on machines without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.ops.delta_rule.naive import delta_rule_chunkwise
        from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
        from fla.ops.gla.naive import naive_recurrent_gla
        from fla.ops.kda.naive import naive_chunk_kda
        from fla.ops.simple_gla.naive import naive_chunk_simple_gla
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    # transformers rebinds these to fla's kernels when fla is installed, which have no CPU path.
    hf_gdn, hf_kda, hf_mamba2 = map(
        inspect.unwrap, (torch_chunk_gated_delta_rule, chunk_kimi_delta_attention, mamba2_chunk_scan)
    )

    def fla_deltanet(x: Inputs) -> Tensor:
        q, k, v, beta = (t.transpose(1, 2) for t in (x.q, x.k, x.v, x.beta))
        return delta_rule_chunkwise(q, k, v, beta)[0].transpose(1, 2)

    return {
        "gdn": Work(
            lambda x: gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0],
            {
                "transformers chunk": (lambda x: hf_gdn(x.q, x.k, x.v, x.g, x.beta)[0], 16384),
                "fla naive chunk": (lambda x: naive_chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0], 16384),
            },
        ),
        "deltanet": Work(
            lambda x: gated_delta_rule(x.q, x.k, x.v, None, x.beta)[0],
            {"fla naive chunk": (fla_deltanet, 16384)},
        ),
        "kda": Work(
            lambda x: gated_delta_rule(x.q, x.k, x.v, x.gk, x.beta)[0],
            {
                "transformers chunk": (lambda x: hf_kda(x.q, x.k, x.v, x.gk, x.beta)[0], 2048),
                "fla naive chunk": (lambda x: naive_chunk_kda(x.q, x.k, x.v, x.gk, x.beta)[0], 2048),
            },
        ),
        "gla, hgrn2": Work(
            lambda x: gated_linear_attention(x.q, x.k, x.v, x.gk)[0],
            {"fla naive recurrent": (lambda x: naive_recurrent_gla(x.q, x.k, x.v, x.gk)[0], 4096)},
        ),
        "mamba2": Work(
            lambda x: gated_linear_attention(x.q, x.k, x.v * x.dt[..., None], x.A * x.dt, scale=1.0)[0],
            {
                "transformers chunk": (lambda x: _tensor(hf_mamba2(x.v, x.dt, x.A, x.k, x.q, 64)), 16384),
                "fla naive chunk": (
                    lambda x: naive_chunk_simple_gla(x.q, x.k, x.v * x.dt[..., None], x.A * x.dt, scale=1.0)[0],
                    16384,
                ),
            },
        ),
        f"window {WINDOW}": Work(
            lambda x: windowed_attention(x.q, x.k, x.v, window=WINDOW),
            {"SDPA with a mask": (masked_sdpa, 8192)},
        ),
        "gdn vs full": Work(
            lambda x: gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[0],
            {"causal SDPA": (lambda x: causal_attention(x.q, x.k, x.v), 16384)},
        ),
    }


def masked_sdpa(x: Inputs) -> Tensor:
    position = torch.arange(x.q.shape[1])
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < WINDOW)
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _tensor(output) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def forward_backward(op: Callable[[Inputs], Tensor], inputs: Inputs) -> Callable[[], None]:
    """The gradient sent back is dense, as a layer's is: that of a plain sum is a broadcast scalar, which some paths
    exploit."""
    weights = torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(0))

    def call() -> None:
        for leaf in vars(inputs).values():
            leaf.grad = None
        op(inputs).backward(weights)

    return call


def check_same_work(name: str, ours: Tensor, peer: Tensor) -> None:
    """A comparison of different results is worth nothing."""
    error = ((ours - peer).norm() / peer.norm()).item()
    if error > 1e-4:
        raise RuntimeError(f"{name}: ours and the peer differ by {error:.1e}")


def compare(lengths: tuple[int, ...], repeats: int) -> list[dict]:
    rows = []
    for name, work in works().items():
        for length in lengths:
            inputs = make_inputs(length)
            peers = {peer: op for peer, (op, limit) in work.peers.items() if length <= limit}
            if not peers:
                continue
            if name != "gdn vs full":
                for peer, op in peers.items():
                    check_same_work(f"{name} / {peer}", work.ours(inputs).detach(), op(inputs).detach())
            calls = {peer: forward_backward(op, inputs) for peer, op in peers.items()}
            times = interleaved({"ours": forward_backward(work.ours, inputs), **calls}, repeats=repeats)
            rows += [row(name, f"T={length}", times["ours"], peer, times[peer], "ms") for peer in peers]
    return rows


def flatness(lengths: tuple[int, ...], repeats: int) -> list[dict]:
    rows = []
    for name, work in works().items():
        if name == "gdn vs full":
            continue
        calls = {str(length): forward_backward(work.ours, make_inputs(length)) for length in lengths}
        times = interleaved(calls, repeats=repeats)
        per_token = {length: 1e3 * times[str(length)] / length for length in lengths}
        base = lengths[0]
        rows += [
            row(f"{name}, per token", f"T={n}", per_token[n], f"ours at T={base}", per_token[base], "us/token")
            for n in lengths[1:]
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one length, under a minute")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    quick = options.quick
    rows = compare(QUICK_LENGTHS if quick else LENGTHS, repeats=3 if quick else 5)
    rows += flatness(QUICK_FLAT_LENGTHS if quick else FLAT_LENGTHS, repeats=3 if quick else 5)
    print_rows(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
