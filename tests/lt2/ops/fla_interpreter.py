"""Run fla 0.6's Triton kernels on CPU tensors with the interpreter of Triton 3.7 to 3.9.

`install()` must run in a process that has imported neither triton nor fla, and patches both for good: use it in a
subprocess. It proves argument order, layouts, scales and maths; nothing about speed, races or tile sizes. Keep
sequences short.
"""

from __future__ import annotations

import ast
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np


def install() -> None:
    """Turn the interpreter on, fix what it lacks, import fla."""
    already = {"triton", "fla"} & set(sys.modules)
    if already:
        raise RuntimeError(f"{', '.join(sorted(already))} already imported: TRITON_INTERPRET would have no effect")
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.autotuner import Autotuner

    _take_last_config(Autotuner)
    _patch_once_a_launch(interpreter, tl)
    _give_loop_counters_a_dtype(interpreter)
    _compute_bf16_in_fp32(interpreter, tl)

    import fla.ops.gated_delta_rule
    import fla.ops.gla
    import fla.ops.kda  # noqa: F401

    _rebind_gather(tl)


def _take_last_config(autotuner: type) -> None:
    """Autotuning times kernels on a GPU; here any configuration does. Tiles grow along fla's lists, and programs, which
    are interpreted one after the other, get fewer.
    """
    prune = autotuner.prune_configs
    autotuner.prune_configs = lambda self, kwargs: prune(self, kwargs)[-1:]
    # Triton 3.7, which PyPI's torch 2.13 brings, times one configuration too, and asks the GPU for its cache's name.
    autotuner._bench = lambda self, *args, config, **meta: [0.0]
    autotuner.check_disk_cache = lambda self, key, configs, bench: bool(bench())


def _patch_once_a_launch(interpreter: ModuleType, tl: ModuleType) -> None:
    """The interpreter looks through all of `tl` again whenever a kernel calls a function, a quarter of its time."""
    patch, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda kernel: patch(everything)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


def _give_loop_counters_a_dtype(interpreter: ModuleType) -> None:
    """fla writes `i.to(tl.int64)` on counters of `for i in range(n)`, which the interpreter leaves as Python ints."""

    class Counter(int):
        def to(self, dtype, *args, **kwargs):
            return interpreter.interpreter_semantic.to_tensor(int(self), False).to(dtype, *args, **kwargs)

    def counters(iterable):
        return (Counter(i) if isinstance(i, int) else i for i in iterable)

    def visit_for(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        node.iter = ast.Call(func=ast.Name(id="_loop_counters", ctx=ast.Load()), args=[node.iter], keywords=[])
        return node

    interpreter._loop_counters = counters
    interpreter.ASTTransformer.visit_For = visit_for


def _rebind_gather(tl: ModuleType) -> None:
    """fla modules bind `tl.gather` when imported, before the interpreter swaps `tl`'s functions for a launch."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and module is not None and "gather" in vars(module):
            module.gather = lambda *args, **kwargs: tl.gather(*args, **kwargs)


def _widened(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) -> fp32 values."""
    shifted = np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16
    return shifted.view(np.float32).reshape(bits.shape)


def _narrowed(values: np.ndarray) -> np.ndarray:
    """fp32 values -> bf16 bit patterns (uint16), rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape)


def _compute_bf16_in_fp32(interpreter: ModuleType, tl: ModuleType) -> None:
    """numpy has no bf16: the interpreter keeps bit patterns and does integer arithmetic on them, silently.

    Every float operation is wrapped to widen its bf16 operands to fp32 and round its result back.
    """
    builder, handle, bf16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16

    def is_bf16(x) -> bool:
        return isinstance(x, handle) and getattr(x.dtype, "scalar", x.dtype) == bf16

    def widen(x):
        return handle(_widened(x.data), tl.float32) if is_bf16(x) else x

    def narrow(x):
        return handle(_narrowed(x.data), bf16) if x.data.dtype == np.float32 else x

    def wrap(name: str, operands: int) -> None:
        original = getattr(builder, name)

        def operation(self, *args):
            if not any(is_bf16(x) for x in args[:operands]):
                return original(self, *args)
            return narrow(original(self, *(widen(x) for x in args)))

        setattr(builder, name, operation)

    wrap("binary_op", 2)
    wrap("unary_op", 1)
    wrap("create_fma", 3)
    wrap("create_rsqrt", 1)
    wrap("create_erf", 1)
    wrap("create_clampf", 3)

    convert, cast, dot = interpreter._convert_float, builder.cast_impl, builder.create_dot

    def convert_float(x, source, target, rounding):
        if source == bf16 and target == tl.float32:
            return _widened(x)
        if source == tl.float32 and target == bf16:
            return _narrowed(x)
        return convert(x, source, target, rounding)

    def cast_impl(self, x, target):
        scalar = target.scalar
        if is_bf16(x) and scalar not in (bf16, tl.float32):
            x = widen(x)
        if scalar != bf16 or is_bf16(x):
            return cast(self, x, target)
        return handle(_narrowed(x.data.astype(np.float32)), bf16)

    def create_dot(self, a, b, accumulator, *rest):
        return dot(self, widen(a), widen(b), accumulator, *rest)

    builder.get_bf16 = lambda self, value: handle(_narrowed(np.array([value])), bf16)  # Triton 3.7 has none
    interpreter._convert_float = convert_float
    builder.cast_impl = cast_impl
    builder.create_dot = create_dot
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", lambda self, x, target: self.cast_impl(x, target))
    _reduce_bf16_in_fp32(interpreter, tl, is_bf16, widen)


def _reduce_bf16_in_fp32(interpreter: ModuleType, tl: ModuleType, is_bf16, widen) -> None:
    """Reductions and scans call numpy directly, on tuples of tensors."""
    reduction, handle, bf16 = interpreter.ReduceScanOpInterface, interpreter.TensorHandle, tl.bfloat16
    apply = reduction.apply

    def widen_tensor(x):
        if not is_bf16(x.handle):
            return x
        wide = widen(x.handle)
        return tl.core.tensor(wide, tl.block_type(tl.float32, list(wide.data.shape)))

    def narrow_tensor(out, source):
        if not is_bf16(source.handle) or out.handle.data.dtype != np.float32:
            return out
        bits = _narrowed(out.handle.data)
        kind = tl.block_type(bf16, list(bits.shape)) if out.type.is_block() else bf16
        return tl.core.tensor(handle(bits, bf16), kind)

    def apply_wide(self, source):
        if not isinstance(source, tuple):
            return apply_wide(self, (source,))[0]
        if not any(is_bf16(x.handle) for x in source):
            return apply(self, source)
        outputs = apply(self, tuple(widen_tensor(x) for x in source))
        return tuple(narrow_tensor(out, x) for out, x in zip(outputs, source))

    reduction.apply = apply_wide
