"""Our linear layers on fla's kernels, and against fla's own layers. test_fla_layers.py runs this in its own process."""

from __future__ import annotations

import fla_interpreter  # first: it must come before anything that imports triton
import pytest
import torch
from torch import Tensor, nn

fla_interpreter.install()

from fla import layers as fla_layers  # noqa: E402

from lt2 import sequence  # noqa: E402
from lt2.config import Dims, mixer_types  # noqa: E402
from lt2.mixers import build_mixer  # noqa: E402
from lt2.ops import dispatch  # noqa: E402

L = 24
DIMS = Dims(dim=64, num_heads=2, norm_eps=1e-5)  # HGRN2's eps is fixed in fla
BOUND = 1e-5  # relative, fp32 kernels against our fp64 path
# Gradients of one number per head: sums of 48 terms that cancel to a tenth of the largest and less.
CANCELLING = {"A_log": 1e-4, "dt_bias": 1e-4}

# Ours -> the fla class, its arguments, and where each of its parameters is in ours: name, or (name, part of a split).
COMMON = {"hidden_size": 64, "num_heads": 2, "norm_eps": 1e-5}
QKV = {"q_proj.weight": ("qkv_proj.weight", 0), "k_proj.weight": ("qkv_proj.weight", 1)}
QKV |= {"v_proj.weight": ("qkv_proj.weight", 2), "o_proj.weight": "o_proj.weight"}
CONV = {f"{x}_conv1d.weight": ("conv.weight", i) for i, x in enumerate("qkv")}
DECAY = {"A_log": "A_log", "dt_bias": "dt_bias"}
LAYERS = {
    "la": (
        {"normalize": True},
        "LinearAttention",
        {**COMMON, "feature_map": "elu", "do_feature_map_norm": True},
        {**QKV, "norm.weight": "o_norm.weight"},
    ),
    "retnet": (
        {},
        "MultiScaleRetention",
        COMMON,
        {**QKV, "g_proj.weight": "gate_proj.weight", "g_norm_swish_gate.weight": "o_norm.weight"},
    ),
    "gla": (
        {},
        "GatedLinearAttention",
        COMMON,
        {
            **QKV,
            "g_proj.weight": "gate_proj.weight",
            "g_norm_swish_gate.weight": "o_norm.weight",
            "gk_proj.0.weight": "decay_proj.0.weight",
            "gk_proj.1.weight": "decay_proj.1.weight",
            "gk_proj.1.bias": "decay_proj.1.bias",
        },
    ),
    "hgrn2": (
        {},
        "HGRN2Attention",
        {**COMMON, "expand_ratio": 32},
        {
            "q_proj.weight": ("qfv_proj.weight", 0),
            "f_proj.weight": ("qfv_proj.weight", 1),
            "i_proj.weight": ("qfv_proj.weight", 2),
            "o_proj.weight": "o_proj.weight",
            "g_norm.weight": "o_norm.weight",
        },
    ),
    "mamba2": (
        {"head_dim": 32, "d_state": 16},
        "Mamba2",
        {"hidden_size": 64, "norm_eps": 1e-5, "head_dim": 32, "state_size": 16, "chunk_size": 16, "backend": "triton"},
        {
            **DECAY,
            "D": "D",
            "in_proj.weight": "in_proj.weight",
            "conv1d.weight": "conv.weight",
            "conv1d.bias": "conv.bias",
            "norm.weight": "o_norm.weight",
            "out_proj.weight": "o_proj.weight",
        },
    ),
    "deltanet": (
        {"allow_neg_eigval": True},
        "DeltaNet",
        {**COMMON, "allow_neg_eigval": True},
        {**QKV, **CONV, "b_proj.weight": "b_proj.weight", "o_norm.weight": "o_norm.weight"},
    ),
    "gdn": (
        {"allow_neg_eigval": True},
        "GatedDeltaNet",
        {**COMMON, "head_dim": 32, "expand_v": 1, "allow_neg_eigval": True},
        {
            **QKV,
            **CONV,
            **DECAY,
            "a_proj.weight": ("ab_proj.weight", 0),
            "b_proj.weight": ("ab_proj.weight", 1),
            "g_proj.weight": "gate_proj.weight",
            "o_norm.weight": "o_norm.weight",
        },
    ),
    "kda": (
        {},
        "KimiDeltaAttention",
        {**COMMON, "head_dim": 32},
        {
            **QKV,
            **CONV,
            **DECAY,
            "b_proj.weight": "b_proj.weight",
            "f_proj.0.weight": "decay_proj.0.weight",
            "f_proj.1.weight": "decay_proj.1.weight",
            "g_proj.0.weight": "gate_proj.0.weight",
            "g_proj.1.weight": "gate_proj.1.weight",
            "g_proj.1.bias": "gate_proj.1.bias",
            "o_norm.weight": "o_norm.weight",
        },
    ),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def our_layer(name: str) -> tuple[nn.Module, object]:
    """An fp64 layer with every parameter random, and its config."""
    spec = mixer_types()[name](**LAYERS[name][0])
    layer = build_mixer(spec, DIMS).double()
    with torch.no_grad():
        for seed, (key, parameter) in enumerate(layer.named_parameters()):
            width = 1 if parameter.ndim == 1 else parameter.shape[-1]
            parameter.copy_(random(*parameter.shape, seed=seed) * width**-0.5 + ("norm" in key))
    return layer, spec


def info(doc_ids: Tensor | None = None) -> sequence.SequenceInfo:
    seq = sequence.plain(L, torch.device("cpu")) if doc_ids is None else sequence.packed(doc_ids)
    seq.rope[32] = sequence.rotary(seq.positions, 32, DIMS.rope_theta)
    return seq


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def output_and_gradients(forward, x: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """y, and the gradients of a fixed random readout of y with respect to x and the parameters."""
    x = x.clone().requires_grad_()
    y = forward(x)
    names, tensors = ["x", *parameters], [x, *parameters.values()]
    weights = random(*y.shape, seed=99).to(y.dtype)
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad((y * weights).sum(), tensors)))}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = {key: relative_error(actual[key], expected[key]) for key in expected}
    assert all(error <= CANCELLING.get(key, BOUND) for key, error in errors.items()), errors


@pytest.mark.parametrize("name", LAYERS)
def test_our_layer_is_flas_layer(name):
    ours, spec = our_layer(name)
    _, cls, arguments, mapping = LAYERS[name]
    theirs = getattr(fla_layers, cls)(**arguments)
    parts = {"qkv_proj.weight": 3, "qfv_proj.weight": 3, "conv.weight": 3, "ab_proj.weight": 2}
    values = dict(ours.named_parameters())

    def ours_for(source) -> Tensor:
        if isinstance(source, str):
            return values[source]
        widths = sizes[source[0]]
        return values[source[0]].split(widths)[source[1]]

    H, K, V = ours.heads
    sizes = {key: [H * K, H * K, H * V] if count == 3 else [H, H] for key, count in parts.items()}
    assert set(mapping) == {key for key, _ in theirs.named_parameters()}
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.copy_(ours_for(mapping[key]).reshape(parameter.shape))

    x = random(2, L, 64, seed=50)
    expected = output_and_gradients(lambda x: ours(x, spec, info(), None)[0], x, {})
    actual = output_and_gradients(lambda x: theirs(x)[0], x.float(), {})
    assert_close(actual, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_packed_layer_on_flas_kernels(name):
    layer, spec = our_layer(name)
    doc_ids = torch.zeros(2, L, dtype=torch.int32)
    doc_ids[0, 13:] = 1
    doc_ids[0, 14:] = 2
    doc_ids[1, 17:] = 1
    seq = info(doc_ids)
    x = random(2, L, 64, seed=51)

    def run(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
        return output_and_gradients(lambda x: layer(x, spec, seq, None)[0], x, dict(layer.named_parameters()))

    expected = run(layer, x)
    assert dispatch.backend_for("gated_delta_rule", x) == "torch"
    assert dispatch.backend_for("gated_delta_rule", x.float()) == "fla"
    assert_close(run(layer.float(), x.float()), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_prefill_and_decode_on_flas_kernels(name):
    layer, spec = our_layer(name)
    x = random(2, L, 64, seed=52)

    def run(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
        cache = {key: torch.zeros(2, *shape, dtype=x.dtype) for key, (shape, _) in spec.cache_spec(DIMS, L).items()}
        lengths, outputs, used = torch.tensor([7, 4]), [], torch.zeros(2, dtype=torch.int64)
        for start, end, valid in ((0, 7, lengths), (7, 8, None), (8, 9, None)):
            seq = sequence.cached(end - start, used.clone(), valid, fresh=start == 0)
            seq.rope[32] = sequence.rotary(seq.positions, 32, DIMS.rope_theta)
            outputs.append(layer(x[:, start:end], spec, seq, cache)[0])
            used += end - start if valid is None else valid
        return {"row0": torch.cat(outputs, 1)[0], "row1": outputs[0][1, :4], "last": outputs[-1], **cache}

    with torch.no_grad():
        expected = run(layer, x)
        assert_close(run(layer.float(), x.float()), expected)
