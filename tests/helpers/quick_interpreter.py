"""Triton's interpreter for many programs at once (``quick_operations``). By itself it runs one after the other, patches
its language anew at every launch and every inner call, and decides at every operation how to compute it: that is nearly
all of its time. Other versions of Triton than those tried here keep their interpreter.
"""

import gc
import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.jit import mangle_type

from quick_operations import level, load, replace_operations, run_programs, steps, store, tensor

_TRIED_VERSIONS = ("3.9.",)


def make_quick() -> None:
    """The language stays patched in this process, which compiles no kernels. A second call changes nothing."""
    if not torch.cuda.is_available():
        # For a device that never comes, each seed would be noted with the whole stack of calls.
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    mangle_type(0)  # imports a module when it is called first
    if not triton.__version__.startswith(_TRIED_VERSIONS) or interpreter._patch_attr.__name__ == "patch_member":
        return
    core.block_type.to_ir = lambda self, builder: self
    _patch_once()
    _build_for_programs()
    _launch_on_the_host()
    # Its names are given to kernels, of which none must have been rewritten without them.
    interpreter.range = steps
    interpreter.InterpretedFunction.rewritten_fn.clear()


def rewrite_kernels() -> None:
    """Parse the source of all kernels now, in place of in each process that is forked later."""
    for candidate in gc.get_objects():
        if isinstance(candidate, interpreter.InterpretedFunction):
            candidate.rewrite()


def _patch_once() -> None:
    """The whole language at once; what its functions are given beside their arguments is always the same."""

    def patch_member(owner: Any, name: str, member: Callable, _: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_member
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": core}))
    replace_operations()
    interpreter._patch_lang = lambda function: None


def _build_for_programs() -> None:
    """What Triton's long way does with the axes of data, of which the first is that of the programs."""
    handle, atomic = interpreter.TensorHandle, interpreter.InterpreterBuilder.create_atomic_rmw

    def spread(data: np.ndarray, shape: Any) -> np.ndarray:
        return np.broadcast_to(*level(1 + len(shape), data), (len(data), *shape))

    def dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return handle(product + d.data, d.dtype.scalar)

    def masked_load(_: Any, pointers: Any, mask: Any, other: Any, *__: Any, **___: Any) -> Any:
        element = pointers.get_element_ty()
        filled = 0 if other is None else other.data
        return handle(load(pointers.data, mask.data, filled, interpreter._get_np_dtype(element)), element)

    def atomic_update(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        def update(addresses: np.ndarray, values: np.ndarray, allowed: np.ndarray) -> Any:
            operands = handle(addresses, pointer.dtype), handle(values, value.dtype), handle(allowed, mask.dtype)
            return atomic(self, operation, *operands, *rest)

        return store(pointer.data, value.data, mask.data, update)

    def pointers(self: Any, offsets: Any) -> tuple[Any, Any]:
        """Of a tensor descriptor's block, and whether they are inside the tensor."""
        element, axes = self.base.dtype.element_ty, range(self.ndim)
        size, at, inside = element.primitive_bitwidth // 8, self.base.data.reshape((1,) * (1 + self.ndim)), True
        assert not (offsets[-1].data * size % 16).any(), "a block must begin at a multiple of 16 bytes"
        for axis, (offset, length) in enumerate(zip(offsets, self.block_shape, strict=True)):
            index = offset.data[:, None] + np.arange(length)
            index = index.reshape(len(index), *(length if other == axis else 1 for other in axes))
            at = at + (size * index * self.strides[axis].data).astype(np.uint64)
            inside = inside & (index >= 0) & (index < self.shape[axis].data)
        return handle(at, self.base.dtype), handle(inside, tl.int1)

    members = {
        "broadcast": lambda _, x, shape: handle(spread(x.data, shape), x.dtype.scalar),
        "splat": lambda _, to, x: handle(spread(x.data, to.shape), x.dtype.scalar),
        "expand_dims": lambda _, x, axis: handle(np.expand_dims(x.data, axis + 1), x.dtype.scalar),
        "trans": lambda _, x, order: handle(x.data.transpose(0, *(axis + 1 for axis in order)), x.dtype.scalar),
        "reshape": lambda _, x, shape, *__: handle(x.data.reshape(len(x.data), *shape), x.dtype.scalar),
        "make_range": lambda _, __, begin, end: handle(np.arange(begin, end, dtype=np.int32)[None], tl.int32),
        "masked_store": lambda _, pointers, value, mask, *__: store(pointers.data, value.data, mask.data),
        "masked_load": masked_load, "dot": dot, "atomic_rmw": atomic_update,
    }  # fmt: skip
    for name, member in members.items():
        setattr(interpreter.InterpreterBuilder, f"create_{name}", member)
    interpreter.TensorDescHandle.materialize_pointers = pointers


def _launch_on_the_host() -> None:
    """Arguments stay where they are, and their types are found once."""
    pointers, convert = {}, interpreter._implicit_cvt
    number = lru_cache(convert)

    @lru_cache
    def parameters(kernel: Any) -> tuple[Callable, dict, frozenset]:
        function = kernel.rewrite()
        defaults = {name: given.default for name, given in inspect.signature(function).parameters.items()}
        return function, defaults, frozenset(interpreter.GridExecutor(function, kernel.arg_names, ()).constexprs)

    def converted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            if argument.dtype not in pointers:
                pointers[argument.dtype] = tl.str_to_ty(mangle_type(argument), None)
            return tensor(np.array([argument.data_ptr()], dtype=np.uint64), pointers[argument.dtype])
        return number(argument) if type(argument) is int else convert(argument)

    def run(self: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        function, defaults, compiled_in = parameters(self)
        given = defaults | dict(zip(defaults, positional, strict=False)) | named
        arguments = {name: given[name] if name in compiled_in else converted(given[name]) for name in defaults}
        grid = (*(grid(arguments) if callable(grid) else grid), 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*grid)
        try:
            run_programs(grid, lambda: function(**arguments))
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.run = run
