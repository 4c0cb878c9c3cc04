"""Each linear layer against its equations, token by token, from its own weights; fp64, gradients too.

Shapes: D width, H heads, K keys, V values, C convolution channels; the oracles see one sequence (L, D).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lt2 import sequence
from lt2.analysis.parity import sample_model
from tests.lt2.mixers.samples import samples

L = 70  # crosses the chunk lengths of both ops, 64 and 32
SAMPLES = samples()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(x))


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def short_conv(layer: nn.Module, xs: Tensor) -> Tensor:  # (L, C)
    if layer.conv is None:
        return silu(xs)
    weight, size = layer.conv.weight, layer.conv.size
    rows = []
    for t in range(len(xs)):
        total = torch.zeros_like(xs[0]) if layer.conv.bias is None else layer.conv.bias
        for back in range(min(size, t + 1)):
            total = total + weight[:, size - 1 - back] * xs[t - back]
        rows.append(silu(total))
    return torch.stack(rows)


def additive(q, k, v, alpha, scale) -> Tensor:
    """S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T; alpha (L, H, K or 1) -> (L, H, V)."""
    state = q.new_zeros(k.shape[1], k.shape[2], v.shape[2])
    outputs = []
    for q_t, k_t, v_t, alpha_t in zip(q, k, v, alpha):
        state = alpha_t[..., None] * state + k_t[..., None] * v_t[:, None]
        outputs.append(scale * (q_t[..., None] * state).sum(1))
    return torch.stack(outputs)


def delta(q, k, v, alpha, beta) -> Tensor:
    """S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T."""
    state = q.new_zeros(k.shape[1], k.shape[2], v.shape[2])
    eye = torch.eye(k.shape[2], dtype=q.dtype)
    outputs = []
    for q_t, k_t, v_t, alpha_t, beta_t in zip(q, k, v, alpha, beta):
        erase = eye - beta_t[:, None, None] * k_t[:, :, None] * k_t[:, None, :]
        state = erase @ (alpha_t[..., None] * state) + beta_t[:, None, None] * k_t[..., None] * v_t[:, None]
        outputs.append((q_t[..., None] * state).sum(1) * k.shape[2] ** -0.5)
    return torch.stack(outputs)


def heads_of(layer: nn.Module, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    H, K, V = layer.heads
    q, k, v = projected.split([H * K, H * K, H * V], dim=-1)
    return q.view(-1, H, K), k.view(-1, H, K), v.view(-1, H, V)


def la(layer, x, seq):
    q, k, v = heads_of(layer, x @ layer.qkv_proj.weight.T)
    if layer.feature_map == "elu":
        q, k = (torch.where(t > 0, t + 1, torch.exp(t.clamp(max=0))) for t in (q, k))
    o = additive(q, k, v, q.new_ones(len(x), 1, 1), q.shape[-1] ** -0.5)
    if layer.normalize:
        o = o / (q * k.cumsum(0)).sum(-1, keepdim=True) * q.shape[-1] ** 0.5
    return rms(o, layer.o_norm.weight).flatten(1) @ layer.o_proj.weight.T


def retnet(layer, x, seq):
    H, K, _ = layer.heads
    q, k, v = heads_of(layer, x @ layer.qkv_proj.weight.T)
    cos, sin = seq.rope[K]
    turn = torch.complex(cos[0].double(), sin[0].double())

    def rotated(t: Tensor) -> Tensor:
        z = torch.complex(t[..., : K // 2], t[..., K // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    gamma = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(H)], dtype=x.dtype)
    o = additive(rotated(q), rotated(k), v, gamma.expand(len(x), H)[..., None], K**-0.5)
    gate = silu(x @ layer.gate_proj.weight.T).view(o.shape)
    return (rms(o, layer.o_norm.weight) * gate).flatten(1) @ layer.o_proj.weight.T


def gla(layer, x, seq):
    q, k, v = heads_of(layer, x @ layer.qkv_proj.weight.T)
    down, up = layer.decay_proj
    alpha = sigmoid(x @ down.weight.T @ up.weight.T + up.bias).view(k.shape) ** (1 / 16)
    o = additive(q, k, v, alpha, k.shape[-1] ** -0.5)
    gate = silu(x @ layer.gate_proj.weight.T).view(o.shape)
    return (rms(o, layer.o_norm.weight) * gate).flatten(1) @ layer.o_proj.weight.T


def hgrn2(layer, x, seq):
    q, f, v = heads_of(layer, x @ layer.qfv_proj.weight.T)
    alpha = sigmoid(f)
    o = additive(silu(q), 1 - alpha, v, alpha, q.shape[-1] ** -0.5)
    return rms(o.flatten(1), layer.o_norm.weight) @ layer.o_proj.weight.T


def mamba2(layer, x, seq):
    H, N, P = layer.heads
    z, xbc, dt = (x @ layer.in_proj.weight.T).split([H * P, H * P + 2 * N, H], dim=-1)
    u, B, C = short_conv(layer, xbc).split([H * P, N, N], dim=-1)
    u = u.view(-1, H, P)
    dt = softplus(dt + layer.dt_bias)
    alpha = torch.exp(-torch.exp(layer.A_log) * dt)[..., None]
    B, C = (t[:, None].expand(-1, H, N) for t in (B, C))
    y = additive(C, B, dt[..., None] * u, alpha, 1.0) + layer.D[:, None] * u
    return rms(y.flatten(1) * silu(z), layer.o_norm.weight) @ layer.o_proj.weight.T


def deltanet(layer, x, seq):
    q, k, v = heads_of(layer, short_conv(layer, x @ layer.qkv_proj.weight.T))
    beta = layer.beta_scale * sigmoid(x @ layer.b_proj.weight.T)
    o = rms(delta(unit(q), unit(k), v, q.new_ones(len(x), 1, 1), beta), layer.o_norm.weight)
    if layer.gate_proj is not None:
        o = o * silu(x @ layer.gate_proj.weight.T).view(o.shape)
    return o.flatten(1) @ layer.o_proj.weight.T


def gdn(layer, x, seq):
    q, k, v = heads_of(layer, short_conv(layer, x @ layer.qkv_proj.weight.T))
    a, b = (x @ layer.ab_proj.weight.T).chunk(2, -1)
    alpha = torch.exp(-torch.exp(layer.A_log) * softplus(a + layer.dt_bias))[..., None]
    o = rms(delta(unit(q), unit(k), v, alpha, layer.beta_scale * sigmoid(b)), layer.o_norm.weight)
    if layer.gate_proj is not None:
        o = o * silu(x @ layer.gate_proj.weight.T).view(o.shape)
    return o.flatten(1) @ layer.o_proj.weight.T


def kda(layer, x, seq):
    q, k, v = heads_of(layer, short_conv(layer, x @ layer.qkv_proj.weight.T))
    down, up = layer.decay_proj
    rate = softplus(x @ down.weight.T @ up.weight.T + layer.dt_bias).view(k.shape)
    alpha = torch.exp(-torch.exp(layer.A_log)[:, None] * rate)
    beta = layer.beta_scale * sigmoid(x @ layer.b_proj.weight.T)
    down, up = layer.gate_proj
    gate = sigmoid(x @ down.weight.T @ up.weight.T + up.bias).view(v.shape)
    o = rms(delta(unit(q), unit(k), v, alpha, beta), layer.o_norm.weight) * gate
    return o.flatten(1) @ layer.o_proj.weight.T


ORACLES = {"la": la, "retnet": retnet, "mamba2": mamba2, "gla": gla, "hgrn2": hgrn2}
ORACLES |= {"deltanet": deltanet, "gdn": gdn, "kda": kda}


@pytest.mark.parametrize("name", [name for name in SAMPLES if SAMPLES[name].mixer.type in ORACLES])
def test_layer_follows_its_equations(name):
    spec = SAMPLES[name].mixer
    model = sample_model(SAMPLES[name])
    layer = model.blocks[0].mixers[spec.weights]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():  # norms, D and biases off their special values
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    x = torch.randn(2, L, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, L, 32, generator=generator, dtype=torch.float64)
    seq = model.sequence_info(torch.zeros(2, L, dtype=torch.int64), None, None, None)
    inputs = {"x": x, **dict(layer.named_parameters())}

    y, _ = layer(x, spec, seq, None)
    expected = torch.stack([ORACLES[spec.type](layer, row, seq) for row in x])

    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad((y * weights).sum(), list(inputs.values()))
    expected_grads = torch.autograd.grad((expected * weights).sum(), list(inputs.values()))
    for key, ours, theirs in zip(inputs, grads, expected_grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("last", [2, 0])  # an id that comes back is another document
def test_short_conv_stops_at_documents(last):
    layer = sample_model(SAMPLES["mamba2"]).blocks[0].mixers["mamba2"]
    x = torch.randn(1, 9, layer.conv.weight.shape[0], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    packed = layer.conv(x, sequence.packed(torch.tensor([[0, 0, 0, 0, 0, 1, last, last, last]])), None)[0]
    parts = [short_conv(layer, x[0, start:end]) for start, end in ((0, 5), (5, 6), (6, 9))]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=1e-12, atol=1e-12)
