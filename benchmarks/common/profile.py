"""Measures GPUs for benchmarks: the rate of large products, and the kernels that take the time of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

SHORT_GAP_US = 5.0


def profile_step(step: Callable[[], Any], num_kernels: int = 25) -> dict[str, Any]:
    """Run ``step`` once under PyTorch's profiler.

    Returns:
        ``span_ms``: from the start of the first kernel to the end of the last; ``idle_ms``: the part of it without a
        kernel or copy; ``idle_in_short_gaps_ms``: what of it lies in gaps of less than ``SHORT_GAP_US``, in which no
        host is waited for; ``idle_before``: the kernels that most of the rest comes before, ``name``, ``ms`` and
        ``gaps`` each; ``exposed_communication_ms``: the part with kernels of NCCL only; ``kernels``: those that take
        most, ``name``, ``ms`` and ``calls`` each; ``others_ms``: the rest.
    """
    # Recording the host too would slow its launches, and with them the step.
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3, event.name())
        for event in recorded.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    )
    return summary(spans, num_kernels)


def summary(spans: list[tuple[float, float, str]], num_kernels: int) -> dict[str, Any]:
    """``spans``: begin and end in microseconds and the name of every kernel, in order of their begins."""
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for begin, end, name in spans:
        total[name] += end - begin
        calls[name] += 1
    covered, idle, short = *_covered(spans), 0.0
    before: dict[str, list[float]] = defaultdict(list)
    for gap, name in _gaps(spans):
        if gap < SHORT_GAP_US:
            short += gap
        else:
            before[name].append(gap)
    longest = sorted(before, key=lambda name: -sum(before[name]))[:8]
    _, without_computation = _covered([span for span in spans if "nccl" not in span[2].lower()], *_ends(spans))
    most = sorted(total, key=lambda name: -total[name])
    return {
        "span_ms": (covered - spans[0][0]) / 1e3 if spans else 0.0,
        "idle_ms": idle / 1e3,
        "idle_in_short_gaps_ms": short / 1e3,
        "idle_before": [
            {"name": name[:120], "ms": sum(before[name]) / 1e3, "gaps": len(before[name])} for name in longest
        ],
        "exposed_communication_ms": (without_computation - idle) / 1e3,
        "kernels": [{"name": name[:120], "ms": total[name] / 1e3, "calls": calls[name]} for name in most[:num_kernels]],
        "others_ms": sum(total[name] for name in most[num_kernels:]) / 1e3,
    }


def _gaps(spans: list[tuple[float, float, str]]) -> Iterator[tuple[float, str]]:
    """The microseconds without a kernel before a kernel, and its name."""
    covered = spans[0][0] if spans else 0.0
    for begin, end, name in spans:
        if begin > covered:
            yield begin - covered, name
        covered = max(covered, end)


def _covered(
    spans: list[tuple[float, float, str]], begin: float | None = None, end: float | None = None
) -> tuple[float, float]:
    """The end of the last of ``spans``, and the time between ``begin`` and ``end`` that none of them covers."""
    if not spans:
        return end or 0.0, (end or 0.0) - (begin or 0.0)
    covered, gaps = spans[0][0] if begin is None else begin, 0.0
    for start, stop, _ in spans:
        gaps += max(0.0, start - covered)
        covered = max(covered, stop)
    if end is not None:
        gaps += max(0.0, end - covered)
    return covered, gaps


def _ends(spans: list[tuple[float, float, str]]) -> tuple[float, float]:
    return (spans[0][0], max(end for _, end, _ in spans)) if spans else (0.0, 0.0)


def gemm_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a product of large matrices, measured."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        start = now(device)
        left @ right
        seconds.append(now(device) - start)
    return 2 * size**3 / median(seconds[4:])


def now(device: torch.device) -> float:
    """The time on the host, after the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
