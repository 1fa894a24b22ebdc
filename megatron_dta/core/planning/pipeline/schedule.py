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


def children_of(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for segment, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(segment)
    return children
