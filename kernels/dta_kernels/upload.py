"""Copies host arrays to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

# Every array starts at a multiple of this number of bytes.
_ALIGNMENT = 16


def upload(arrays: Sequence[np.ndarray], device: torch.device, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    """The arrays as vectors of ``dtype`` on the device, in one transfer that the host does not wait for.

    A transfer takes the host about 0.1 ms, most of it to pin memory, so a transfer for each array would make a step
    begin milliseconds later.
    """
    step = _ALIGNMENT // dtype.itemsize
    begins = [0, *accumulate(-(-array.size // step) * step for array in arrays)]
    packed = torch.empty(begins[-1], dtype=dtype, pin_memory=device.type == "cuda")
    on_host = packed.numpy()
    for array, begin in zip(arrays, begins, strict=False):
        on_host[begin : begin + array.size] = array.reshape(-1)
    packed = packed.to(device, non_blocking=True)
    return [packed[begin : begin + array.size] for array, begin in zip(arrays, begins, strict=False)]
