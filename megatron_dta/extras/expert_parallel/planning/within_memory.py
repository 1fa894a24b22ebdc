"""Keeps the plan of ranks that share experts within a limit of bytes.

Each rank has planned its own segments within its limit. Together they run a merged segment tree, with more segments in
flight or longer ones at the same time. A node counts with the tokens of its longest segment, because a rank's experts
get rows of all ranks, and with the most states of any rank. Slots, of keys and values and of open forks, are those of
the rank with most. So no rank takes more than is counted here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.choice import shares_and_limits
from megatron_dta.core.planning.segments.plan import depth_first_schedule
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.segments.runs import ForkCounts
from megatron_dta.core.planning.segments.slots import allocate_slots
from megatron_dta.core.planning.step.evaluate import StageTensors, keep_within, out_of_memory_error
from megatron_dta.core.planning.step.passes import (
    PassPlan,
    PipelineShape,
    plan_training_pass,
    stage_peak_bytes,
    states_of_ops,
)
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import MergedSegmentTree, largest_of_ranks
from megatron_dta.extras.expert_parallel.planning.rank_plan import (
    RankPlan,
    available_bytes,
    largest_counts,
    memory_tokens_of,
)


def kept_nodes(
    tree: MergedSegmentTree, step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape
) -> tuple[np.ndarray | None, float]:
    """The nodes of the merged tree that keep their activations on all ranks, bool [C] (None if not even those of one
    path fit), and the missing bytes.
    """
    if shape.memory is None or shape.num_stages > 1:
        return choose_kept_segments(tree, step.activation_tokens, shape.num_stages), 0.0
    stage, ops = shape.memory.stages[0], depth_first_schedule(tree)
    lengths = [
        largest_of_ranks([rank.forest.lengths], [nodes]) for rank, nodes in zip(ranks, tree.segment_of, strict=True)
    ]
    num_slots = max(allocate_slots(tree, ops, of_rank)[1] for of_rank in lengths)
    states = states_of_ops(tree, ops, stage.states, _forks(tree, ranks))
    tensors = StageTensors(stage, shape.layers[0], num_slots, states)
    return keep_within(tree, tensors, available_bytes(ranks, 0), tree.lengths.astype(np.float64))


def _forks(tree: MergedSegmentTree, ranks: Sequence[RankPlan]) -> list[ForkCounts] | None:
    """The numbers of states of each rank at the nodes of the merged tree, if their bytes are limited."""
    if any(rank.forks is None for rank in ranks):
        return None
    return [rank.forks.at(nodes) for rank, nodes in zip(ranks, tree.segment_of, strict=True)]


def out_of_memory(
    step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape, stage: int, missing: float
) -> InputError:
    segments = step.segments
    return out_of_memory_error(
        shape.memory, stage, missing, segments.tree, segments.segment_tokens, memory_tokens_of(ranks)
    )


def stages_within_memory(
    tree: MergedSegmentTree, step: StepPlan, ranks: Sequence[RankPlan], shape: PipelineShape
) -> PassPlan:
    """The first plan of a pipeline's training pass that fits on all stages of all ranks (``pipeline.choice``).

    A node counts with the tokens of its longest segment, so no rank takes more than is counted here.

    Raises:
        InputError: no plan fits. The ranks raise it together.
    """
    path, missing, stage, forks = tree.peak_in_flight_tokens, math.inf, 0, _forks(tree, ranks)
    for share, limit in shares_and_limits(path, shape):
        kept = choose_kept_segments(tree, None if share == 1 else int(share * path), shape.num_stages)
        limited = replace(shape, max_in_flight_tokens=limit)
        plan = plan_training_pass(tree, largest_counts(tree, ranks), kept, limited)
        over = [
            stage_peak_bytes(tree, plan, shape, of_stage, forks) - available_bytes(ranks, of_stage)
            for of_stage in range(shape.num_stages)
        ]
        if max(over) <= 0:
            return plan
        if max(over) < missing:
            missing, stage = max(over), int(np.argmax(over))
    raise out_of_memory(step, ranks, shape, stage, missing)
