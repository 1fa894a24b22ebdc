"""Measures how long each pipeline stage computes in captured decoding passes: what is left is waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.sampling.in_process.engine import InProcessEngine


def longest_stage_seconds(engine: InProcessEngine, sample: Callable[[], object]) -> float | None:
    """Seconds that the busiest rank of a replica computes for a token of every row, while ``sample()`` uses ``engine``.

    Passes of the same sizes must have run before, and no other ones may run. None if no pass is captured.
    """
    steps, before = engine._steps, engine.statistics()["static_forwards"]
    if steps is None:
        return None
    passes, times = dict(steps._passes), []
    for key, captured in passes.items():
        steps._passes[key] = replace(captured, run=partial(_timed, captured.run, times))
    try:
        sample()
    finally:
        steps._passes.update(passes)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    count = engine.statistics()["static_forwards"] - before
    rank_seconds = sum(elapsed() for elapsed in times) / count if count else 0.0
    return max(current_mesh().gather_over_replica(rank_seconds)) or None


def _timed(run: Callable[[], Tensor], times: list[Callable[[], float]]) -> Tensor:
    """The result of ``run()``; appends a function that returns its seconds on the device."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        out = run()
        seconds = time.perf_counter() - began
        times.append(lambda: seconds)
        return out
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    out = run()
    last.record()
    times.append(lambda: 1e-3 * first.elapsed_time(last))
    return out
