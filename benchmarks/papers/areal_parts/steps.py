"""Measures the modes of training and the segment sizes of the AReaL-DTA experiment on one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from common.training_step import StepTimer, compared
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeBatch
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.segments.plan import SegmentPlan, segment_parents
from megatron_dta.core.planning.step.evaluate import StepChoice
from megatron_dta.core.planning.step.plan import plan_segmented_step
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.tree import PrefixTree, build_forest_without_sharing
from papers.areal_parts.workload import RolloutSet
from papers.tables import PaperReport

ONE_BY_ONE, DENSE, PACKED, TREES = "dense, one by one", "dense, packed", "packed trees", "trees (dta)"

MODE_COLUMNS = {
    "set": "set",
    "sample": "one sample per",
    "mode": "mode",
    "seconds": "seconds",
    "tokens_per_second": "sequence tokens/s",
    "unique_tokens_per_second": "unique tokens/s",
    "tokens": "sequence tokens",
    "unique_tokens": "computed tokens",
    "peak_memory_gib": "peak GiB",
    "tflop": "TFLOP",
    "speed_up": "speed-up over dense, packed",
    "bound": "bound",
    "share_of_bound": "share of bound",
    "over_one_by_one": "speed-up over one by one",
}
SIZE_COLUMNS = {
    "set": "set",
    "segment_tokens": "tokens a segment, at most",
    "segments": "segments",
    "fill": "fill",
    "seconds": "seconds",
    "unique_tokens_per_second": "unique tokens/s",
    "share_of_gemm_peak": "share of GEMM peak",
    "peak_memory_gib": "peak GiB",
    "peak_in_flight_tokens": "tokens in flight",
    "longest": "bound: longest path",
    "recomputed_tokens": "recomputed tokens",
}


@dataclass(frozen=True)
class StepSettings:
    """How steps are planned and timed.

    Attributes:
        steps: timed runs of a step.
        segment_tokens: the planner's segment size; None lets it choose. With a limit of memory it plans within it.
        sizes: segment sizes to compare.
        own_tokens: largest segment of sequences one by one, and of the orders of traversal.
        pack_tokens: capacity of a pack of trees, at least the longest sequence.
        memory_gib: limit of memory of dense packed training and of trees.
        longest_warm_up: a step whose first run takes more seconds is timed on that run; on a GPU, shorter steps have
            compiled the kernels by then.
    """

    steps: int
    segment_tokens: int | None
    sizes: Sequence[int]
    own_tokens: int
    pack_tokens: int
    memory_gib: float | None
    longest_warm_up: float = 30.0

    def tree(self, mode: str, longest: int, segment_tokens: int | None = None) -> TreeConfig:
        """The settings of a mode of ``--tree-mode``."""
        size = max(self.pack_tokens, longest) if mode == "packed" else segment_tokens or self.segment_tokens
        return TreeConfig(tree_mode=mode, tree_segment_tokens=size, tree_memory_gib=self.memory_gib)


def plan_of_segments(
    timer: StepTimer, samples: Sequence[TrainingSample], segments: SegmentPlan, kept: np.ndarray
) -> TreeBatch:
    """A step over given segments, of which ``kept`` [segments] keep their activations."""
    batch = timer.plan(samples, TreeConfig(tree_segment_tokens=segments.segment_tokens))
    choice = StepChoice(segments, kept, memory_tokens=0, seconds=0.0)
    return replace(batch, plan=plan_segmented_step(samples, choice, timer.engine.pipeline(segments.segment_tokens)))


def cut_nodes(tree: PrefixTree, first: np.ndarray, segment_tokens: int) -> SegmentPlan:
    """Segments that begin at the stream tokens ``first`` (ascending, from 0) and after every ``segment_tokens``."""
    ends = np.append(first[1:], tree.num_tokens)
    starts = [np.arange(begin, end, segment_tokens) for begin, end in zip(first, ends, strict=True)]
    bounds = np.concatenate([*starts, [tree.num_tokens]]).astype(np.int64)
    return SegmentPlan(tree, bounds, segment_parents(tree, bounds), segment_tokens)


def plan_one_by_one(timer: StepTimer, samples: Sequence[TrainingSample], segment_tokens: int) -> TreeBatch:
    """Every sequence alone, with recomputation: all of its forward runs again before its backward."""
    forest = build_forest_without_sharing(trained_parts(samples)[0])
    segments = cut_nodes(forest, forest.node_start[:-1], segment_tokens)
    return plan_of_segments(timer, samples, segments, np.zeros(segments.num_segments, bool))


def measure(timer: StepTimer, batch: TreeBatch, settings: StepSettings) -> dict[str, Any]:
    """Seconds, counts and loss of a step; where memory does not suffice, the counts and why nothing was timed."""
    try:
        timing = timer.time(batch, settings.steps, settings.longest_warm_up)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        segments = batch.plan.segments
        return {
            "outcome": "out of memory",
            "segments": segments.num_segments,
            "unique_tokens": segments.tree.num_tokens,
        }
    loss = float(timing.result.loss)
    return {"seconds": timing.seconds, "timed_steps": timing.steps, "loss": loss, **timer.row(batch, timing)}


def measure_modes(report: PaperReport, timer: StepTimer, rollouts: RolloutSet, settings: StepSettings) -> None:
    """The table of modes: dense one by one, dense packed, packed trees and trees, by trajectory and by turn."""
    for granularity in ("trajectory", "turn"):
        samples = rollouts.samples(granularity)
        if granularity == "turn" and len(samples) == len(rollouts.trajectories):
            continue  # Every trajectory has one turn.
        names = {"set": rollouts.name, "sample": granularity}

        def of_mode(mode: str, samples: Sequence[TrainingSample] = samples) -> dict[str, Any]:
            batch = timer.plan(samples, settings.tree(mode, rollouts.longest))
            return measure(timer, batch, settings)

        alone = measure(timer, plan_one_by_one(timer, samples, settings.own_tokens), settings)
        dense = of_mode("dense")
        for mode, row in ((ONE_BY_ONE, alone), (DENSE, dense), (PACKED, None), (TREES, None)):
            measured = row or of_mode("packed" if mode == PACKED else "dta")
            rates = {}
            if "seconds" in measured and "seconds" in dense:
                rates = compared(measured, dense)
            if "seconds" in measured and "seconds" in alone:
                rates["over_one_by_one"] = alone["seconds"] / measured["seconds"]
            report.add("modes", {**names, "mode": mode, **measured, **rates})


def measure_sizes(report: PaperReport, timer: StepTimer, rollouts: RolloutSet, settings: StepSettings) -> None:
    """The table of segment sizes: trees, one sample per trajectory."""
    for size in settings.sizes:
        batch = timer.plan(rollouts.trajectories, settings.tree("dta", rollouts.longest, size))
        row = measure(timer, batch, settings)
        names = {"set": rollouts.name, "longest": rollouts.longest, "fill": batch.plan.segments.fill}
        report.add("sizes", {**names, **row})
