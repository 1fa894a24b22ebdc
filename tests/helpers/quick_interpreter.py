"""Triton's interpreter without what it repeats: it patches its language anew at every launch and every inner call,
builds dtypes, types of blocks and shapes of tensors at every operation, and looks for the rules of promotion in each
sum. Nine tenths of its time are that. Other versions of Triton than those tried here keep their interpreter.
"""

import builtins
import gc
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

_TRIED_VERSIONS = ("3.9.",)
# Operands of these types are computed by NumPy at once; all others go Triton's long way.
_FLOATS, _INTEGERS = (tl.float32, tl.float64), (tl.int32, tl.int64)
_NUMPY_TYPES = {
    tl.float32: np.float32,
    tl.float64: np.float64,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.int1: np.bool_,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _Nothing:
    def restore(self) -> None:
        pass


def was_tried() -> bool:
    """Whether this version of Triton can be patched."""
    return triton.__version__.startswith(_TRIED_VERSIONS)


def make_quick() -> None:
    """The language stays patched in this process, which compiles no kernels. A second call changes nothing."""
    if not torch.cuda.is_available():
        # For a device that never comes, each seed would be noted with the whole stack of calls.
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    mangle_type(0)  # imports a module when it is called first
    if not was_tried() or interpreter._patch_lang.__name__ == "patch_once":
        return
    # NumPy's order of additions depends on where rows begin in memory; a sum in float64, rounded once, hides it.
    interpreter.InterpreterBuilder.create_dot = _dot
    _patch_once()
    _find_dtypes_once()
    _build_types_once()
    _check_shapes_and_overflow_in_numpy()
    _convert_bfloat16_by_bits()
    _launch_on_the_host()


def rewrite_kernels() -> None:
    """Parse the source of all kernels now, in place of in each process that is forked later."""
    for kernel in [
        interpreted for interpreted in gc.get_objects() if isinstance(interpreted, interpreter.InterpretedFunction)
    ]:
        kernel.rewrite()


def _patch_once() -> None:
    patch_lang, patched, seen = interpreter._patch_lang, set(), set()

    def patch_once(function: Any) -> _Nothing:
        if function not in seen:
            seen.add(function)
            visible = frozenset(name for name, value in function.__globals__.items() if value is tl or value is core)
            if visible not in patched:
                patch_lang(function)
                patched.add(visible)
                _compute_in_numpy()
        return _Nothing()

    interpreter._patch_lang = patch_once


def _find_dtypes_once() -> None:
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def find_once(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        key = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if key not in dtypes:
            dtypes[key] = find_dtype(dtype)
        return dtypes[key]

    interpreter._get_np_dtype = find_once


def _build_types_once() -> None:
    make_type, types = core.block_type.__init__, {}
    make_tensor, shapes = core.tensor.__init__, {}

    def make_type_once(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        sizes = builtins.tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        else:
            vars(self).update(types[key])

    def make_tensor_once(self: Any, handle: Any, type: Any) -> None:
        sizes = builtins.tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    equals, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr

    def is_same_or_equals(self: Any, other: Any) -> bool:
        return self is other or equals(self, other)

    def unwrap_shortly(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, list | builtins.tuple | core.tuple) else value

    core.dtype.__eq__, core._unwrap_if_constexpr = is_same_or_equals, unwrap_shortly
    core.block_type.to_ir = lambda self, builder: self
    core.block_type.__init__ = make_type_once
    core.tensor.__init__ = make_tensor_once


def _check_shapes_and_overflow_in_numpy() -> None:
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, other = lhs.type, rhs.type
        if left.is_block() == other.is_block() and (not left.is_block() or left.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth < 64:
            name = operation.__name__
            result = operations[name](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            fits = result.min() >= scalar.get_int_min_value() and result.max() <= scalar.get_int_max_value()
            assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {name}"

    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_different
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


_tensor_types: dict[tuple, tuple] = {}


def _tensor(data: np.ndarray, dtype: tl.dtype, is_block: Any) -> tl.tensor:
    """A tensor made without the checks of its constructors."""
    shape = data.shape if is_block else ()
    key = id(dtype), shape
    if key not in _tensor_types:
        model = core.tensor(None, core.block_type(dtype, list(shape)) if shape else dtype)
        # With the dtype, whose id must not be given to another one.
        _tensor_types[key] = model.type, model.shape, model.numel, dtype
    handle, tensor = object.__new__(interpreter.TensorHandle), object.__new__(core.tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    tensor.handle, tensor.dtype = handle, dtype
    tensor.type, tensor.shape, tensor.numel, _ = _tensor_types[key]
    return tensor


def _compute_in_numpy() -> None:
    """Replace the patched operators of tensors by ones that decide quickly for the usual types."""
    arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name, compute in arithmetic.items():
        for prefix in ("__", "__r"):
            _replace_operator(f"{prefix}{name}__", _checked(compute, prefix), _FLOATS + _INTEGERS)
    for prefix in ("__", "__r"):
        _replace_operator(f"{prefix}truediv__", _in_order(np.divide, prefix), _FLOATS)
    for name, compute in {"and": np.bitwise_and, "or": np.bitwise_or}.items():
        _replace_operator(f"__{name}__", compute, (tl.int1, *_INTEGERS))
    names = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
    for short, name in zip(_COMPARISONS, names, strict=True):
        _replace_operator(f"__{short}__", getattr(np, name), _FLOATS + _INTEGERS, tl.int1)
    tl.load = core.load = _quick_load(tl.load)


def _in_order(compute: Callable, prefix: str) -> Callable:
    return (lambda value, other: compute(other, value)) if prefix == "__r" else compute


def _checked(compute: Callable, prefix: str) -> Callable:
    """Arithmetic that fails where int32 overflows."""
    ordered = _in_order(compute, prefix)

    def computed(value: np.ndarray, other: np.ndarray) -> np.ndarray:
        result = ordered(value, other)
        if result.dtype == np.int32:
            exact = ordered(value.astype(np.int64), other)
            assert (exact == result).all(), f"int32 overflow detected for operation {compute.__name__}"
        return result

    return computed


def _replace_operator(
    name: str, compute: Callable, dtypes: tuple[tl.dtype, ...], result: tl.dtype | None = None
) -> None:
    """``compute`` for two operands of one of ``dtypes``, for a Python number, and for an integer added to a pointer."""
    slow = getattr(core.tensor, name)
    allowed = {id(dtype): _NUMPY_TYPES[dtype] for dtype in dtypes}
    long, is_sum = {id(dtype) for dtype in _INTEGERS}, name == "__add__"

    def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
        dtype, is_block, kind = self.dtype, self.shape, type(other)
        if kind is core.constexpr:
            other, kind = other.value, type(other.value)
        numpy_type = allowed.get(id(dtype))
        if kind is core.tensor:
            theirs, right, is_block = other.dtype, other.handle.data, is_block or other.shape
            if numpy_type is None:
                if is_sum and type(dtype) is core.pointer_type and id(theirs) in long:
                    size = max(1, dtype.element_ty.primitive_bitwidth // 8)
                    return _tensor(self.handle.data + size * right.astype(np.uint64), dtype, is_block)
                return slow(self, other)
            if theirs is not dtype:
                if not (id(dtype) in long and id(theirs) in long and id(theirs) in allowed):
                    return slow(self, other)
                dtype = tl.int64
        elif numpy_type is None or not (
            (kind is int and -(2**31) <= other < 2**31 and numpy_type is not np.bool_)
            or (kind is float and id(dtype) not in long and numpy_type is not np.bool_)
        ):
            return slow(self, other)
        else:
            right = numpy_type(other)
        return _tensor(compute(self.handle.data, right), result or dtype, is_block)

    setattr(core.tensor, name, operate)


def _quick_load(slow: Callable) -> Callable:
    def load(pointer: Any, mask: Any = None, other: Any = None, **rest: Any) -> Any:
        dtype = pointer.dtype
        addresses = pointer.handle.data
        if mask is None:
            allowed = np.ones(addresses.shape, np.bool_)
        elif type(mask) is core.tensor and mask.dtype is tl.int1:
            allowed = mask.handle.data
        else:
            return slow(pointer, mask, other, **rest)
        is_plain = type(dtype) is core.pointer_type and dtype.element_ty is not tl.int1
        is_filled = other is not None and (mask is None or type(other) not in (int, float) or other != 0)
        if not is_plain or is_filled or rest or (addresses.shape != allowed.shape and not pointer.shape):
            return slow(pointer, mask, other, **rest)
        addresses, allowed = (
            np.broadcast_arrays(addresses, allowed) if addresses.shape != allowed.shape else (addresses, allowed)
        )
        element = dtype.element_ty
        numpy_type = interpreter._get_np_dtype(element)
        values = interpreter._interpreter.load(addresses, allowed, np.zeros(addresses.shape, numpy_type), numpy_type)
        return _tensor(values, element, pointer.shape)

    return load


def _convert_bfloat16_by_bits() -> None:
    """As Triton's interpreter does, which truncates."""
    convert = interpreter._convert_float

    def convert_float(data: np.ndarray, source: tl.dtype, wanted: tl.dtype, rounding: Any) -> np.ndarray:
        if rounding is None and source is tl.bfloat16 and wanted is tl.float32:
            return data.astype(np.uint32) << 16
        if rounding is None and source is tl.float32 and wanted is tl.bfloat16:
            return (np.ascontiguousarray(data).view(np.uint32) >> 16).astype(np.uint16)
        return convert(data, source, wanted, rounding)

    interpreter._convert_float = convert_float


def _launch_on_the_host() -> None:
    """Arguments stay where they are, and their types are found once."""
    pointers, numbers, known = {}, {}, {}
    convert, prepare = interpreter._implicit_cvt, interpreter.GridExecutor.__init__

    def initialize(self: Any, function: Any, *rest: Any) -> None:
        if function not in known:
            prepare(self, function, *rest)
            spec = inspect.getfullargspec(function)
            known[function] = spec, frozenset(self.constexprs), frozenset(spec.args + spec.kwonlyargs)
        self.fn, (self.arg_names, self.grid, self.pre_run_hooks) = function, rest

    def converted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            if argument.dtype not in pointers:
                pointers[argument.dtype] = tl.str_to_ty(mangle_type(argument), None)
            return _tensor(np.array([argument.data_ptr()], dtype=np.uint64), pointers[argument.dtype], False)
        if type(argument) is int:
            if argument not in numbers:
                numbers[argument] = convert(argument)
            return numbers[argument]
        return convert(argument)

    def call(self: Any, *positional: Any, **named: Any) -> None:
        spec, compiled_in, names = known[self.fn]
        named = {name: value for name, value in named.items() if name in names}
        arguments = (
            inspect.getcallargs(self.fn, *positional, **named)
            if spec.defaults
            else dict(zip(spec.args, positional, strict=False)) | named
        )
        for hook in self.pre_run_hooks:
            hook(*positional, **named)
        interpreter._patch_lang(self.fn)
        arguments = {name: value if name in compiled_in else converted(value) for name, value in arguments.items()}
        grid = self.grid(arguments) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*grid)
        try:
            for indices in itertools.product(*map(range, grid)):
                interpreter.interpreter_builder.set_grid_idx(*indices)
                self.fn(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__init__, interpreter.GridExecutor.__call__ = initialize, call
