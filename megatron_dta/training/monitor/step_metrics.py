"""Computes a step's metrics other than losses: phase times, rates, tree sizes and the balance of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_dta.core.engine import TreeBatch, TreeEngine
from megatron_dta.core.model.parallel.mesh import Mesh


class Stopwatch:
    """Accumulates seconds by phase name; ``on_start`` is called with the name when a phase starts."""

    def __init__(self, on_start: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._on_start, self._began = on_start, time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``, including the work that it queued on a GPU."""
        self._on_start(name)
        start = time.perf_counter()
        try:
            yield
            if torch.cuda.is_initialized():
                # Every phase but the update ends by reading a result; the next phase needs what this one computed.
                torch.cuda.current_stream().synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        """Seconds since the stopwatch was created."""
        return time.perf_counter() - self._began


def step_sizes(engine: TreeEngine, batch: TreeBatch) -> dict[str, Any]:
    """Sizes of the forests of all data-parallel ranks, and floating-point operations with and without sharing."""
    plan = batch.plan
    sizes = (plan.num_sequence_tokens, plan.segments.tree.num_tokens, plan.segments.num_segments)
    of_ranks = engine.mesh.gather_over_data((*sizes, *engine.operations(plan)))
    tokens, unique, segments, tree, dense = map(sum, zip(*of_ranks, strict=True))
    return {
        "tokens": tokens,
        "unique_tokens": unique,
        "token_reuse": tokens / unique,
        "segments": segments,
        "tree_tflop": tree / 1e12,
        "dense_tflop": dense / 1e12,
    }


def step_timing(watch: Stopwatch, sizes: dict[str, Any], sampled: int, mesh: Mesh) -> dict[str, Any]:
    """The step's metrics that depend on the clock or the machine.

    Args:
        sizes: the result of ``step_sizes``.
        sampled: number of tokens sampled in this step.
    """
    seconds = watch.seconds
    trained = seconds["plan"] + seconds["train"] + seconds["update"] + seconds.get("critic", 0.0)
    rollouts = {"sampled_tokens_per_second": sampled / seconds["collect"]} if sampled else {}
    return {
        "step_seconds": watch.elapsed,
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "tokens_per_second": sizes["tokens"] / trained,
        "unique_tokens_per_second": sizes["unique_tokens"] / trained,
        **rollouts,
        **_peak_memory(),
        **_balance(seconds["train"], mesh),
    }


def _balance(train_seconds: float, mesh: Mesh) -> dict[str, Any]:
    """Seconds that each data-parallel rank spent on its own sequences, and their mean / maximum: 1 if all are equal.

    With --overlap-grad-reduce the seconds include waiting for other ranks.
    """
    if mesh.data_size == 1:
        return {}
    seconds = mesh.gather_over_data(train_seconds)
    even = sum(seconds) / len(seconds) / max(seconds) if max(seconds) else 1.0
    return {"rank_train_seconds": seconds, "rank_balance": even}


def _peak_memory() -> dict[str, float]:
    """Peak memory of this rank's tensors on its GPU since the last call."""
    if not torch.cuda.is_initialized():
        return {}
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return {"peak_memory_gib": peak}
