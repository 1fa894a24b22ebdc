"""Launches of Triton kernels at a fraction of the host's time.

Triton finds the binary that fits a call anew at every launch: it looks at each argument, spells out a key of all their
types, and prepares for hooks of a profiler. That takes the host longer than many a kernel takes the GPU. Here the key
is the little that decides about the binary (dtypes, alignment, integers that are compiled in), and the binary that an
ordinary launch has returned for it is launched directly the next time.

How a binary is launched changes with Triton's versions, so this is done only with those that it was tried on; with
others, in Triton's interpreter and while a profiler has hooks, every launch is an ordinary one.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

_TRIED_VERSIONS = ("3.6.",)
_INT32 = range(-(2**31), 2**31)


class Launcher:
    """A kernel with its compile-time arguments, which come last in its signature, and launch settings.

    Where an argument is a tensor descriptor, its block and its layout must follow from the launcher and the dtype.
    """

    def __init__(self, kernel: Any, **constants: object) -> None:
        self._kernel, self._constants = kernel, constants
        self._binaries: dict[tuple, tuple] = {}
        self._is_quick = triton.__version__.startswith(_TRIED_VERSIONS) and isinstance(kernel, JITFunction)
        if self._is_quick:
            given = [parameter for parameter in kernel.params if parameter.name not in constants]
            self._compiled_in = tuple(not parameter.do_not_specialize for parameter in given)
            compile_time = [parameter.name for parameter in kernel.params[len(given) :]]
            self._last = tuple(constants[name] for name in compile_time)

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """Launch on the current device and stream; ``arguments`` are those of run time, by position."""
        if not self._is_quick:
            self._kernel[grid](*arguments, **self._constants)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        found = self._key(device, arguments)
        binary = None if found is None else self._binaries.get(found[0])
        if binary is None or _has_hooks():
            compiled = self._kernel[grid](*arguments, **self._constants)
            if found is not None and compiled is not None:
                self._binaries[found[0]] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = binary
        columns, rows, planes = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        run(columns, rows, planes, stream, function, metadata, None, None, None, *found[1], *self._last)

    def _key(self, device: int, arguments: tuple) -> tuple[tuple, list] | None:
        """What decides about the binary, and the arguments as it takes them; None where only Triton can tell."""
        key, values = [device], []
        for argument, is_compiled_in in zip(arguments, self._compiled_in, strict=True):
            kind = type(argument)
            if kind is Tensor or kind is Parameter:
                address = argument.data_ptr()
                key.append(argument.dtype)
                if address % 16:
                    key.append("unaligned")
                values.append(address)
                continue
            if kind is int:
                if argument not in _INT32:
                    return None
                key.append(argument if is_compiled_in else int)
            elif kind is float or argument is None:
                key.append(kind)
            elif hasattr(argument, "block_shape"):
                key.append(argument.base.dtype)
            else:
                return None
            values.append(argument)
        return tuple(key), values


def _has_hooks() -> bool:
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
