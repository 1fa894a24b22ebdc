"""Represents and checks pipeline schedules: one list of ops for each stage.

The segments of a tree are the microbatches of the pipeline. With C model chunks, a stage holds C virtual stages,
numbered ``chunk * num_stages + stage`` along the model (Megatron's interleaved order). A segment passes all of them:

    F(segment, v)   needs F(parent, v), whose keys and values it attends to, and F(segment, v - 1)
    B(segment, v)   needs F(segment, v), B(child, v) of all children, which produce gradients of its keys and values,
                    and B(segment, v + 1)

A loss needs the logprobs of a whole sequence. All sequences through a segment end in it or below it, so their losses
are known on the last virtual stage once B of all children has run.

On every virtual stage, forwards run in preorder and backwards in the same postorder. Only the interleaving of the two
differs between stages; ``planning.pipeline.planner`` chooses it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_dta.core.planning.segments.plan import OpKind, tree_depth

F, B = OpKind.FORWARD, OpKind.BACKWARD


class PipelineOp(NamedTuple):
    """One op of a stage; ``chunk`` is the index of the stage's model chunk."""

    kind: OpKind
    segment: int
    chunk: int = 0


@dataclass(frozen=True)
class PipelineSchedule:
    """The ops of every stage, in order.

    Attributes:
        num_stages: pipeline ranks.
        num_model_chunks: model chunks (virtual stages) of each rank.
        ops: one list for each rank.
    """

    num_stages: int
    num_model_chunks: int
    ops: list[list[PipelineOp]]

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_model_chunks

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Index of a model chunk of a stage along the model, from 0."""
        return chunk * self.num_stages + stage

    def digest(self) -> str:
        """SHA-256 of the schedule in hexadecimal: equal digests mean equal op lists on all stages."""
        lines = [f"{self.num_stages} {self.num_model_chunks}"]
        lines.extend(" ".join(f"{kind.value}{segment}.{chunk}" for kind, segment, chunk in ops) for ops in self.ops)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def forward_only_pipeline(num_segments: int, num_stages: int, num_model_chunks: int = 1) -> PipelineSchedule:
    """Schedule every forward once, for logprobs without gradients.

    With several model chunks, a rank runs a group of ``num_stages`` segments through one chunk before the next chunk,
    so that the results of the group arrive in time.
    """
    ops = [
        PipelineOp(F, segment, chunk)
        for first in range(0, num_segments, num_stages)
        for chunk in range(num_model_chunks)
        for segment in range(first, min(first + num_stages, num_segments))
    ]
    return PipelineSchedule(num_stages, num_model_chunks, [list(ops) for _ in range(num_stages)])


def next_op_is_backward(schedule: PipelineSchedule, num_segments: int) -> np.ndarray:
    """Whether the next op of the rank is the backward of a forward, bool [virtual stages, num_segments]."""
    is_next = np.zeros((schedule.num_virtual_stages, num_segments), dtype=bool)
    for stage, ops in enumerate(schedule.ops):
        for op, then in pairwise(ops):
            if op.kind is F and then == (B, op.segment, op.chunk):
                is_next[schedule.virtual_stage(stage, op.chunk), op.segment] = True
    return is_next


def backward_order(segment_parent: np.ndarray | Sequence[int]) -> list[int]:
    """The segments in postorder: each backward follows those of all children."""
    order: list[int] = []
    path: list[int] = []
    for segment, parent in enumerate(np.asarray(segment_parent).tolist()):
        while path and path[-1] != parent:
            order.append(path.pop())
        if parent >= 0 and not path:
            raise ValueError(f"segment {segment} with parent {parent}: segments must be in preorder")
        path.append(segment)
    order.extend(reversed(path))
    return order


def tree_1f1b(segment_parent: np.ndarray | Sequence[int], num_stages: int) -> PipelineSchedule:
    """Build the static schedule: min(N, D + P - 1 - s) forwards on stage s, then B and F in turn, then the other B.

    With N segments of equal times f and b in a tree of depth D, on P stages, the makespan is exactly
    (N + P - 1)(f + b), that of plain 1F1B over N independent microbatches, and stage s has exactly
    min(N, D + P - 1 - s) segments in flight.
    """
    backwards = backward_order(segment_parent)
    num_segments, depth = len(backwards), tree_depth(np.asarray(segment_parent).tolist())
    ops: list[list[PipelineOp]] = []
    for stage in range(num_stages):
        warm_up = min(num_segments, depth + num_stages - 1 - stage)
        stage_ops = [PipelineOp(F, segment) for segment in range(warm_up)]
        for done, segment in enumerate(backwards):
            stage_ops.append(PipelineOp(B, segment))
            if warm_up + done < num_segments:
                stage_ops.append(PipelineOp(F, warm_up + done))
        ops.append(stage_ops)
    return PipelineSchedule(num_stages, 1, ops)


def peak_in_flight(schedule: PipelineSchedule, lengths: np.ndarray | Sequence[int]) -> list[float]:
    """Peak of the tokens in flight on each stage, from a segment's forward to its backward.

    Tokens are summed over model chunks and divided by their number, as each chunk holds that share of the stage's
    layers. Figures with and without interleaving are thus comparable. With unit lengths, the peak counts segments.
    """
    tokens = np.asarray(lengths).tolist()
    peaks: list[float] = []
    for ops in schedule.ops:
        alive = peak = 0
        for kind, segment, _ in ops:
            if kind is F:
                alive += tokens[segment]
                peak = max(peak, alive)
            else:
                alive -= tokens[segment]
        peaks.append(peak if schedule.num_model_chunks == 1 else peak / schedule.num_model_chunks)
    return peaks


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


def children_of(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for segment, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(segment)
    return children


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
