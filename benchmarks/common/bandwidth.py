"""The rate at which a device reads and writes its memory, which bounds decoding."""

from __future__ import annotations

import time
from statistics import median

import torch


def measured_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy that is much larger than any cache."""
    count = 2**28 if device.type == "cuda" else 2**26
    source = torch.zeros(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * 4 * count / median(seconds[2:])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU needs no wait."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
