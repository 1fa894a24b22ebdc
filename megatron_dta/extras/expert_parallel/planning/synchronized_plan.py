"""Plans a step for a rank of an expert-parallel group: the same ops on every rank, some of them on empty segments.

The ranks exchange their segment trees, and each of them computes the same plan for all: a merged segment tree
(``merged_segment_tree``), over which the passes are planned as over a single rank's tree.

A node stands for one of the rank's segments or for an *empty segment*. An empty segment has no tokens, rows,
trained edges, (edge, sequence) pairs or losses, and starts at the end of the stream. Its forward and backward take part
in the collective communication of every layer and change nothing. No other part of a plan treats it specially.

The segments to recompute are chosen on the merged tree too, as all ranks must recompute together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import PipelineSchedule, forward_only_pipeline
from megatron_dta.core.planning.pipeline.simulation import message_order, simulate
from megatron_dta.core.planning.segments.plan import RootPaths
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.step.passes import PassPlan, PipelineShape, plan_training_pass
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import (
    MergedSegmentTree,
    build_merged_segment_tree,
)
from megatron_dta.extras.expert_parallel.planning.rank_plan import RankPlan, largest_counts, memory_tokens_of
from megatron_dta.extras.expert_parallel.planning.within_memory import kept_nodes, out_of_memory, stages_within_memory


def synchronize(step: StepPlan, shape: PipelineShape) -> StepPlan:
    """Exchange plans with the ranks of ``shape.group`` and return the plan with the same ops on all of them."""
    return synchronized_plan(step, shape.group.gather(RankPlan.of(step, shape)), shape.group.rank, shape)


def synchronized_plan(step: StepPlan, ranks: Sequence[RankPlan], rank_index: int, shape: PipelineShape) -> StepPlan:
    """Return ``step`` with empty segments added and with passes that have the same ops on all ranks.

    Args:
        step: plan of this rank alone.
        ranks: counts of all ranks of the group.
        rank_index: of this rank in ``ranks``.
        shape: stages of the pipeline, its costs, and the group.
    """
    min_segments = 0 if shape.group is None else shape.group.min_segments
    if len(ranks) == 1 and step.segments.num_segments >= min_segments:
        return step
    forests, times = [rank.forest for rank in ranks], [rank.times for rank in ranks]
    tree = build_merged_segment_tree(forests, memory_tokens_of(ranks), times)
    kept, missing = kept_nodes(tree, step, ranks, shape)
    num_forwards = max([min_segments, *(len(rank.edges) for rank in ranks)])
    if kept is None:
        raise out_of_memory(step, ranks, shape, 0, missing)
    segment_of = tree.segment_of[rank_index]
    if tree.num_segments < min_segments:
        tree, segment_of = _empty_tree(min_segments, len(ranks)), np.full(min_segments, -1, dtype=np.int32)
        kept = choose_kept_segments(tree, step.activation_tokens, shape.num_stages)
    num_own = step.segments.num_segments
    num_empty = max(int(np.count_nonzero(segment_of < 0)), num_forwards - num_own)
    number = segment_of.astype(np.int64)
    number[number < 0] = num_own + np.arange(np.count_nonzero(number < 0))
    if shape.memory is not None and shape.num_stages > 1 and tree.num_segments:
        training = stages_within_memory(tree, step, ranks, shape)
    else:
        training = plan_training_pass(tree, largest_counts(tree, ranks), kept, shape)
    training = replace(training, most_tokens=_most_tokens(training.schedule, tree.lengths))
    return replace(
        _with_empty_segments(step, num_empty),
        training=_renumbered(training, number, num_own + num_empty),
        forward_only=_forward_pass(num_forwards, ranks, shape),
        num_ranks=len(ranks),
    )


def _empty_tree(num_segments: int, num_ranks: int) -> MergedSegmentTree:
    return MergedSegmentTree(
        np.full(num_segments, -1, dtype=np.int32),
        np.full((num_ranks, num_segments), -1, dtype=np.int32),
        np.zeros(num_segments, dtype=np.int64),
    )


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
        return PassPlan(schedule, [], most_tokens=most_tokens)
    costs = PipelineCosts.of_segments(shape.cost_model, tokens, pairs, edges, shape.layers)
    timeline = simulate(schedule, np.full(num_forwards, -1, dtype=np.int32), costs)
    return PassPlan(schedule, message_order(schedule, timeline), timeline, most_tokens=most_tokens)


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
