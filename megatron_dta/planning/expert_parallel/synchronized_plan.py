"""Plans a step for a rank of an expert-parallel group: the same ops on every rank, some of them on empty segments.

The ranks exchange their segment trees, and each of them computes the same plan for all. There are two forms:

- a merged segment tree (``merged_segment_tree``), over which the passes are planned as over a single rank's tree;
- a list of ops (``merged_op_list``), for a single pipeline stage, if it is faster than the tree.

A node or op stands for one of the rank's segments or for an *empty segment*. An empty segment has no tokens, rows,
trained edges, (edge, sequence) pairs or losses, and starts at the end of the stream. Its forward and backward take part
in the collective communication of every layer and change nothing. No other part of a plan treats it specially.

On a single stage, pairs of ops may run in turns (``overlap``).

The segments to recompute are chosen on the merged tree too, as all ranks must recompute together. A list of ops
recomputes nearly all segments, so it is used only where it saves more empty segments than that costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.planning.expert_parallel.merged_op_list import MergedOpList, cheaper_op_list
from megatron_dta.planning.expert_parallel.merged_segment_tree import (
    MergedSegmentTree,
    SegmentForest,
    build_merged_segment_tree,
)
from megatron_dta.planning.expert_parallel.overlap import with_pairs
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    forward_only_pipeline,
)
from megatron_dta.planning.pipeline.simulation import message_order, simulate
from megatron_dta.planning.segments.ancestors import RootPaths
from megatron_dta.planning.segments.recompute import (
    choose_kept_by_memory,
    choose_kept_segments,
    least_activation_tokens,
)
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.choice import shares_and_limits
from megatron_dta.planning.step.evaluate import out_of_memory_error
from megatron_dta.planning.step.passes import (
    PassPlan,
    PipelineShape,
    attention_pairs,
    plan_training_pass,
    stage_peak_bytes,
)
from megatron_dta.planning.step.plan import StepPlan


@dataclass(frozen=True)
class RankPlan:
    """The counts of a rank's step that it sends to the other ranks.

    Attributes:
        forest: segments of the rank.
        pairs, edges: attention pairs and trained edges of each segment.
        memory_tokens: limit on the tokens in flight.
        available_bytes: what a step's tensors may take on each pipeline rank; infinite without a limit.
    """

    forest: SegmentForest
    pairs: list[int]
    edges: list[int]
    memory_tokens: int
    available_bytes: tuple[float, ...] = (math.inf,)

    @classmethod
    def of(cls, step: StepPlan, shape: PipelineShape | None = None) -> RankPlan:
        """Extract the counts from ``step``, which is planned for ``shape``."""
        memory = None if shape is None else shape.memory
        segments = step.segments
        return cls(
            SegmentForest(segments.segment_parent.tolist(), segments.lengths.tolist()),
            attention_pairs(segments).tolist(),
            np.diff(step.segment_edges).tolist(),
            step.memory_tokens,
            (math.inf,) if memory is None else tuple(memory.available(stage) for stage in range(shape.num_stages)),
        )


def synchronize(step: StepPlan, shape: PipelineShape) -> StepPlan:
    """Exchange plans with the ranks of ``shape.group`` and return the plan with the same ops on all of them."""
    return synchronized_plan(step, shape.group.gather(RankPlan.of(step, shape)), shape.group.rank, shape)


def synchronized_plan(step: StepPlan, ranks: Sequence[RankPlan], own: int, shape: PipelineShape) -> StepPlan:
    """Return ``step`` with empty segments added and with passes that have the same ops on all ranks.

    Args:
        step: plan of this rank alone.
        ranks: counts of all ranks of the group.
        own: index of this rank in ``ranks``.
        shape: stages of the pipeline, its costs, and the group.
    """
    min_segments = 0 if shape.group is None else shape.group.min_segments
    # A pipeline's schedule has its pairs already.
    overlaps = shape.group is not None and shape.group.overlaps and shape.num_stages == 1
    if len(ranks) == 1 and step.segments.num_segments >= min_segments:
        return _with_own_pairs(step, ranks, shape) if overlaps else step
    tree = build_merged_segment_tree([rank.forest for rank in ranks], _memory_tokens(ranks))
    kept = _kept(tree, step, ranks, shape)
    num_forwards = max([min_segments, *(len(rank.edges) for rank in ranks)])
    if shape.num_stages == 1 and tree.num_segments >= min_segments:
        merged = cheaper_op_list(tree, [rank.forest for rank in ranks], kept, _memory_tokens(ranks))
        if merged is not None:
            return _plan_op_list(step, ranks, own, shape, merged)
    segment_of = tree.segment_of[own]
    if tree.num_segments < min_segments:
        tree, segment_of = _empty_tree(min_segments, len(ranks)), np.full(min_segments, -1, dtype=np.int32)
        kept = choose_kept_segments(tree, step.activation_tokens, shape.num_stages)
    num_own = step.segments.num_segments
    num_empty = max(int(np.count_nonzero(segment_of < 0)), num_forwards - num_own)
    number = segment_of.astype(np.int64)
    number[number < 0] = num_own + np.arange(np.count_nonzero(number < 0))
    if shape.memory is not None and shape.num_stages > 1 and tree.num_segments:
        training = _stages_within_memory(tree, step, ranks, shape)
    else:
        training = plan_training_pass(tree, _largest_counts(tree, ranks), kept, shape)
    training = replace(training, most_tokens=_most_tokens(training.schedule, tree.lengths))
    if overlaps:
        nodes = [tree.segment_of[:, op.segment].tolist() for op in training.schedule.ops[0]]
        training = _paired(training, nodes, ranks, shape)
    return replace(
        _with_empty_segments(step, num_empty),
        training=_renumbered(training, number, num_own + num_empty),
        forward_only=_forward_pass(num_forwards, ranks, shape),
        num_ranks=len(ranks),
    )


def _kept(tree: MergedSegmentTree, step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape) -> np.ndarray:
    """The nodes of the merged tree that keep their activations on all ranks, bool [C].

    With a limit in bytes, each rank has planned its own segments within it. A node counts with the tokens of its
    longest segment, so no rank takes more than is counted here.
    """
    if shape.memory is None or shape.num_stages > 1:
        return choose_kept_segments(tree, step.activation_tokens, shape.num_stages)
    layers, each = float(sum(shape.layers)), shape.memory.bytes
    slots, unit = each.fixed + tree.peak_in_flight_tokens * each.slot(layers), each.kept(layers)
    needed = np.ceil(tree.lengths + each.work(tree.lengths, tree.in_flight_tokens) / unit).astype(np.int64)
    left = int((_available_bytes(ranks, 0) - slots) // unit)
    if least_activation_tokens(needed) > left:
        # Sums of the ranks' longest segments may exceed every rank's own; leaves are free.
        return choose_kept_segments(tree, 0)
    return choose_kept_by_memory(tree, left, needed, tree.lengths.astype(np.float64))


def _stages_within_memory(
    tree: MergedSegmentTree, step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape
) -> PassPlan:
    """The first plan of a pipeline's training pass that fits on all stages of all ranks (``step.choice``).

    A node counts with the tokens of its longest segment, so no rank takes more than is counted here.

    Raises:
        InputError: no plan fits. The ranks raise it together.
    """
    path, missing, stage = tree.peak_in_flight_tokens, math.inf, 0
    for share, limit in shares_and_limits(path, shape):
        kept = choose_kept_segments(tree, None if share == 1 else int(share * path), shape.num_stages)
        limited = replace(shape, max_in_flight_tokens=limit)
        found = plan_training_pass(tree, _largest_counts(tree, ranks), kept, limited)
        over = [
            stage_peak_bytes(tree, found, shape, each) - _available_bytes(ranks, each)
            for each in range(shape.num_stages)
        ]
        if max(over) <= 0:
            return found
        if max(over) < missing:
            missing, stage = max(over), int(np.argmax(over))
    segments = step.segments
    raise out_of_memory_error(
        shape.memory, stage, missing, segments.tree, segments.segment_tokens, _memory_tokens(ranks)
    )


def _with_own_pairs(step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape) -> StepPlan:
    """``step`` with pairs, for a rank that shares experts with no other data-parallel rank."""

    def paired(plan: PassPlan) -> PassPlan:
        plan = replace(plan, most_tokens=_most_tokens(plan.schedule, step.segments.lengths))
        return _paired(plan, [[op.segment] for op in plan.schedule.ops[0]], ranks, shape)

    return replace(step, training=paired(step.training), forward_only=paired(step.forward_only))


def _plan_op_list(
    step: StepPlan, ranks: Sequence[RankPlan], own: int, shape: PipelineShape, merged: MergedOpList
) -> StepPlan:
    """``synchronized_plan`` with a list of ops. Of a rank's empty segments, the last one begun ends first."""
    num_own, num_forwards = step.segments.num_segments, max(len(rank.edges) for rank in ranks)
    num_empty, open_empty, kept = 0, list[int](), list[int]()
    ops, most_tokens = [], []
    for op in merged.ops:
        segment = op.segments[own]
        lengths = [rank.forest.lengths[each] for rank, each in zip(ranks, op.segments, strict=True) if each >= 0]
        most_tokens.append(max(lengths, default=0))
        if segment < 0 and op.is_backward:
            segment = open_empty.pop()
        elif segment < 0:
            segment, num_empty = num_own + num_empty, num_empty + 1
            open_empty.append(segment)
        ops.append(PipelineOp(OpKind.BACKWARD if op.is_backward else OpKind.FORWARD, segment))
        if op.is_backward and not op.recomputes:
            kept.append(segment)
    num_empty = max(num_empty, num_forwards - num_own)
    kept_mask = np.zeros((1, num_own + num_empty), dtype=bool)
    kept_mask[0, kept] = True
    training = PassPlan(PipelineSchedule(1, 1, [ops]), [], None, kept_mask, [most_tokens])
    if shape.group is not None and shape.group.overlaps:
        training = _paired(training, [op.segments for op in merged.ops], ranks, shape)
    return replace(
        _with_empty_segments(step, num_empty),
        training=training,
        forward_only=_forward_pass(num_forwards, ranks, shape),
        num_ranks=len(ranks),
    )


def _empty_tree(num_segments: int, num_ranks: int) -> MergedSegmentTree:
    return MergedSegmentTree(
        np.full(num_segments, -1, dtype=np.int32),
        np.full((num_ranks, num_segments), -1, dtype=np.int32),
        np.zeros(num_segments, dtype=np.int64),
    )


def _largest_counts(tree: MergedSegmentTree, ranks: Sequence[RankPlan]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest numbers of tokens, attention pairs and trained edges of any rank at each node of the merged tree."""
    return tree.lengths, tree.largest([rank.pairs for rank in ranks]), tree.largest([rank.edges for rank in ranks])


def _forward_pass(num_forwards: int, ranks: Sequence[RankPlan], shape: PipelineShape) -> PassPlan:
    """Forward pass over the i-th segments of all ranks, with empty segments on ranks that have fewer."""
    schedule = forward_only_pipeline(num_forwards, shape.num_stages, shape.num_model_chunks)
    tokens, pairs, edges = (
        np.max([np.pad(np.asarray(counts, dtype=np.int64), (0, num_forwards - len(counts))) for counts in of_ranks], 0)
        for of_ranks in (
            [rank.forest.lengths for rank in ranks],
            [rank.pairs for rank in ranks],
            [rank.edges for rank in ranks],
        )
    )
    most_tokens = _most_tokens(schedule, tokens)
    if shape.num_stages == 1:
        plan = PassPlan(schedule, [], most_tokens=most_tokens)
        if shape.group is None or not shape.group.overlaps:
            return plan
        each = [[i if i < len(rank.edges) else -1 for rank in ranks] for i in range(num_forwards)]
        return _paired(plan, each, ranks, shape)
    costs = PipelineCosts.of_segments(shape.cost_model, tokens, pairs, edges, shape.layers)
    timeline = simulate(schedule, np.full(num_forwards, -1, dtype=np.int32), costs)
    return PassPlan(schedule, message_order(schedule, timeline), timeline, most_tokens=most_tokens)


def _paired(
    plan: PassPlan, segments: Sequence[Sequence[int]], ranks: Sequence[RankPlan], shape: PipelineShape
) -> PassPlan:
    """``plan`` with pairs of ops, of which all ranks' ``segments`` are given."""
    limit = _memory_tokens(ranks)
    if shape.memory is not None and plan.kept is not None:
        if not plan.kept.all():
            # Another order could hold more of the kept activations at once.
            return plan
        layers, each = float(sum(shape.layers)), shape.memory.bytes
        longest = max(plan.most_tokens[0], default=0)
        # Two segments are at work in a pair.
        left = _available_bytes(ranks, 0) - each.fixed - 2 * float(each.work(longest, limit))
        limit = min(limit, int(left // (each.kept(layers) + each.slot(layers))))
    forests = [rank.forest for rank in ranks]
    parents, lengths = [forest.segment_parent for forest in forests], [forest.lengths for forest in forests]
    return with_pairs(plan, segments, parents, lengths, limit)


def _available_bytes(ranks: Sequence[RankPlan], stage: int) -> float:
    return min(rank.available_bytes[stage] for rank in ranks)


def _memory_tokens(ranks: Sequence[RankPlan]) -> int:
    return max(rank.memory_tokens for rank in ranks)


def _most_tokens(schedule: PipelineSchedule, lengths: np.ndarray) -> list[list[int]]:
    """Tokens of each op, for segments or nodes of these ``lengths``."""
    return [[int(lengths[op.segment]) for op in ops] for ops in schedule.ops]


def _renumbered(plan: PassPlan, number: np.ndarray, num_segments: int) -> PassPlan:
    """Replace nodes by segments in a pass. Segments that are at no node run in the forward-only pass alone."""
    ops = [[op._replace(segment=int(number[op.segment])) for op in stage] for stage in plan.schedule.ops]
    messages = [message._replace(segment=int(number[message.segment])) for message in plan.messages]
    kept = np.ones((len(plan.kept), num_segments), dtype=bool)
    kept[:, number] = plan.kept
    return replace(plan, schedule=replace(plan.schedule, ops=ops), messages=messages, kept=kept)


def _with_empty_segments(step: StepPlan, count: int) -> StepPlan:
    """Append ``count`` segments without tokens, as roots without children."""
    segments, paths = step.segments, step.paths

    def repeat_last(array: np.ndarray) -> np.ndarray:
        return np.append(array, np.repeat(array[-1:], count))

    return replace(
        step,
        segments=replace(
            segments,
            segment_start=repeat_last(segments.segment_start),
            segment_parent=np.append(segments.segment_parent, np.full(count, -1, dtype=np.int32)),
        ),
        segment_rows=repeat_last(step.segment_rows),
        segment_edges=repeat_last(step.segment_edges),
        segment_pairs=repeat_last(step.segment_pairs),
        loss_batches=step.loss_batches + [[] for _ in range(count)],
        paths=RootPaths(
            paths.run_begin,
            paths.run_length,
            repeat_last(paths.segment_runs),
            np.append(paths.lengths, np.zeros(count, dtype=np.int64)),
        ),
    )
