"""What a replica of the model computes in a step: counts of the slowest one, from rollouts or from a few numbers.

Sequences are divided over replicas and cut into segments by the planners that training uses. A first look at many
meshes takes the counts of the division alone (``estimate``); the best of them are planned in full (``plan``). Where
only numbers are known, sequences are made up that have these numbers, so there is one way for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.segment_counts import segment_counts
from megatron_dta.planning.partition.divide import Partition, partition_costs
from megatron_dta.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.planning.pipeline.segments import pipeline_segment_tokens
from megatron_dta.planning.segments.cut import default_memory_tokens
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.planning.step.modes import plan_forest
from megatron_dta.tree import PrefixTree, build_forest_without_sharing, build_prefix_tree


@dataclass(frozen=True)
class ReplicaWork:
    """Counts of the slowest replica's step.

    Attributes:
        tokens, pairs, edges: see ``CostModel``.
        segments: forwards of a step.
        segment_tokens: most tokens of one.
        in_flight_tokens: most tokens in flight on one stage that has the whole model.
        path_tokens: tokens of all segments' ancestors, which their attention reads again.
        planned: the segments and their counts (tokens, pairs, edges of each); None of an estimate.
    """

    tokens: int
    pairs: int
    edges: int
    segments: int
    segment_tokens: int
    in_flight_tokens: int
    path_tokens: int
    planned: tuple[SegmentPlan, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None


@dataclass
class StepWork:
    """The sequences of one optimizer step.

    Attributes:
        sequences, masks: token ids and loss masks of each, up to its last trained token.
        cost_model: of the whole model; decides how sequences are divided.
        tree_mode: "dta", or "dense" for sequences that share nothing.
    """

    sequences: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    cost_model: CostModel
    tree_mode: str = "dta"
    _partitions: dict[int, Partition] = field(default_factory=dict)
    _plans: dict[tuple[int, int, int | None, int, int], ReplicaWork] = field(default_factory=dict)

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

    def partition(self, num_replicas: int) -> Partition:
        """The sequences of each replica."""
        if num_replicas not in self._partitions:
            self._partitions[num_replicas] = partition_costs(self.costs, num_replicas)
        return self._partitions[num_replicas]

    def estimate(
        self, num_replicas: int, segment_tokens: int, memory_tokens: int | None, stages: int, floor_tokens: int = 0
    ) -> ReplicaWork:
        """Counts without cutting anything: full segments, the budget of in-flight tokens used up."""
        partition = self.partition(num_replicas)
        slowest = int(partition.cost_per_rank.argmax())
        tokens, pairs, edges = (
            int(counts[slowest])
            for counts in (partition.tokens_per_rank, partition.pairs_per_rank, partition.edges_per_rank)
        )
        budget = self.memory_tokens(segment_tokens, memory_tokens)
        size = pipeline_segment_tokens(tokens, segment_tokens, budget, stages, floor_tokens)
        in_flight = min(tokens, budget)
        segments = max(1, -(-tokens // size))
        return ReplicaWork(tokens, pairs, edges, segments, size, in_flight, segments * in_flight // 2)

    def plan(
        self, num_replicas: int, segment_tokens: int, memory_tokens: int | None, stages: int, floor_tokens: int = 0
    ) -> ReplicaWork:
        """Counts of the slowest replica as training would plan it; ``floor_tokens`` see ``pipeline_segment_tokens``."""
        key = num_replicas, segment_tokens, memory_tokens, stages, floor_tokens
        if key not in self._plans:
            partition = self.partition(num_replicas)
            own = partition.sequences_of(int(partition.cost_per_rank.argmax()))
            segments = plan_forest(
                [self.sequences[i] for i in own],
                self.tree_mode,
                segment_tokens,
                memory_tokens,
                stages,
                floor_tokens=floor_tokens,
            )
            counts = segment_counts(segments, [self.masks[i] for i in own])
            self._plans[key] = ReplicaWork(
                *(int(each.sum()) for each in counts),
                segments.num_segments,
                segments.segment_tokens,
                segments.peak_in_flight_tokens,
                int((segments.in_flight_tokens - segments.lengths).sum()),
                (segments, counts),
            )
        return self._plans[key]

    def memory_tokens(self, segment_tokens: int, memory_tokens: int | None) -> int:
        """The budget of in-flight tokens, the planner's default where none is given."""
        if memory_tokens is None:
            return default_memory_tokens(self.tree, segment_tokens)
        if memory_tokens < self.longest:
            raise InputError(
                f"--tree-memory-tokens {memory_tokens} is less than the longest sequence ({self.longest} tokens)"
            )
        return memory_tokens
