"""Work of the slowest replica in a step: token, pair and edge counts from rollouts or from generated sequences.

The planners of training divide the sequences over the replicas and cut them into segments. ``estimate`` uses the counts
of the division alone, for many meshes; ``plan`` plans the best ones in full. If only totals are known, sequences with
these totals are generated (``capacity.sequences``), so both cases take the same path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, partition_costs
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.planning.pipeline.segments import pipeline_segment_tokens
from megatron_dta.core.planning.segments.plan import SegmentPlan, default_in_flight
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.tree import PrefixTree, build_forest_without_sharing, build_prefix_tree
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import MergedSegmentTree


@dataclass(frozen=True)
class ReplicaWork:
    """Counts of the slowest replica's step.

    Attributes:
        tokens, pairs, edges: see ``CostModel``.
        segments: number of segments.
        segment_tokens: maximum tokens of a segment.
        in_flight_tokens: peak in-flight tokens on a single stage with the whole model.
        path_tokens: sum over segments of their ancestors' tokens, which attention reads again.
        planned: the segments and their tokens, pairs and edges; None for an estimate.
        alone: the counts of the slowest replica, where the others are those of a merged segment tree
            (``extras.expert_parallel.planning``): at each node, of the replica with most.
        merged: the segments of the replicas that run that tree, in its order.
        imbalance: cost of the slowest replica over the mean.
    """

    tokens: int
    pairs: int
    edges: int
    segments: int
    segment_tokens: int
    in_flight_tokens: int
    path_tokens: int
    planned: tuple[SegmentPlan | MergedSegmentTree, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
    alone: ReplicaWork | None = None
    merged: tuple[SegmentPlan, ...] = ()
    imbalance: float = 1.0

    @classmethod
    def of(
        cls,
        segments: SegmentPlan | MergedSegmentTree,
        counts: tuple[np.ndarray, np.ndarray, np.ndarray],
        segment_tokens: int,
        alone: ReplicaWork | None = None,
    ) -> ReplicaWork:
        """The work of planned segments."""
        return cls(
            *(int(values.sum()) for values in counts),
            segments.num_segments,
            segment_tokens,
            segments.peak_in_flight_tokens,
            int((segments.in_flight_tokens - segments.lengths).sum()),
            (segments, counts),
            alone,
        )


@dataclass
class StepWork:
    """The sequences of one optimizer step.

    Attributes:
        sequences, masks: token ids and loss masks of each, up to its last trained token.
        cost_model: costs of the whole model, used to divide the sequences.
        tree_mode: "dta", or "dense" to share no prefixes.
    """

    sequences: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    cost_model: CostModel
    tree_mode: str = "dta"
    _partitions: dict[int, Partition] = field(default_factory=dict)
    _plans: dict[tuple[int, StepBudget, PipelineShape, int], ReplicaWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.sequences):
            raise InputError("a step without sequences cannot be planned")
        build = build_prefix_tree if self.tree_mode == "dta" else build_forest_without_sharing
        self.tree: PrefixTree = build(self.sequences)
        self.costs = SequenceCosts.of(self.tree, self.cost_model, self.masks)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, counted separately."""
        return int(self.tree.sequence_lengths.sum())

    @property
    def unique_tokens(self) -> int:
        """Tokens of the forest of all sequences."""
        return self.tree.num_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.tree.sequence_lengths.max())

    def partition(self, num_replicas: int, step: GroupStep | None = None) -> Partition:
        """The division of the sequences over the replicas; ``step`` is given if they share experts."""
        if step is not None:
            return partition_costs(self.costs, num_replicas, lambda splits: [step.slowest(split) for split in splits])
        if num_replicas not in self._partitions:
            self._partitions[num_replicas] = partition_costs(self.costs, num_replicas)
        return self._partitions[num_replicas]

    def estimate(self, num_replicas: int, budget: StepBudget, pipeline: PipelineShape) -> ReplicaWork:
        """Counts without segments, assuming full segments and a fully used limit on in-flight tokens."""
        partition = self.partition(num_replicas)
        slowest = int(partition.cost_per_rank.argmax())
        tokens, pairs, edges = (
            int(counts[slowest])
            for counts in (partition.tokens_per_rank, partition.pairs_per_rank, partition.edges_per_rank)
        )
        limit, floor = self._memory_tokens(budget), pipeline.cost_model.tokens_of_floor
        size = pipeline_segment_tokens(tokens, budget.segment_tokens, limit, pipeline.num_stages, floor)
        in_flight = min(tokens, limit)
        segments = max(1, -(-tokens // size))
        path_tokens = segments * in_flight // 2
        return ReplicaWork(
            tokens, pairs, edges, segments, size, in_flight, path_tokens, imbalance=partition.max_over_mean
        )

    def plan(self, num_replicas: int, budget: StepBudget, pipeline: PipelineShape, group: int = 1) -> ReplicaWork:
        """Counts of the slowest replica as planned by training.

        Args:
            group: replicas that share experts and therefore run the same ops.
        """
        key = num_replicas, budget, pipeline, group
        if key not in self._plans:
            self._memory_tokens(budget)  # Raises the error of a limit that is too low.
            step = GroupStep(self.sequences, self.masks, group, budget, pipeline, self.tree_mode)
            partition = self.partition(num_replicas, step if group > 1 else None)
            costs = partition.cost_per_rank
            if group == 1:
                replica = step.replica(partition.sequences_of(int(costs.argmax())))
                work = ReplicaWork.of(*replica, replica[0].segment_tokens)
            else:
                plans = [step.plan(partition.rank_of_sequence, index) for index in range(num_replicas // group)]
                slowest = int(np.argmax([step.seconds(group_plan) for group_plan in plans]))
                plan, members = plans[slowest], costs[slowest * group : (slowest + 1) * group]
                replica = plan.replicas[int(members.argmax())]
                size = max(segments.segment_tokens for segments, _ in plan.replicas)
                work = ReplicaWork.of(
                    plan.tree, plan.largest, size, ReplicaWork.of(*replica, replica[0].segment_tokens)
                )
                work = replace(work, merged=tuple(segments for segments, _ in plan.replicas))
            self._plans[key] = replace(work, imbalance=partition.max_over_mean)
        return self._plans[key]

    def _memory_tokens(self, budget: StepBudget) -> int:
        """Limit on in-flight tokens; the planner's default if None is given."""
        if budget.memory_tokens is None:
            return default_in_flight(self.longest, budget.segment_tokens)
        if budget.memory_tokens < self.longest:
            raise InputError(
                f"--tree-memory-tokens {budget.memory_tokens} is less than the longest sequence ({self.longest} tokens)"
            )
        return budget.memory_tokens
