"""What looping adds to a mixer, as statements that can be computed (paper App. B).

Two parts: products of generalised Householder factors (loop × delta rule), and receptive fields (loop × sparse
attention). Everything is fp64. Where the paper's claim is not true the true one is computed here and the difference
named. Shapes: T factors or loops, d key dimension, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lt2.model import LoopedLM


def householder(key: Tensor, beta: float = 2.0) -> Tensor:
    """I - beta k kᵀ for key (d,) scaled to unit length: the transition of one delta-rule step; (d, d)."""
    k = key.double() / key.double().norm()
    return torch.eye(len(k), dtype=torch.float64) - beta * torch.outer(k, k)


def transition(keys: Sequence[Tensor], betas: Sequence[float], alphas: Sequence[Tensor] | None = None) -> Tensor:
    """The transition prod_tau Diag(alpha_tau) (I - beta_tau k_tau k_tauᵀ) of T loops, first factor leftmost; (d, d)."""
    result = torch.eye(len(keys[0]), dtype=torch.float64)
    for i, (key, beta) in enumerate(zip(keys, betas)):
        factor = householder(key, beta)
        result = result @ (factor if alphas is None else alphas[i].double()[:, None] * factor)
    return result


def update_rank(matrix: Tensor, *, tolerance: float = 1e-10) -> int:
    """Rank of I - matrix: how many directions of the memory the transition changes."""
    return int(torch.linalg.matrix_rank(torch.eye(len(matrix), dtype=torch.float64) - matrix, atol=tolerance))


def collapsed_beta(betas: Sequence[float]) -> float:
    """beta* with prod (I - beta_tau k kᵀ) = I - beta* k kᵀ when all T loops use one key: 1 - prod(1 - beta_tau)."""
    return 1 - math.prod(1 - beta for beta in betas)


def transposition_key(i: int, j: int, d: int) -> Tensor:
    """The key whose factor with beta 2 swaps coordinates i and j: (e_i - e_j) / sqrt 2; (d,)."""
    key = torch.zeros(d, dtype=torch.float64)
    key[i], key[j] = math.sqrt(0.5), -math.sqrt(0.5)
    return key


def reflections_of(orthogonal: Tensor, *, tolerance: float = 1e-12) -> list[Tensor]:
    """At most d unit keys whose factors with beta 2 multiply to `orthogonal` (d, d) (Cartan–Dieudonné).

    Column by column, the reflection that takes the column to its basis vector; one that is there already needs none.

    Raises:
        ValueError: the matrix is not orthogonal.
    """
    rest, d = orthogonal.double().clone(), len(orthogonal)
    error = (rest.T @ rest - torch.eye(d, dtype=torch.float64)).abs().max().item()
    if error > 1e-8:
        raise ValueError(f"matrix is not orthogonal: QᵀQ differs from I by {error:.1e}")
    keys = []
    for column in range(d):
        key = rest[:, column].clone()
        key[column] -= 1
        if key.norm() > tolerance:
            keys.append(key / key.norm())
            rest = householder(key) @ rest
    return keys


def transpositions_of(permutation: Sequence[int]) -> list[tuple[int, int]]:
    """At most n-1 swaps whose matrices multiply, first one leftmost, to the matrix sending e_i to e_permutation[i]."""
    image, swaps = list(permutation), []
    for i in range(len(image)):
        if image[i] != i:
            swaps.append((i, image[i]))
            a, b = i, image[i]
            image = [b if x == a else a if x == b else x for x in image]
    return swaps


def permutation_matrix(permutation: Sequence[int]) -> Tensor:
    """P (n, n) with P e_i = e_permutation[i]."""
    matrix = torch.zeros(len(permutation), len(permutation), dtype=torch.float64)
    matrix[list(permutation), range(len(permutation))] = 1
    return matrix


def prefix_products(permutations: Iterable[Sequence[int]], n: int) -> list[Tensor]:
    """State after each token of a word in S_n, run as a looped delta rule with n-1 factors per token.

    Each state is (n, n), the product of the permutations so far with the newest leftmost. Tokens that need fewer
    than n-1 swaps fill up with beta 0, the identity.
    """
    state, states = torch.eye(n, dtype=torch.float64), []
    for permutation in permutations:
        swaps = transpositions_of(permutation)
        keys = [transposition_key(i, j, n) for i, j in swaps] + [transposition_key(0, 1, n)] * (n - 1 - len(swaps))
        betas = [2.0] * len(swaps) + [0.0] * (n - 1 - len(swaps))
        state = transition(keys, betas) @ state
        states.append(state)
    return states


Pattern = Callable[[int], Iterable[int]]
"""Query position -> the key positions it sees, all <= it."""


def window_pattern(window: int) -> Pattern:
    return lambda i: range(max(0, i - window + 1), i + 1)


def power_pattern(window: int, strides: int) -> Pattern:
    """PowerAttention: a window, and the keys 1, 2, 4, …, 2^(strides-1) back."""
    return lambda i: {*range(max(0, i - window + 1), i + 1), *(i - 2**k for k in range(strides) if i >= 2**k)}


def reach(pattern: Pattern, position: int, n_loops: int) -> set[int]:
    """Input positions with a path to `position` through n_loops applications of one pattern."""
    seen = {position}
    for _ in range(n_loops):
        seen = {key for query in seen for key in pattern(query)}
    return seen


def window_reach(window: int, n_loops: int) -> int:
    """Positions reached by a looped window, itself included: T(w-1)+1 (the paper's text rounds this to T·w)."""
    return n_loops * (window - 1) + 1


def power_distance(strides: int, n_loops: int) -> int:
    """The farthest PowerAttention reaches: T·2^(K-1).

    The paper claims every distance up to 2^(T+K-1); already T=3 loops cannot go beyond 3·2^(K-1), and distances that
    need more than T powers of two are skipped on the way. `reach` gives the exact set.
    """
    return n_loops * 2 ** (strides - 1)


def window_influence(window: int, n_loops: int) -> Tensor:
    """Weight of each distance 0..T(w-1) when every key in a window counts equally and there is no residual."""
    kernel = torch.full((window,), 1 / window, dtype=torch.float64)
    result = torch.ones(1, dtype=torch.float64)
    for _ in range(n_loops):
        padded = torch.nn.functional.pad(result, (window - 1, window - 1))
        result = torch.nn.functional.conv1d(padded[None, None], kernel[None, None])[0, 0]
    return result


def effective_width(window: int, n_loops: int) -> float:
    """The paper's 0.58·w·sqrt(T): two standard deviations of `window_influence` in the central limit."""
    return 0.58 * window * math.sqrt(n_loops)


def residual_horizon(window: int, *, alpha: float, epsilon: float) -> float:
    """w·ln(1/epsilon) / ln(1/(1-alpha)): distance beyond which a residual stream of share alpha hides the input.

    A formula only: it does not depend on the number of loops and rests on the paper's convex-mixture proxy.
    """
    return window * math.log(1 / epsilon) / math.log(1 / (1 - alpha))


def receptive_field(model: LoopedLM, length: int, position: int, *, n_loops: int | None = None) -> set[int]:
    """Input positions that change the output at `position`, by autograd through a real model.

    Position j holds token j, so that the gradient of embedding row j is the influence of position j.

    Raises:
        ValueError: the vocabulary is smaller than length, or embeddings are tied to the head.
    """
    if model.head is None or model.config.vocab_size < length:
        raise ValueError(f"needs an untied model with a vocabulary of at least {length}, one token per position")
    hidden = model(torch.arange(length)[None], n_loops=n_loops).hidden[0, position]
    weights = torch.linspace(1, 2, len(hidden), dtype=hidden.dtype)  # a plain sum of normed channels could cancel
    (gradient,) = torch.autograd.grad((hidden * weights).sum(), model.embed.weight)
    return set(gradient.abs().amax(-1).nonzero().flatten().tolist())
