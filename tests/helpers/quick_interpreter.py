"""Triton's interpreter without what it repeats: it patches its language anew at every launch and every inner call, and
builds dtypes, types of blocks and shapes of tensors at every operation. Three quarters of its time are that.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None:
        pass


def make_quick() -> None:
    """The language stays patched in this process, which compiles no kernels. A second call changes nothing."""
    if interpreter._patch_lang.__name__ == "patch_once":
        return
    _patch_once()
    _find_dtypes_once()
    _build_types_once()
    _check_shapes_and_overflow_in_numpy()


def _patch_once() -> None:
    patch_lang, patched, seen = interpreter._patch_lang, set(), set()

    def patch_once(function: Any) -> _Nothing:
        if function not in seen:
            seen.add(function)
            visible = frozenset(name for name, value in function.__globals__.items() if value is tl or value is core)
            if visible not in patched:
                patch_lang(function)
                patched.add(visible)
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
    broadcast = TritonSemantic.broadcast_impl_value
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def broadcast_if_different(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block() == other.is_block() and (not one.is_block() or one.shape.values == other.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth < 64:
            name = operation.__name__
            found = operations[name](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            fits = found.min() >= scalar.get_int_min_value() and found.max() <= scalar.get_int_max_value()
            assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {name}"

    TritonSemantic.broadcast_impl_value = broadcast_if_different
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
