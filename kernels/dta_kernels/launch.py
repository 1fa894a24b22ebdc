"""Launches Triton kernels with less host time than Triton's own launcher.

Triton looks up the binary for a call at every launch: it inspects each argument, builds a key from all their types, and
prepares for the hooks of a profiler. This often takes the host longer than the kernel takes the GPU. Here the key
contains only what decides about the binary (dtypes, alignment, integers that are compiled in). The binary that an
ordinary launch returned for a key is launched directly from then on.

The way to launch a binary differs between Triton versions, so direct launches are used only with the tested versions.
With other versions, in Triton's interpreter and while a profiler has hooks, every launch is an ordinary one.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter
from triton.runtime.jit import JITFunction

_TRIED_VERSIONS = ("3.6.",)


def ceil_div(number: int, divisor: int) -> int:
    """``number / divisor`` rounded up; ``triton.cdiv`` takes as long as a launch."""
    return -(-number // divisor)


class Launcher:
    """A kernel with its compile-time arguments, which come last in its signature, and its launch settings.

    If an argument is a tensor descriptor, its block and its layout must follow from the launcher and the dtype.
    """

    def __init__(self, kernel: Any, **constants: object) -> None:
        self._kernel, self._constants = kernel, constants
        self._binaries: dict[tuple, tuple] = {}
        self._is_quick = triton.__version__.startswith(_TRIED_VERSIONS) and isinstance(kernel, JITFunction)
        if self._is_quick:
            runtime = [parameter for parameter in kernel.params if parameter.name not in constants]
            self._compiled_in = tuple(not parameter.do_not_specialize for parameter in runtime)
            compile_time = [parameter.name for parameter in kernel.params[len(runtime) :]]
            self._last = tuple(constants[name] for name in compile_time)

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """Launch on the current device and stream; ``arguments`` are the runtime arguments, by position."""
        if not self._is_quick:
            self._kernel[grid](*arguments, **self._constants)
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key, values, is_known = [device], [], True
        # This loop is most of the cost of a launch.
        for argument, is_compiled_in in zip(arguments, self._compiled_in, strict=True):
            kind = type(argument)
            if kind is Tensor or kind is Parameter:
                key.append(argument.dtype)
                argument = argument.data_ptr()
                if argument & 15:
                    key.append("unaligned")
            elif kind is int:
                key.append(argument if is_compiled_in else int)
                is_known = is_known and -(2**31) <= argument < 2**31
            elif kind is float or argument is None:
                key.append(kind)
            elif hasattr(argument, "block_shape"):
                key.append(argument.base.dtype)
            else:
                is_known = False
            values.append(argument)
        binary = self._binaries.get(tuple(key)) if is_known else None
        hooks = triton.knobs.runtime
        if binary is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled = self._kernel[grid](*arguments, **self._constants)
            if is_known and compiled is not None:
                self._binaries[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = binary
        rows, planes = grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
        stream = driver.get_current_stream(device)
        run(grid[0], rows, planes, stream, function, metadata, None, None, None, *values, *self._last)
