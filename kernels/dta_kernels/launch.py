"""Launches Triton kernels with less host time than Triton's own launcher.

Triton looks up the binary for a call at every launch: it inspects each argument, builds a key from all their types, and
prepares for the hooks of a profiler. This often takes the host longer than the kernel takes the GPU. Here the key
contains only what decides about the binary (types, alignment, integers that are compiled in). The binary that an
ordinary launch returned for a key is launched directly from then on.

The way to launch a binary differs between Triton versions, so direct launches are used only with the tested versions.
With other versions, in Triton's interpreter and while a profiler has hooks, every launch is an ordinary one.

Launchers are cached by their constants and, where a file has several kernels, by the kernel's name, because hashing a
kernel takes as long as a launch.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self._readers: dict[tuple[type, ...], Callable[..., tuple] | None] = {}
        self._is_quick = triton.__version__.startswith(_TRIED_VERSIONS) and isinstance(kernel, JITFunction)
        if self._is_quick:
            runtime = [parameter for parameter in kernel.params if parameter.name not in constants]
            self._compiled_in = tuple(not parameter.do_not_specialize for parameter in runtime)
            compile_time = [parameter.name for parameter in kernel.params[len(runtime) :]]
            self._last = tuple(constants[name] for name in compile_time)

    def __call__(self, grid: tuple[int, ...], *arguments: object) -> None:
        """Launch on the current device and stream; ``arguments`` are the runtime arguments, by position."""
        types = tuple(map(type, arguments))
        if types not in self._readers:
            self._readers[types] = _reader(types, self._compiled_in) if self._is_quick else None
        read = self._readers[types]
        if read is None:
            self._kernel[grid](*arguments, **self._constants)
            return
        driver = triton.runtime.driver.active
        *values, key, address_bits = read(*arguments)
        key = driver.get_current_device(), types, *key
        if address_bits & 15:
            key += tuple(argument.data_ptr() & 15 > 0 for argument in arguments if isinstance(argument, Tensor))
        binary, hooks = self._binaries.get(key), triton.knobs.runtime
        if binary is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled = self._kernel[grid](*arguments, **self._constants)
            if compiled is not None:
                self._binaries[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = binary
        rows, planes = grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1
        stream = driver.get_current_stream(key[0])
        run(grid[0], rows, planes, stream, function, metadata, None, None, None, *values, *self._last)


def _reader(types: tuple[type, ...], compiled_in: tuple[bool, ...]) -> Callable[..., tuple] | None:
    """A function that returns the launched values of such arguments, what decides about the binary, and the bits of all
    addresses; one expression, because a loop would take longer than all else. None if a type is unexpected."""
    values, key, addresses = [], [], ["0"]
    for number, (kind, is_compiled_in) in enumerate(zip(types, compiled_in, strict=True)):
        name = f"a{number}"
        values.append(name)
        if kind is Tensor or kind is Parameter:
            values[-1], key = f"(p{number} := {name}.data_ptr())", [*key, f"{name}.dtype"]
            addresses.append(f"p{number}")
        elif kind is int:
            key.append(name if is_compiled_in else f"{-(2**31)} <= {name} < {2**31}")
        elif "block_shape" in getattr(kind, "__dataclass_fields__", ()):
            key.append(f"{name}.base.dtype")
        elif kind is not float and kind is not type(None):
            return None
    names = ", ".join(f"a{number}" for number in range(len(types)))
    results = [*values, f"[{', '.join(key)}]", " | ".join(addresses)]
    return eval(f"lambda {names}: ({', '.join(results)})")
