"""Overlaps the launch of a kernel with the end of the previous one: programmatic dependent launch, from Hopper on.

Between two short kernels of a stream a GPU loses about a microsecond: the first one drains, then the programs of the
second one start. Here they start as soon as all programs of the first one run, and wait on the device for its end.
Every program of such a kernel calls ``wait_for_previous`` before it writes, and before it reads anything but weights,
which no kernel of a pass writes. So all earlier kernels have ended by then, too.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import JITFunction


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the next kernel's programs start, and wait for the end of all kernels before this one."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@lru_cache
def overlap_settings(wanted: bool = True) -> dict[str, bool]:
    """Constants for the launcher of a kernel with the parameter ``OVERLAP``: whether it is ``wanted`` and possible."""
    # In Triton's interpreter nothing is compiled.
    is_compiled = isinstance(wait_for_previous, JITFunction)
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    if wanted and is_compiled and is_nvidia and torch.cuda.get_device_capability() >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
