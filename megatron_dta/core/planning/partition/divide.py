"""Divides a step's sequences over data-parallel ranks so that the slowest rank finishes first.

Each rank trains the forest of its own sequences, so a prefix that two ranks hold is computed and counted on both. The
plan is made once per step from tokens and loss masks alone, and every pass of the step (old logprobs, reference
logprobs, update) uses it. It depends neither on the order of the sequences nor on randomness, so every rank of a job
makes the same plan.

Ranks that share experts run the same ops, so they wait for each other wherever their trees differ. For them the
candidate with the fastest predicted step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.search import candidates
from megatron_dta.core.planning.partition.sequence_costs import RankCounts, SequenceCosts
from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns
from megatron_dta.core.tree import build_prefix_tree

StepSeconds = Callable[[list[np.ndarray]], Sequence[float]]
"""Predicted seconds of a step of ranks that share experts, for each of several ``rank_of_sequence``."""


class Trained(Protocol):
    """The fields of a ``TrainingSample`` or ``Rollout`` that a partition needs."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, eq=False)
class Partition:
    """The rank of every sequence, and the work of each rank. Q sequences, R ranks.

    Attributes:
        rank_of_sequence: int64 [Q], rank of each sequence.
        cost_per_rank: float64 [R], cost by the cost model with exact counts; 0 for an idle rank.
        tokens_per_rank, pairs_per_rank, edges_per_rank: int64 [R], see ``CostModel``.
        unique_tokens: number of tokens in the forest of all sequences.
        total_cost: cost of all ranks together.
    """

    rank_of_sequence: np.ndarray
    cost_per_rank: np.ndarray
    tokens_per_rank: np.ndarray
    pairs_per_rank: np.ndarray
    edges_per_rank: np.ndarray
    unique_tokens: int
    total_cost: float

    @classmethod
    def of(cls, costs: SequenceCosts, rank_of_sequence: np.ndarray, num_ranks: int) -> Partition:
        """The partition given by ``rank_of_sequence`` [Q], with its costs."""
        counts = RankCounts.of(costs, rank_of_sequence, num_ranks)
        return cls(
            rank_of_sequence=rank_of_sequence,
            cost_per_rank=costs.model.cost(counts.tokens, counts.pairs, counts.edges),
            tokens_per_rank=counts.tokens,
            pairs_per_rank=counts.pairs,
            edges_per_rank=counts.edges,
            unique_tokens=costs.tree.num_tokens,
            total_cost=float(costs.model.cost(counts.tokens.sum(), counts.pairs.sum(), counts.edges.sum())),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including idle ones."""
        return len(self.cost_per_rank)

    @property
    def max_over_mean(self) -> float:
        """Cost of the slowest rank over the mean; 1.0 if no rank has work."""
        mean = self.cost_per_rank.mean()
        return float(self.cost_per_rank.max() / mean) if mean > 0 else 1.0

    @property
    def duplicated_tokens(self) -> int:
        """Number of tokens that the ranks compute beyond the unique ones."""
        return int(self.tokens_per_rank.sum()) - self.unique_tokens

    def sequences_of(self, rank: int) -> np.ndarray:
        """The sequences of one rank, ascending."""
        return np.flatnonzero(self.rank_of_sequence == rank)


def trained_parts(samples: Sequence[Trained]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens and loss masks of the samples up to the last trained token of each; later tokens are never computed.

    Raises ValueError for a sample without a trained token.
    """
    sequences, masks = [], []
    for index, sample in enumerate(samples):
        mask = sample.loss_mask
        end = len(mask) - int(mask[::-1].argmax())
        if not mask[end - 1]:
            raise ValueError(f"sample {index} has no trained token; leave it out of the batch")
        # A rollout has no keys of its own.
        sequences.append(getattr(sample, "keys", sample.token_ids)[:end])
        masks.append(mask[:end])
    return sequences, masks


def partition_sequences(
    sequences: Sequence[np.ndarray],
    num_ranks: int,
    loss_masks: Sequence[np.ndarray] | None = None,
    cost_model: CostModel | None = None,
    step_seconds: StepSeconds | None = None,
) -> Partition:
    """Divide sequences over ranks to minimize the cost of the slowest rank, then the total cost.

    Args:
        sequences: Q integer arrays of token ids, none empty.
        num_ranks: data-parallel size.
        loss_masks: for each sequence bool [T], False at position 0; None to train all positions but the first.
        cost_model: cost model; None for the defaults of ``CostModel``.
        step_seconds: see ``partition_costs``.

    Returns:
        The partition. A rank stays idle if work for it would only repeat prefixes and not make the slowest rank faster,
        for example next to one long sequence that takes longer than all others together on fewer ranks. It
        does not depend on the order of the sequences: each rank gets the same distinct sequences, and the same number
        of copies of equal ones.

    Raises:
        ValueError: num_ranks below 1, or arguments of different lengths.
    """
    if num_ranks < 1:
        raise ValueError(f"sequences are divided over 1 or more ranks, not {num_ranks}")
    costs = SequenceCosts.of(build_prefix_tree(sequences), cost_model or CostModel(), loss_masks)
    return partition_costs(costs, num_ranks, step_seconds)


def partition_costs(costs: SequenceCosts, num_ranks: int, step_seconds: StepSeconds | None = None) -> Partition:
    """``partition_sequences`` for known costs, of sequences without labels.

    Args:
        step_seconds: given if ranks share experts; the partition is then the one with the fastest step.
    """
    runs, _ = SequenceRuns.indivisible(costs)
    if not len(runs):
        return Partition.of(costs, np.zeros(0, dtype=np.int64), num_ranks)
    ranks = candidates(runs, num_ranks, first_stops_of_leaves(costs))
    rank_of_sequence = [rank[costs.stop_of_sequence] for rank in ranks]
    if step_seconds is not None and len(rank_of_sequence) > 1:
        rank_of_sequence = [rank_of_sequence[int(np.argmin(step_seconds(rank_of_sequence)))]]
    partitions = [Partition.of(costs, rank, num_ranks) for rank in rank_of_sequence]
    return min(partitions, key=lambda partition: (partition.cost_per_rank.max(), partition.total_cost))


def first_stops_of_leaves(costs: SequenceCosts) -> np.ndarray:
    """The first stop of each leaf, int64, ascending; the stops on a leaf's path before it go with the leaf."""
    leaf = costs.tree.node_subtree_end[costs.stop_node] == costs.stop_node + 1
    return np.append(0, np.flatnonzero(leaf)[:-1] + 1)
