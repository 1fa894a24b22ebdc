"""Triton's interpreter without what it repeats: it patches its language anew at every launch and every inner call, and
decides at every operation how to compute it (``quick_operations``). Nine tenths of its time are that. Other versions of
Triton than those tried here keep their interpreter.
"""

import gc
import inspect
import itertools
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

from quick_operations import replace_operations, tensor

_TRIED_VERSIONS = ("3.9.",)


def _dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def make_quick() -> None:
    """The language stays patched in this process, which compiles no kernels. A second call changes nothing."""
    if not torch.cuda.is_available():
        # For a device that never comes, each seed would be noted with the whole stack of calls.
        for absent in (torch.cuda, torch.xpu, torch.mtia):
            absent.manual_seed_all = lambda seed: None
    mangle_type(0)  # imports a module when it is called first
    if not triton.__version__.startswith(_TRIED_VERSIONS) or interpreter._patch_attr.__name__ == "patch_member":
        return
    # NumPy's order of additions depends on where rows begin in memory; a sum in float64, rounded once, hides it.
    interpreter.InterpreterBuilder.create_dot = _dot
    core.block_type.to_ir = lambda self, builder: self
    _patch_once()
    _launch_on_the_host()


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


def _launch_on_the_host() -> None:
    """Arguments stay where they are, and their types are found once."""
    pointers, known, convert = {}, {}, interpreter._implicit_cvt
    prepare, number = interpreter.GridExecutor.__init__, lru_cache(convert)

    def initialize(self: Any, function: Any, *rest: Any) -> None:
        if function not in known:
            prepare(self, function, *rest)
            parameters = inspect.signature(function).parameters
            defaults = {name: given.default for name, given in parameters.items() if given.default is not given.empty}
            known[function] = list(parameters), defaults, frozenset(self.constexprs)
        self.fn, (self.arg_names, self.grid, _) = function, rest

    def converted(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            if argument.dtype not in pointers:
                pointers[argument.dtype] = tl.str_to_ty(mangle_type(argument), None)
            return tensor(np.array([argument.data_ptr()], dtype=np.uint64), pointers[argument.dtype], False)
        return number(argument) if type(argument) is int else convert(argument)

    def call(self: Any, *positional: Any, **named: Any) -> None:
        names, defaults, compiled_in = known[self.fn]
        given = defaults | dict(zip(names, positional, strict=False)) | named
        arguments = {name: given[name] if name in compiled_in else converted(given[name]) for name in names}
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
