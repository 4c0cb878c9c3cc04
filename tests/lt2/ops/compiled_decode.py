"""Compile our decode kernels for Hopper, down to machine code and with no GPU; run by test_decode_kernels.py.

A compiled caller passes Python floats as fp64, which the interpreter does not show and Triton's type checker refuses in
a loop: found on an H200, and what the fp64 cases here are for.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lt2.ops.kernels.attention_decode import _combine, _partial
from lt2.ops.kernels.delta_decode import _delta_decode
from lt2.ops.kernels.recurrent_step import _step

HOPPER = GPUTarget("cuda", 90, 32)
ATTENTION = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "length_ptr": "*i64", "acc_ptr": "*fp32",
             "max_ptr": "*fp32", "sum_ptr": "*fp32"}  # fmt: skip
COMBINE = {"acc_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32", "out_ptr": "*bf16"}
STEP = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "g_ptr": "*fp32", "beta_ptr": "*bf16",
        "state_ptr": "*fp32", "out_ptr": "*bf16"}  # fmt: skip
DELTA = dict.fromkeys(("x_ptr", "past_ptr", "weight_ptr", "gate_ptr", "ab_ptr", "norm_ptr", "out_ptr"), "*bf16")
DELTA |= {"a_log_ptr": "*fp32", "dt_bias_ptr": "*fp32", "state_ptr": "*fp32"}
SIZES = {"C": 6144, "H": 16, "K": 128, "V": 128, "W": 4, "BLOCK_K": 128, "BLOCK_V": 128, "BLOCK_W": 4}


def compiled(kernel, types: dict[str, str], constants: dict[str, object]) -> None:
    """Arguments without a type are 32-bit integers."""
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    positions = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    assert "cubin" in triton.compile(ASTSource(kernel, signature, positions), target=HOPPER).asm
    print("compiled", kernel.fn.__name__, types.get("scale", ""), constants)


if __name__ == "__main__":
    for scale in ("fp32", "fp64"):
        for rows in (1, 16):
            blocks = {"BLOCK_M": 64, "BLOCK_R": rows, "BLOCK_E": 128, "BLOCK_V": 128}
            compiled(_partial, {**ATTENTION, "scale": scale}, blocks)
        for decay in (0, 1, 2):
            for delta in (False, True):
                constants = {"DECAY": decay, "DELTA": delta, "BLOCK_K": 128, "BLOCK_V": 32}
                compiled(_step, {**STEP, "scale": scale}, constants)
    for gated in (False, True):
        floats = {"scale": "fp64", "eps": "fp64", "beta_scale": "fp64"}
        compiled(_delta_decode, {**DELTA, **floats}, {**SIZES, "GATED": gated})
    compiled(_combine, COMBINE, {"BLOCK_S": 32, "BLOCK_V": 128})
