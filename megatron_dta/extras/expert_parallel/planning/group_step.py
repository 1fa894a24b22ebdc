"""Predicts the step of ranks that share experts from the sequences of each, so that divisions can be compared.

Ranks that share experts wait for each other in every op, so their step takes as long as their ops together, not as long
as the busiest rank. Trees of the same shape wait least. The ops are those that ``synchronized_plan`` makes of the same
segments, without a limit in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import segment_counts
from megatron_dta.core.planning.plan_step import plan_forest
from megatron_dta.core.planning.segments.plan import SegmentPlan, default_in_flight
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import (
    MergedSegmentTree,
    build_merged_segment_tree,
)

Counts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens, attention pairs and trained edges of segments or nodes."""


@dataclass(frozen=True)
class GroupPlan:
    """The segments of the ranks of one group, and the tree that they run together.

    Attributes:
        replicas: the segments of each rank, with their counts.
        tree, largest: nodes of the merged segment tree, and the counts of the rank with most at each.
        memory_tokens: limit on the tokens in flight, the same on all ranks.
    """

    replicas: list[tuple[SegmentPlan, Counts]]
    tree: MergedSegmentTree
    largest: Counts
    memory_tokens: int


@dataclass(frozen=True)
class GroupStep:
    """The sequences of a step for groups of ranks that share experts.

    Attributes:
        sequences, masks: tokens and loss masks of each, up to its last trained token.
        group_size: ranks of a group; they follow one another.
        budget: limits of each rank; the size of segments must be given.
        shape: stages and costs of each rank.
        tree_mode: see ``plan_forest``.
    """

    sequences: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    group_size: int
    budget: StepBudget
    shape: PipelineShape
    tree_mode: str = "dta"

    def slowest(self, rank_of_sequence: np.ndarray) -> float:
        """Predicted seconds of the slowest group; infinite if its segments do not fit the budget."""
        groups = np.unique(rank_of_sequence // self.group_size)
        try:
            return max((self.seconds(self.plan(rank_of_sequence, group)) for group in groups.tolist()), default=0.0)
        except InputError:
            return np.inf

    def plan(self, rank_of_sequence: np.ndarray, group: int) -> GroupPlan:
        """The segments of the ranks of a group."""
        ranks = range(group * self.group_size, (group + 1) * self.group_size)
        parts = [np.flatnonzero(rank_of_sequence == rank).tolist() for rank in ranks]
        budget = self.budget
        if budget.memory_tokens is None:
            # As training agrees (``plan_step``).
            longest = max((len(self.sequences[i]) for part in parts for i in part), default=0)
            budget = replace(budget, memory_tokens=default_in_flight(longest, budget.segment_tokens))
        replicas = [replace(self, budget=budget).replica(part) for part in parts]
        times = [self.shape.cost_model.nanoseconds(*counts) for _, counts in replicas]
        tree = build_merged_segment_tree([segments for segments, _ in replicas], budget.memory_tokens, times)
        largest = tuple(tree.largest([counts[kind] for _, counts in replicas]) for kind in range(3))
        return GroupPlan(replicas, tree, largest, budget.memory_tokens)

    def replica(self, numbers: Sequence[int]) -> tuple[SegmentPlan, Counts]:
        """The segments of a rank with these sequences, and their counts."""
        segments = plan_forest([self.sequences[i] for i in numbers], self.tree_mode, self.budget, self.shape)
        return segments, segment_counts(segments, [self.masks[i] for i in numbers])

    def seconds(self, plan: GroupPlan) -> float:
        """Predicted seconds of a group's forwards and backwards."""
        tree, model, stages = plan.tree, self.shape.cost_model, self.shape.num_stages
        kept = choose_kept_segments(tree, self.budget.activation_tokens, stages)
        forward, backward = model.segment_seconds(*plan.largest)
        seconds = float((forward + backward).sum() + forward[~kept].sum())
        if stages > 1:
            # Exact for equal segments, and close for unequal ones.
            return seconds / stages * (tree.num_segments + stages - 1) / max(1, tree.num_segments)
        return seconds
