"""What the ranks that share experts exchange about their steps, and the largest counts of any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.costs.model import DEFAULT_COSTS
from megatron_dta.core.planning.segments.runs import ForkCounts
from megatron_dta.core.planning.step.passes import PipelineShape
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.extras.expert_parallel.planning.merged_segment_tree import MergedSegmentTree, SegmentForest


@dataclass(frozen=True)
class RankPlan:
    """The counts of a rank's step that it sends to the other ranks.

    Attributes:
        forest: segments of the rank.
        pairs, edges: attention pairs and trained edges of each segment.
        times: predicted nanoseconds of each segment, by the rank's costs.
        memory_tokens: limit on the tokens in flight.
        available_bytes: what a step's tensors may take on each pipeline rank; infinite without a limit.
        forks: numbers of states of each segment, if their bytes are limited.
    """

    forest: SegmentForest
    pairs: list[int]
    edges: list[int]
    times: list[int]
    memory_tokens: int
    available_bytes: tuple[float, ...] = (math.inf,)
    forks: ForkCounts | None = None

    @classmethod
    def of(cls, step: StepPlan, shape: PipelineShape | None = None) -> RankPlan:
        """Extract the counts from ``step``, which is planned for ``shape``."""
        memory = None if shape is None else shape.memory
        segments, edges = step.segments, np.diff(step.segment_edges)
        model = DEFAULT_COSTS if shape is None else shape.cost_model
        return cls(
            SegmentForest(segments.segment_parent, segments.lengths),
            segments.attention_pairs.tolist(),
            edges.tolist(),
            model.nanoseconds(segments.lengths, segments.attention_pairs, edges),
            step.memory_tokens,
            (math.inf,) if memory is None else tuple(memory.available(stage) for stage in range(shape.num_stages)),
            step.runs.counts if memory is not None and memory.has_states else None,
        )


def available_bytes(ranks: Sequence[RankPlan], stage: int) -> float:
    return min(rank.available_bytes[stage] for rank in ranks)


def memory_tokens_of(ranks: Sequence[RankPlan]) -> int:
    return max(rank.memory_tokens for rank in ranks)


def largest_counts(tree: MergedSegmentTree, ranks: Sequence[RankPlan]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest numbers of tokens, attention pairs and trained edges of any rank at each node of the merged tree."""
    return tree.lengths, tree.largest([rank.pairs for rank in ranks]), tree.largest([rank.edges for rank in ranks])
