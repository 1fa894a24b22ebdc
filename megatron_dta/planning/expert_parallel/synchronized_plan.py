"""A step's plan for a rank that must run in step with others: the same ops on every rank, some on empty segments.

The ranks tell each other their segment trees, and every one makes the same plan of all: a list of slots
(``merged_op_list``) or, where that is no slower or there are several stages, a common tree (``merged_segment_tree``)
over which the passes are planned. A slot or a node is one of the rank's segments or an *empty segment*: one of no
tokens behind the end of the stream, with no rows, edges, pairs or losses, whose forward and backward join whatever the
ranks do together in every layer and change nothing. Nothing else in a plan knows of them.

Which segments are recomputed is chosen on the common tree too: a second forward is one that all ranks run. In slots
nearly all segments are, which takes longer for each of them and is done only where fewer empty ones outweigh it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.planning.expert_parallel.merged_op_list import (
    BACKWARD,
    BACKWARD_AGAIN,
    FORWARD,
    MergedOpList,
    build_merged_op_list,
)
from megatron_dta.planning.expert_parallel.merged_segment_tree import (
    MergedSegmentTree,
    SegmentForest,
    SegmentTree,
    build_merged_segment_tree,
)
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    forward_only_pipeline,
)
from megatron_dta.planning.pipeline.simulation import message_order, simulate
from megatron_dta.planning.segments.ancestors import RootPaths
from megatron_dta.planning.segments.recompute import choose_kept_segments
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.passes import PassPlan, PipelineShape, attention_pairs, plan_training_pass
from megatron_dta.planning.step.plan import StepPlan


@dataclass(frozen=True)
class RankPlan:
    """What a rank tells the others of its step.

    Attributes:
        forest: its segments.
        pairs, edges: attention pairs and trained edges of each segment.
        memory_tokens: most tokens that it may have in flight.
    """

    forest: SegmentForest
    pairs: list[int]
    edges: list[int]
    memory_tokens: int

    @classmethod
    def of(cls, step: StepPlan) -> RankPlan:
        """What to tell of ``step``."""
        segments = step.segments
        return cls(
            SegmentForest(segments.segment_parent.tolist(), segments.lengths.tolist()),
            attention_pairs(segments).tolist(),
            np.diff(step.segment_edges).tolist(),
            step.memory_tokens,
        )


def synchronized_plan(
    step: StepPlan, ranks: Sequence[RankPlan], own: int, shape: PipelineShape, least_segments: int = 0
) -> StepPlan:
    """``step`` with empty segments, and passes that are the same on all ``ranks``, of which it is number ``own``.

    Args:
        least_segments: run this many segments even if no rank has any.
    """
    tree = build_merged_segment_tree([rank.forest for rank in ranks], max(rank.memory_tokens for rank in ranks))
    kept = choose_kept_segments(tree, step.activation_tokens, shape.num_stages)
    num_forwards = max([least_segments, *(len(rank.edges) for rank in ranks)])
    if shape.num_stages == 1 and len(ranks) > 1 and tree.num_segments >= max(1, least_segments):
        slots = build_merged_op_list([rank.forest for rank in ranks], max(rank.memory_tokens for rank in ranks))
        if slots.cost < _tree_cost(tree, ranks, kept):
            return _plan_slots(step, ranks, own, shape, slots, num_forwards)
    segment_of = tree.segment_of[own]
    if tree.num_segments < least_segments:
        tree, segment_of = _empty_tree(least_segments, len(ranks)), np.full(least_segments, -1, dtype=np.int32)
        kept = choose_kept_segments(tree, step.activation_tokens, shape.num_stages)
    num_own = step.segments.num_segments
    num_empty = max(int(np.count_nonzero(segment_of < 0)), num_forwards - num_own)
    number = segment_of.astype(np.int64)
    number[number < 0] = num_own + np.arange(np.count_nonzero(number < 0))
    training = plan_training_pass(tree, _largest_counts(tree, ranks), kept, shape)
    return replace(
        _with_empty_segments(step, num_empty),
        training=_renumbered(training, number, num_own + num_empty),
        forward_only=_forward_pass(num_forwards, ranks, shape),
    )


def _tree_cost(tree: MergedSegmentTree, ranks: Sequence[RankPlan], kept: np.ndarray) -> int:
    """What the common tree takes, in the unit of ``MergedOpList.cost``."""
    costs = [np.append(np.asarray(SegmentTree(rank.forest).costs, dtype=np.int64), 0) for rank in ranks]
    largest = np.max([of_rank[nodes] for of_rank, nodes in zip(costs, tree.segment_of, strict=True)], axis=0)
    return int((largest * (FORWARD + np.where(kept, BACKWARD, BACKWARD_AGAIN))).sum())


def _plan_slots(
    step: StepPlan, ranks: Sequence[RankPlan], own: int, shape: PipelineShape, slots: MergedOpList, num_forwards: int
) -> StepPlan:
    """``synchronized_plan`` by slots. Of a rank's empty segments the one begun last ends first."""
    num_own = step.segments.num_segments
    num_empty, waiting, kept = 0, list[int](), list[int]()
    ops = []
    for slot in slots.slots:
        segment = slot.segments[own]
        if segment < 0 and slot.is_backward:
            segment = waiting.pop()
        elif segment < 0:
            segment, num_empty = num_own + num_empty, num_empty + 1
            waiting.append(segment)
        ops.append(PipelineOp(OpKind.BACKWARD if slot.is_backward else OpKind.FORWARD, segment))
        if slot.is_backward and not slot.runs_again:
            kept.append(segment)
    num_empty = max(num_empty, num_forwards - num_own)
    keeps = np.zeros((1, num_own + num_empty), dtype=bool)
    keeps[0, kept] = True
    return replace(
        _with_empty_segments(step, num_empty),
        training=PassPlan(PipelineSchedule(1, 1, [ops]), [], None, keeps),
        forward_only=_forward_pass(num_forwards, ranks, shape),
    )


def _empty_tree(num_segments: int, num_ranks: int) -> MergedSegmentTree:
    return MergedSegmentTree(
        np.full(num_segments, -1, dtype=np.int32),
        np.full((num_ranks, num_segments), -1, dtype=np.int32),
        np.zeros(num_segments, dtype=np.int64),
    )


def _largest_counts(tree: MergedSegmentTree, ranks: Sequence[RankPlan]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, attention pairs and trained edges at the nodes of the common tree, each of the rank that has most."""
    pairs, edges = (
        np.max([_at_nodes(getattr(rank, name), nodes) for rank, nodes in zip(ranks, tree.segment_of, strict=True)], 0)
        for name in ("pairs", "edges")
    )
    return tree.lengths, pairs, edges


def _at_nodes(counts: Sequence[int], segment_of: np.ndarray) -> np.ndarray:
    """Of a rank's segments at the nodes, 0 where it has none."""
    return np.append(np.asarray(counts, dtype=np.int64), 0)[segment_of]


def _forward_pass(num_forwards: int, ranks: Sequence[RankPlan], shape: PipelineShape) -> PassPlan:
    """The i-th segment of all ranks together, empty ones where a rank has no more."""
    schedule = forward_only_pipeline(num_forwards, shape.num_stages, shape.num_chunks)
    if shape.num_stages == 1:
        return PassPlan(schedule, [])
    tokens, pairs, edges = (
        np.max([np.pad(np.asarray(counts, dtype=np.int64), (0, num_forwards - len(counts))) for counts in of_ranks], 0)
        for of_ranks in (
            [rank.forest.lengths for rank in ranks],
            [rank.pairs for rank in ranks],
            [rank.edges for rank in ranks],
        )
    )
    costs = PipelineCosts.of_segments(shape.cost_model, tokens, pairs, edges, shape.layers)
    timeline = simulate(schedule, np.full(num_forwards, -1, dtype=np.int32), costs)
    return PassPlan(schedule, message_order(schedule, timeline), timeline)


def _renumbered(plan: PassPlan, number: np.ndarray, num_segments: int) -> PassPlan:
    """The same pass over segments in place of nodes; segments that are at no node run forward only."""
    ops = [[op._replace(segment=int(number[op.segment])) for op in stage] for stage in plan.schedule.ops]
    messages = [message._replace(segment=int(number[message.segment])) for message in plan.messages]
    kept = np.ones((len(plan.kept), num_segments), dtype=bool)
    kept[:, number] = plan.kept
    return replace(plan, schedule=replace(plan.schedule, ops=ops), messages=messages, kept=kept)


def _with_empty_segments(step: StepPlan, count: int) -> StepPlan:
    """``count`` segments without tokens behind the others, roots with nothing below them."""
    segments, paths = step.segments, step.paths

    def again(array: np.ndarray) -> np.ndarray:
        return np.append(array, np.repeat(array[-1:], count))

    return replace(
        step,
        segments=replace(
            segments,
            segment_start=again(segments.segment_start),
            segment_parent=np.append(segments.segment_parent, np.full(count, -1, dtype=np.int32)),
        ),
        segment_rows=again(step.segment_rows),
        segment_edges=again(step.segment_edges),
        segment_pairs=again(step.segment_pairs),
        loss_batches=step.loss_batches + [[] for _ in range(count)],
        paths=RootPaths(
            paths.run_begin,
            paths.run_length,
            again(paths.segment_runs),
            np.append(paths.lengths, np.zeros(count, dtype=np.int64)),
        ),
    )
