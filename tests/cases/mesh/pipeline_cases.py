"""Random segment trees and costs, and slow twins of the pipeline's simulation and search."""

import itertools

import numpy as np

from common.planning.schedule_check import needs_of
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import PipelineOp, PipelineSchedule, backward_order, children_of
from megatron_dta.core.planning.segments.plan import OpKind, SegmentPlan
from megatron_dta.core.tree import build_prefix_tree

F, B = OpKind.FORWARD, OpKind.BACKWARD
SHAPES = ("mixed", "chain", "roots", "star", "deep")


def random_tree(rng: np.random.Generator, num_segments: int, shape: str = "mixed") -> np.ndarray:
    """Parents of a segment tree in preorder."""
    if shape == "chain":
        return np.arange(-1, num_segments - 1)
    if shape == "roots":
        return np.full(num_segments, -1)
    if shape == "star":
        return np.minimum(np.arange(-1, num_segments - 1), 0)
    leave = 0.1 if shape == "deep" else rng.random()
    parents: list[int] = []
    path: list[int] = []
    for segment in range(num_segments):
        if path and rng.random() < leave:
            del path[rng.integers(0, len(path) + 1) :]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    return np.asarray(parents, dtype=np.int64)


def random_segments(rng: np.random.Generator, count: int, longest: int = 9) -> SegmentPlan:
    """Any segment tree, without a forest: schedules, slots and what is kept ask for lengths and parents only."""
    starts = np.concatenate([[0], np.cumsum(rng.integers(1, longest + 1, count))]).astype(np.int64)
    return SegmentPlan(build_prefix_tree([]), starts, random_tree(rng, count).astype(np.int32), longest)


def random_costs(rng: np.random.Generator, num_virtual_stages: int, lengths: np.ndarray) -> PipelineCosts:
    """Times near the lengths, or of no order at all; sometimes some are 0."""
    shape = num_virtual_stages, len(lengths)
    forward = np.tile(lengths / 20, (num_virtual_stages, 1)) if rng.random() < 0.5 else rng.uniform(0.1, 1, shape)
    backward = forward * rng.uniform(0.5, 3, shape)
    if rng.random() < 0.2:
        forward = forward * (rng.random(shape) < 0.8)
    return PipelineCosts(forward, backward)


def uniform_costs(
    num_segments: int, num_virtual_stages: int, forward: float = 1.0, backward: float = 2.0
) -> PipelineCosts:
    """Equal times for every segment on every virtual stage."""
    shape = num_virtual_stages, num_segments
    return PipelineCosts(np.full(shape, float(forward)), np.full(shape, float(backward)))


def slow_times(
    schedule: PipelineSchedule, parents: np.ndarray, costs: PipelineCosts, send_seconds: float
) -> dict[tuple[int, PipelineOp], tuple[float, float]]:
    """Start and end of each op by asking for all that it needs, again and again until nothing moves.

    An op that starts before it could is moved; times only grow, so the fixed point is the earliest schedule.
    """
    tables = {"F": costs.forward, "B": costs.backward}
    children = children_of(parents.tolist())
    times = {(stage, op): (0.0, 0.0) for stage, ops in enumerate(schedule.ops) for op in ops}
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(schedule.ops):
            for index, op in enumerate(ops):
                start = times[stage, ops[index - 1]][1] if index else 0.0
                for need in needs_of(op, stage, schedule, parents.tolist(), children):
                    start = max(start, times[need][1] + (send_seconds if need[0] != stage else 0.0))
                end = start + tables[op.kind.value][schedule.virtual_stage(stage, op.chunk), op.segment]
                if times[stage, op] != (start, end):
                    times[stage, op], moved = (start, end), True
    return times


def interleavings(parents: list[int], lengths: list[int], limit: int) -> list[list[PipelineOp]]:
    """All ways to interleave forwards and backwards on one rank within the limit."""
    backwards, orders = backward_order(parents), []

    def extend(forwards: int, done: int, alive: int, ops: list[PipelineOp]) -> None:
        if done == len(parents):
            orders.append(ops)
            return
        if forwards < len(parents) and alive + lengths[forwards] <= limit:
            extend(forwards + 1, done, alive + lengths[forwards], [*ops, PipelineOp(F, forwards)])
        if backwards[done] < forwards:
            extend(forwards, done + 1, alive - lengths[backwards[done]], [*ops, PipelineOp(B, backwards[done])])

    extend(0, 0, 0, [])
    return orders


def all_schedules(parents: list[int], lengths: list[int], num_stages: int, limit: int) -> list[PipelineSchedule]:
    """Every schedule in the fixed orders, those that come to a halt too."""
    ranks = itertools.product(interleavings(parents, lengths, limit), repeat=num_stages)
    return [PipelineSchedule(num_stages, 1, list(ops)) for ops in ranks]
