"""Operations of Triton's interpreter on many programs at once, computed by NumPy. The first axis of all data is that of
the programs, of length 1 where all have the same. Operators of unusual types go Triton's long way.

Where programs must go different ways, what they have stored is taken back, and those of each way run again. The first
program that is left is always among those that run, so one that waits for others in front of it finds them done.
"""

import heapq
import operator
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, standard
from triton.runtime import interpreter

_FLOATS, _INTEGERS = (tl.float32, tl.float64), (tl.int32, tl.int64)
_ALL = {tl.float32: np.float32, tl.float64: np.float64, tl.int32: np.int32, tl.int64: np.int64, tl.int1: np.bool_}
_NUMPY_TYPES = {id(dtype): numpy_type for dtype, numpy_type in _ALL.items()}
_LONG, _REAL = {id(dtype) for dtype in _INTEGERS}, {id(dtype) for dtype in _FLOATS}
# Python's numbers that may stand beside a tensor.
_NUMBERS = {(dtype, kind) for dtype in _LONG | _REAL for kind in (int, float) if dtype in _REAL or kind is int}
_HINTS = {"cache_modifier", "eviction_policy"}
_REDUCTIONS = {standard._sum_combine: np.add, standard._elementwise_max: np.fmax, standard._elementwise_min: np.fmin}
_types: dict[tuple, tuple] = {}
_new, _Handle, _Tensor, _no_hints = object.__new__, interpreter.TensorHandle, core.tensor, {}
_numpy_type = lru_cache(interpreter._get_np_dtype)
# More programs at once need memory that the processor's cache does not hold.
_MOST = 256
_running = SimpleNamespace(count=1, index=[], replaced=[])


class Parted(BaseException):
    """Programs must go different ways, each that of its number."""


def agreed(numbers: np.ndarray) -> Any:
    """The number of all programs."""
    if numbers.size > 1 and (numbers != numbers[0]).any():
        raise Parted(numbers)
    return numbers[0]


def run_programs(grid: tuple[int, ...], run: Callable[[], None]) -> None:
    """Call ``run`` until all programs of the grid have come to their ends."""
    places = np.indices(grid, np.int32).reshape(len(grid), -1)
    pending = [(begin, np.arange(places.shape[1])[begin : begin + _MOST]) for begin in range(0, places.shape[1], _MOST)]
    while pending:
        programs = heapq.heappop(pending)[1]
        index = [ids[:1] if (ids == ids[0]).all() else ids for ids in places[:, programs]]
        _running.count, _running.index, _running.replaced = len(programs), index, []
        try:
            run()
        except Parted as ways:
            for addresses, before, mask in reversed(_running.replaced):
                interpreter._interpreter.store(addresses, before, mask)
            for number in np.unique(ways.args[0]):
                part = programs[ways.args[0] == number]
                heapq.heappush(pending, (part[0], part))


def level(axes: int, *operands: np.ndarray) -> list[np.ndarray]:
    """With so many axes each; new ones follow that of the programs."""
    return [x.reshape(x.shape[:1] + (1,) * (axes - x.ndim) + x.shape[1:]) for x in operands]


def _shaped(count: int, addresses: np.ndarray, *parts: Any) -> list[np.ndarray]:
    parts = level(addresses.ndim, addresses, *map(np.asarray, parts))
    shape = (max(count, *map(len, parts)), *addresses.shape[1:])
    return [part if part.shape == shape else np.broadcast_to(part, shape) for part in parts]


def load(addresses: np.ndarray, mask: Any, other: Any, numpy_type: Any) -> np.ndarray:
    """``mask`` and ``other``: arrays or numbers."""
    parts = _shaped(1, addresses, mask, np.asarray(other, numpy_type))
    return interpreter._interpreter.load(*parts, numpy_type)


def store(addresses: np.ndarray, value: np.ndarray, mask: np.ndarray, update: Callable | None = None) -> Any:
    """Or ``update`` what is there, for each program."""
    parts = _shaped(_running.count if update else 1, addresses, value, mask)
    if _running.count > 1:
        _running.replaced.append((parts[0], load(parts[0], parts[2], 0, value.dtype), parts[2]))
    return (update or interpreter._interpreter.store)(*map(np.ascontiguousarray, parts))


def tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """A tensor made without the checks of its constructors."""
    known = _types.get((id(dtype), data.shape[1:]))
    if known is None:
        shape = data.shape[1:]
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
    tl.load = core.load = _where_usual(_load, tl.load)
    _Tensor.__getitem__ = _where_usual(_expanded, _Tensor.__getitem__)
    _Tensor.to, tl.cast = _where_usual(_cast, _Tensor.to), _where_usual(_cast, tl.cast)
    interpreter.interpreter_semantic.broadcast_impl_value = _of_one_shape
    _Tensor.T = property(lambda self: tensor(self.handle.data.swapaxes(-1, -2), self.dtype))
    _Tensor.__bool__ = lambda self: self.handle.data.ndim > 1 or bool(agreed(self.handle.data))
    _Tensor.__index__ = lambda self: int(agreed(self.handle.data))
    tl.reduce = core.reduce = _reduce
    tl.associative_scan = core.associative_scan = _sums_up_to_each
    tl.arange = core.arange = lru_cache(tl.arange)
    tl.program_id = core.program_id = lambda axis: tensor(_running.index[core._unwrap_if_constexpr(axis)], tl.int32)
    tl.range = tl.static_range = core.range = core.static_range = steps


def _where_usual(quick: Callable, slow: Callable) -> Callable:
    def operation(*operands: Any, **named: Any) -> Any:
        result = quick(*operands, **named)
        return slow(*operands, **named) if result is None else result

    return operation


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
        dtype, left, kind = self.dtype, self.handle.data, type(other)
        if kind is core.constexpr:
            other, kind = other.value, type(other.value)
        numpy_type = allowed.get(id(dtype))
        if kind is _Tensor:
            theirs, right = other.dtype, other.handle.data
            if left.ndim != right.ndim:
                left, right = level(max(left.ndim, right.ndim), left, right)
            if numpy_type is None:
                if is_sum and type(dtype) is core.pointer_type and id(theirs) in _LONG:
                    return tensor(left + _bytes(dtype) * right.astype(np.uint64), dtype)
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
            return tensor(left + np.uint64(_bytes(dtype) * other % 2**64), dtype)
        else:
            return slow(self, other)
        return tensor(compute(left, right), result or dtype)

    setattr(_Tensor, name, operate)


def _bytes(pointer: tl.pointer_type) -> int:
    return max(1, pointer.element_ty.primitive_bitwidth // 8)


def _reduce(values: Any, axis: Any, combine: Any, keep_dims: Any = False, **_: Any) -> Any:
    data, axis = values.handle.data, core._unwrap_if_constexpr(axis)
    if axis is None:
        data, axis = data.reshape(len(data), -1), 0
    # In an order that does not depend on the number of programs.
    data, axis = np.ascontiguousarray(data), axis % (data.ndim - 1) + 1
    return tensor(_REDUCTIONS[combine].reduce(data, axis, data.dtype, None, bool(keep_dims)), values.dtype)


def _sums_up_to_each(values: Any, axis: Any, combine: Any, reverse: Any = False, **_: Any) -> Any:
    assert combine is standard._sum_combine
    assert not reverse, "no kernel needs it"
    data = values.handle.data
    return tensor(np.cumsum(data, int(axis) % (data.ndim - 1) + 1, data.dtype), values.dtype)


def _expanded(self: Any, slices: Any) -> Any:
    is_usual = self.handle.data.ndim > 1 and type(slices) is tuple and all(x in (None, slice(None)) for x in slices)
    return tensor(self.handle.data[(slice(None), *slices)], self.dtype) if is_usual else None


def _cast(self: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
    dtype = core._unwrap_if_constexpr(dtype)
    is_usual = id(getattr(self, "dtype", None)) in _NUMPY_TYPES and id(dtype) in _LONG | _REAL and not (rest or named)
    return tensor(self.handle.data.astype(_NUMPY_TYPES[id(dtype)], copy=False), dtype) if is_usual else None


def _of_one_shape(left: Any, right: Any) -> list[Any]:
    data = [operand.handle.data for operand in (left, right)]
    data = level(max(operand.ndim for operand in data), *data)
    shape = np.broadcast_shapes(*(operand.shape[1:] for operand in data))
    shaped = (np.broadcast_to(operand, (len(operand), *shape)) for operand in data)
    return [tensor(operand, dtype) for operand, dtype in zip(shaped, (left.dtype, right.dtype), strict=True)]


def _load(pointer: Any, mask: Any = None, other: Any = None, **rest: Any) -> Any:
    element = getattr(pointer.dtype, "element_ty", tl.int1)
    is_zero = other is None or (type(other) in (int, float) and other == 0)
    if element is tl.int1 or rest.keys() - _HINTS or not (is_zero or (id(element), type(other)) in _NUMBERS):
        return None
    allowed = True if mask is None else mask.handle.data
    return tensor(load(pointer.handle.data, allowed, other or 0, _numpy_type(element)), element)


def steps(*bounds: Any, step: Any = 1, **_: Any) -> Any:
    """``range``, also where each program begins elsewhere; all of them go as many steps."""
    if all(type(bound) is int for bound in (*bounds, step)):
        return range(*bounds, step) if len(bounds) == 2 else range(*bounds)
    begin, end, step = (0, *bounds, step) if len(bounds) == 1 else (*bounds, step)[:3]
    first, last = (x.handle.data if type(x) is _Tensor else np.array([int(x)]) for x in (begin, end))
    step = int(step)
    count = int(agreed(np.maximum(0, -((first - last) // step))))
    if first.size == 1:
        return range(int(first[0]), int(first[0]) + count * step, step)
    return (tensor(first + index * step, begin.dtype) for index in range(count))
