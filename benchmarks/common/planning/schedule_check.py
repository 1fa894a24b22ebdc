"""Checks a pipeline's schedule: every op once, in the fixed orders, and no stage waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.pipeline.schedule import PipelineOp, PipelineSchedule, children_of
from megatron_dta.core.planning.segments.plan import OpKind

F, B = OpKind.FORWARD, OpKind.BACKWARD


def check_schedule(schedule: PipelineSchedule, segment_parent: np.ndarray | Sequence[int]) -> None:
    """Check that the schedule runs every op once, in the fixed orders, and without deadlock.

    Raises ValueError naming the op, its segment and its stage if an op is missing, duplicated, out of order, of an
    unknown chunk or segment, or waits forever.
    """
    parents = np.asarray(segment_parent).tolist()
    if len(schedule.ops) != schedule.num_stages:
        raise ValueError(f"the schedule has op lists for {len(schedule.ops)} of {schedule.num_stages} stages")
    kinds = {op.kind for ops in schedule.ops for op in ops}
    _check_complete(schedule, len(parents), kinds)
    _check_orders(schedule, len(parents))
    _check_progress(schedule, parents)


def _name(op: PipelineOp, stage: int, schedule: PipelineSchedule) -> str:
    chunk = f", chunk {op.chunk}" if schedule.num_model_chunks > 1 else ""
    return f"{op.kind.value} of segment {op.segment} on stage {stage}{chunk}"


def _check_complete(schedule: PipelineSchedule, num_segments: int, kinds: set[OpKind]) -> None:
    for stage, ops in enumerate(schedule.ops):
        seen: set[PipelineOp] = set()
        for op in ops:
            if not (0 <= op.segment < num_segments and 0 <= op.chunk < schedule.num_model_chunks):
                raise ValueError(f"{_name(op, stage, schedule)}: there is no such segment or chunk")
            if op in seen:
                raise ValueError(f"{_name(op, stage, schedule)} is there twice")
            seen.add(op)
        if len(seen) == num_segments * schedule.num_model_chunks * len(kinds):
            continue
        for chunk in range(schedule.num_model_chunks):
            for segment in range(num_segments):
                for kind in (kind for kind in OpKind if kind in kinds):
                    op = PipelineOp(kind, segment, chunk)
                    if op not in seen:
                        raise ValueError(f"{_name(op, stage, schedule)} is missing")


def _check_orders(schedule: PipelineSchedule, num_segments: int) -> None:
    """Check that forwards are in preorder, and the backwards of all virtual stages in the same order."""
    first: dict[OpKind, list[int]] = {F: list(range(num_segments))}
    for stage, ops in enumerate(schedule.ops):
        for chunk in range(schedule.num_model_chunks):
            for kind in OpKind:
                order = [op.segment for op in ops if op.chunk == chunk and op.kind is kind]
                expected = first.setdefault(kind, order)
                for segment, other in zip(order, expected, strict=False):
                    if segment != other:
                        op = PipelineOp(kind, segment, chunk)
                        raise ValueError(
                            f"{_name(op, stage, schedule)} is where segment {other} is due: forwards run in "
                            "preorder, and backwards in one order on all stages"
                        )


def needs_of(
    op: PipelineOp, stage: int, schedule: PipelineSchedule, parents: Sequence[int], children: Sequence[Sequence[int]]
) -> list[tuple[int, PipelineOp]]:
    """Ops that must run before this one, each with its stage."""
    kind, segment, chunk = op
    if kind is F:
        needs = [(stage, PipelineOp(F, parents[segment], chunk))] if parents[segment] >= 0 else []
        step, ends = -1, 0
    else:
        needs = [(stage, PipelineOp(F, segment, chunk))]
        needs.extend((stage, PipelineOp(kind, child, chunk)) for child in children[segment])
        step, ends = 1, schedule.num_virtual_stages - 1
    virtual_stage = schedule.virtual_stage(stage, chunk)
    if virtual_stage != ends:
        other_chunk, other_stage = divmod(virtual_stage + step, schedule.num_stages)
        needs.append((other_stage, PipelineOp(kind, segment, other_chunk)))
    return needs


def _check_progress(schedule: PipelineSchedule, parents: list[int]) -> None:
    """Run all lists together; each stage advances until an op needs one that has not run."""
    children = children_of(parents)
    done: list[set[PipelineOp]] = [set() for _ in schedule.ops]
    at = [0] * schedule.num_stages
    waiting: dict[tuple[int, PipelineOp], list[int]] = {}
    runnable = deque(range(schedule.num_stages))
    stuck: dict[int, tuple[PipelineOp, int, PipelineOp]] = {}
    while runnable:
        stage = runnable.popleft()
        stuck.pop(stage, None)
        ops = schedule.ops[stage]
        while at[stage] < len(ops):
            op = ops[at[stage]]
            missing = [
                need for need in needs_of(op, stage, schedule, parents, children) if need[1] not in done[need[0]]
            ]
            if missing:
                stuck[stage] = (op, *missing[0])
                waiting.setdefault(missing[0], []).append(stage)
                break
            done[stage].add(op)
            at[stage] += 1
            runnable.extend(waiting.pop((stage, op), ()))
    if stuck:
        stage = min(stuck)
        op, other_stage, other = stuck[stage]
        others = "" if len(stuck) == 1 else f"; {len(stuck)} stages wait forever"
        raise ValueError(
            f"{_name(op, stage, schedule)} waits for {_name(other, other_stage, schedule)}, which never runs{others}"
        )
