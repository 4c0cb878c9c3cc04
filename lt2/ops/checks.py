"""Shape checks of the recurrent ops: a wrong shape is a bug in the caller, and the message says which tensor."""

from __future__ import annotations

from torch import Tensor


def check_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    reset: Tensor | None,
) -> None:
    """Raise ValueError unless q, k (B, L, H, K); v (B, L, H, V); g (B, L, H[, K]); beta (B, L, H); state (B, H, K,
    V)."""
    if q.ndim != 4 or q.shape[1] == 0:
        raise ValueError(f"q must be (B, L, H, K) with L >= 1, got {tuple(q.shape)}")
    batch, length, heads, key_dim = q.shape
    _expect("k", k, [(batch, length, heads, key_dim)])
    _expect("v", v, [(batch, length, heads, v.shape[-1])])
    _expect("g", g, [(batch, length, heads), (batch, length, heads, key_dim)])
    _expect("beta", beta, [(batch, length, heads)])
    _expect("initial_state", initial_state, [(batch, heads, key_dim, v.shape[-1])])
    _expect("reset", reset, [(batch, length)])


def check_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor) -> None:
    """Raise ValueError unless q, k (B, H, K); v (B, H, V); g (B, H[, K]); beta (B, H); state (B, H, K, V)."""
    if q.ndim != 3:
        raise ValueError(f"q of a step must be (B, H, K), got {tuple(q.shape)}")
    batch, heads, key_dim = q.shape
    _expect("k", k, [(batch, heads, key_dim)])
    _expect("v", v, [(batch, heads, v.shape[-1])])
    _expect("g", g, [(batch, heads), (batch, heads, key_dim)])
    _expect("beta", beta, [(batch, heads)])
    _expect("state", state, [(batch, heads, key_dim, v.shape[-1])])


def _expect(name: str, tensor: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if tensor is None or tuple(tensor.shape) in shapes:
        return
    wanted = " or ".join(str(shape) for shape in shapes)
    hint = "; with more value heads than q/k heads, repeat q and k first" if name == "v" else ""
    raise ValueError(f"{name} must be {wanted} to match q, got {tuple(tensor.shape)}{hint}")
