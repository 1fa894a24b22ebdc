"""Operations of Triton's interpreter on tensors of the usual types, computed by NumPy at once. Each of them returns
NotImplemented for all others, which go Triton's long way.
"""

import builtins
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_FLOATS, _INTEGERS = (tl.float32, tl.float64), (tl.int32, tl.int64)
_ALL = {tl.float32: np.float32, tl.float64: np.float64, tl.int32: np.int32, tl.int64: np.int64, tl.int1: np.bool_}
_NUMPY_TYPES = {id(dtype): numpy_type for dtype, numpy_type in _ALL.items()}
_LONG, _REAL = {id(dtype) for dtype in _INTEGERS}, {id(dtype) for dtype in _FLOATS}
# Python's numbers that may stand beside a tensor.
_NUMBERS = {(dtype, kind) for dtype in _LONG | _REAL for kind in (int, float) if dtype in _REAL or kind is int}
_HINTS = {"cache_modifier", "eviction_policy"}
_types: dict[tuple, tuple] = {}
_new, _Handle, _Tensor, _no_hints = object.__new__, interpreter.TensorHandle, core.tensor, {}
# Which no operation changes.
_ones, _zeros = lru_cache(lambda shape: np.ones(shape, np.bool_)), lru_cache(np.zeros)
_numpy_type = lru_cache(interpreter._get_np_dtype)


def tensor(data: np.ndarray, dtype: tl.dtype, is_block: Any) -> tl.tensor:
    """A tensor made without the checks of its constructors."""
    shape = data.shape if is_block else ()
    known = _types.get((id(dtype), shape))
    if known is None:
        model = _Tensor(None, core.block_type(dtype, list(shape)) if shape else dtype)
        # With the dtype, whose id must not be given to another one.
        known = _types[id(dtype), shape] = model.type, model.shape, model.numel, dtype
    handle, made = _new(_Handle), _new(_Tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, _no_hints
    made.handle, made.dtype = handle, dtype
    made.type, made.shape, made.numel, _ = known
    return made


def replace_operations() -> None:
    """In Triton's language, whose functions have been patched by its interpreter."""
    for prefix, in_order in (("__", lambda compute: compute), ("__r", _turned)):
        for name, compute in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
            checked = _checked(in_order(compute), in_order(getattr(operator, name)), name)
            _replace_operator(f"{prefix}{name}__", checked, _FLOATS + _INTEGERS)
        _replace_operator(f"{prefix}truediv__", in_order(np.divide), _FLOATS)
    for name, compute in {"and": np.bitwise_and, "or": np.bitwise_or}.items():
        _replace_operator(f"__{name}__", compute, (tl.int1, *_INTEGERS))
    for name, compute in {"floordiv": _quotient, "mod": np.fmod}.items():
        _replace_operator(f"__{name}__", compute, _INTEGERS)
    comparisons = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, compute in (comparisons | {"eq": np.equal, "ne": np.not_equal}).items():
        _replace_operator(f"__{name}__", compute, _FLOATS + _INTEGERS, tl.int1)
    for quick in (_load, _store, _where):
        _replace(quick.__name__[1:], quick, tl, core)
    _replace("to", _cast, _Tensor)
    _replace("__getitem__", _expanded, _Tensor)
    tl.arange = core.arange = lru_cache(tl.arange)
    tl.program_id = core.program_id = lambda axis: _index("grid_idx", axis)
    tl.num_programs = core.num_programs = lambda axis: _index("grid_dim", axis)


def _replace(name: str, quick: Callable, *owners: Any) -> None:
    slow = getattr(owners[0], name)

    def operation(*operands: Any, **named: Any) -> Any:
        result = quick(*operands, **named)
        return slow(*operands, **named) if result is NotImplemented else result

    for owner in owners:
        setattr(owner, name, operation)


def _turned(compute: Callable) -> Callable:
    return lambda value, other: compute(other, value)


def _quotient(value: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Towards zero, as in C."""
    return (value - np.fmod(value, other)) // other


def _checked(compute: Callable, exactly: Callable, name: str) -> Callable:
    """Arithmetic that fails where int32 overflows."""

    def computed(value: np.ndarray, other: np.ndarray) -> np.ndarray:
        result = compute(value, other)
        if result.dtype == np.int32:
            if result.size == 1:
                fits = exactly(value.item(), other.item()) == result.item()
            else:
                fits = (compute(value.astype(np.int64), other) == result).all()
            assert fits, f"int32 overflow detected for operation {name}"
        return result

    return computed


def _replace_operator(
    name: str, compute: Callable, dtypes: tuple[tl.dtype, ...], result: tl.dtype | None = None
) -> None:
    """``compute`` for two operands of one of ``dtypes``, for a Python number, and for an integer added to a pointer."""
    slow, is_sum = getattr(_Tensor, name), name == "__add__"
    allowed = {id(dtype): _NUMPY_TYPES[id(dtype)] for dtype in dtypes}

    def operate(self: Any, other: Any) -> Any:
        dtype, is_block, kind = self.dtype, self.shape, type(other)
        if kind is core.constexpr:
            other, kind = other.value, type(other.value)
        numpy_type = allowed.get(id(dtype))
        if kind is _Tensor:
            theirs, right, is_block = other.dtype, other.handle.data, is_block or other.shape
            if numpy_type is None:
                if is_sum and type(dtype) is core.pointer_type and id(theirs) in _LONG:
                    return tensor(self.handle.data + _bytes(dtype) * right.astype(np.uint64), dtype, is_block)
                return slow(self, other)
            if theirs is not dtype:
                if id(theirs) not in _LONG or numpy_type is np.bool_:
                    return slow(self, other)
                if id(dtype) in _LONG:
                    dtype = tl.int64
                else:
                    right = right.astype(numpy_type)
        elif (id(dtype), kind) in _NUMBERS and numpy_type is not None:
            if kind is int and not -(2**31) <= other < 2**31:
                return slow(self, other)
            right = numpy_type(other)
        elif is_sum and kind is int and type(dtype) is core.pointer_type:
            return tensor(self.handle.data + np.uint64(_bytes(dtype) * other % 2**64), dtype, is_block)
        else:
            return slow(self, other)
        return tensor(compute(self.handle.data, right), result or dtype, is_block)

    setattr(_Tensor, name, operate)


def _bytes(pointer: tl.pointer_type) -> int:
    return max(1, pointer.element_ty.primitive_bitwidth // 8)


def _index(sizes: str, axis: Any) -> tl.tensor:
    size = getattr(interpreter.interpreter_builder, sizes)[core._unwrap_if_constexpr(axis)]
    return tensor(np.array([size], np.int32), tl.int32, False)


def _where(condition: Any, left: Any, right: Any) -> Any:
    """Between two operands of one dtype, one of which may be a Python number."""
    dtype, values = left.dtype if type(left) is _Tensor else getattr(right, "dtype", None), []
    for operand in (left, right):
        if type(operand) is _Tensor and operand.dtype is dtype:
            values.append(operand.handle.data)
        elif (id(dtype), type(operand)) in _NUMBERS:
            values.append(_NUMPY_TYPES[id(dtype)](operand))
        else:
            return NotImplemented
    if not _is_mask(condition):
        return NotImplemented
    is_block = condition.shape or getattr(left, "shape", ()) or getattr(right, "shape", ())
    return tensor(np.where(condition.handle.data, *values), dtype, is_block)


def _cast(self: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
    dtype, data = core._unwrap_if_constexpr(dtype), self.handle.data
    if rest or named:
        return NotImplemented
    if dtype is self.dtype:
        return self
    if self.dtype is tl.bfloat16 and dtype is tl.float32:
        return tensor((data.astype(np.uint32) << 16).view(np.float32), dtype, self.shape)
    if self.dtype is tl.float32 and dtype is tl.bfloat16:  # truncated, as by Triton's interpreter
        return tensor((np.ascontiguousarray(data).view(np.uint32) >> 16).astype(np.uint16), dtype, self.shape)
    if dtype is tl.int1 or id(dtype) not in _NUMPY_TYPES or id(self.dtype) not in _NUMPY_TYPES:
        return NotImplemented
    return tensor(data.astype(_NUMPY_TYPES[id(dtype)]), dtype, self.shape)


def _expanded(self: Any, slices: Any) -> Any:
    if self.shape and type(slices) is builtins.tuple and all(part in (None, slice(None)) for part in slices):
        return tensor(self.handle.data[slices], self.dtype, True)
    return NotImplemented


def _is_mask(value: Any) -> bool:
    return type(value) is _Tensor and value.dtype is tl.int1


def _load(pointer: Any, mask: Any = None, other: Any = None, **rest: Any) -> Any:
    dtype, addresses = pointer.dtype, pointer.handle.data
    element = getattr(dtype, "element_ty", None)
    if type(dtype) is not core.pointer_type or element is tl.int1 or rest.keys() - _HINTS:
        return NotImplemented
    is_zero = other is None or (type(other) in (int, float) and other == 0)
    if not (mask is None or _is_mask(mask)) or not (is_zero or (id(element), type(other)) in _NUMBERS):
        return NotImplemented
    allowed = _ones(addresses.shape) if mask is None else mask.handle.data
    if addresses.shape != allowed.shape:
        if not pointer.shape:
            return NotImplemented
        allowed = np.broadcast_to(allowed, addresses.shape)
    numpy_type = _numpy_type(element)
    filled = _zeros(addresses.shape, numpy_type) if is_zero else np.full(addresses.shape, other, numpy_type)
    return tensor(interpreter._interpreter.load(addresses, allowed, filled, numpy_type), element, pointer.shape)


def _store(pointer: Any, value: Any, mask: Any = None, **rest: Any) -> Any:
    addresses, element = pointer.handle.data, getattr(pointer.dtype, "element_ty", None)
    if type(value) is not _Tensor or value.dtype is not element or element is tl.int1 or rest.keys() - _HINTS:
        return NotImplemented
    if not (mask is None or _is_mask(mask)):
        return NotImplemented
    parts = [value.handle.data, _ones(addresses.shape) if mask is None else mask.handle.data]
    if any(part.shape != addresses.shape for part in parts):
        if not pointer.shape:
            return NotImplemented
        parts = [np.broadcast_to(part, addresses.shape) for part in parts]
    interpreter._interpreter.store(addresses, *parts)
    return None
