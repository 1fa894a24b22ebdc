"""Divides a step's sequences over data-parallel ranks, so that the slowest rank finishes first.

Each rank trains the forest of its own sequences, so a prefix that two ranks hold is computed on both and counted on
both. The plan is made once per step, from tokens and loss masks alone, and every pass of the step (old logprobs,
reference logprobs, update) uses it. It depends neither on the order of the sequences nor on chance: every rank of a
job makes the same one.

Which ranks share experts, and so must run in step, plays no part. Dealing the sequences out so that all ranks get trees
alike was tried: longest first to each rank in turn, or runs of 1/4 to 1/64 of a rank's share, costliest first. On 8
sets of rollouts over 8 ranks that makes the busiest rank compute up to 41% more tokens (several times as many where
samples are turns of one trajectory). With the cheaper of slots and common trees (``lockstep``) the step is then slower
on most sets at EP 2 to 8; at EP 8 three (mint_math_8x100, aime24_skyt1_long, math_qwen25_8x100) gain 8 to 17%, each by
another way of dealing. Trees of other shapes are dealt with where they are run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.partition.baselines import contiguous, first_stops_of_leaves
from megatron_dta.planning.partition.search import assign, fill_idle
from megatron_dta.planning.partition.sequence_costs import RankCounts, SequenceCosts
from megatron_dta.planning.partition.sequence_runs import Chunks
from megatron_dta.tree import build_prefix_tree
from megatron_dta.tree.trained_edges import count_edges


class Trained(Protocol):
    """What a partition needs of a ``TrainingSample`` or a ``Rollout``."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, eq=False)
class Partition:
    """Sequences on ranks, and what each rank computes. Q sequences, R ranks.

    Attributes:
        rank_of_sequence: int64 [Q].
        cost_per_rank: float64 [R], by the cost model, exact counts; 0 of an idle rank.
        tokens_per_rank, pairs_per_rank, edges_per_rank: int64 [R], see ``CostModel``.
        unique_tokens: tokens of the forest of all sequences.
        total_cost: of all ranks together.
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
        """The partition that ``rank_of_sequence`` [Q] says, with its costs."""
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
        """Ranks, idle ones included."""
        return len(self.cost_per_rank)

    @property
    def max_over_mean(self) -> float:
        """Cost of the slowest rank over the mean; 1.0 where there is nothing to do."""
        mean = self.cost_per_rank.mean()
        return float(self.cost_per_rank.max() / mean) if mean > 0 else 1.0

    @property
    def duplicated_tokens(self) -> int:
        """Tokens that all ranks compute beyond the unique ones."""
        return int(self.tokens_per_rank.sum()) - self.unique_tokens

    def sequences_of(self, rank: int) -> np.ndarray:
        """Sequences of one rank, ascending."""
        return np.flatnonzero(self.rank_of_sequence == rank)


def trained_parts(samples: Sequence[Trained]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens and loss masks of the samples up to the last trained token of each; a step computes nothing behind it.

    Raises ValueError for a sample without a trained token.
    """
    sequences, masks = [], []
    for index, sample in enumerate(samples):
        mask = sample.loss_mask
        end = len(mask) - int(mask[::-1].argmax())
        if not mask[end - 1]:
            raise ValueError(f"sample {index} has no trained token; leave it out of the batch")
        sequences.append(sample.token_ids[:end])
        masks.append(mask[:end])
    return sequences, masks


def partition_samples(
    samples: Sequence[Trained],
    num_ranks: int,
    cost_model: CostModel | None = None,
    keep_together: Sequence[str] | None = None,
    fill_idle_ranks: bool = False,
) -> Partition:
    """``partition_sequences`` of what a step computes of the samples."""
    sequences, masks = trained_parts(samples)
    return partition_sequences(sequences, num_ranks, masks, cost_model, keep_together, fill_idle_ranks)


def partition_sequences(
    sequences: Sequence[np.ndarray],
    num_ranks: int,
    loss_masks: Sequence[np.ndarray] | None = None,
    cost_model: CostModel | None = None,
    keep_together: Sequence[str] | None = None,
    fill_idle_ranks: bool = False,
) -> Partition:
    """Divide sequences over ``num_ranks`` ranks so that the slowest rank's cost is least, then all ranks' together.

    Args:
        sequences: Q integer arrays of token ids, none empty.
        num_ranks: data-parallel size.
        loss_masks: bool [T] of each sequence, False at position 0; None: all positions but the first are trained.
        cost_model: None for the defaults of ``CostModel``.
        keep_together: a name for each sequence (group, trajectory); sequences of one name go to one rank.
        fill_idle_ranks: leave no rank idle while there are sequences (or names) enough. Without it ranks stay idle
            where work for them would not make the slowest rank faster, and only repeat prefixes: one long sequence may
            take longer than all others need on fewer ranks.

    Returns:
        The partition. Whatever the order of the sequences, the ranks get the same ones; of equal sequences, of which
        only the order tells them apart, the same number.

    Raises:
        ValueError: num_ranks below 1, or arguments of different lengths.
    """
    if num_ranks < 1:
        raise ValueError(f"sequences are divided over 1 or more ranks, not {num_ranks}")
    if keep_together is not None and len(keep_together) != len(sequences):
        raise ValueError(f"keep_together has {len(keep_together)} names for {len(sequences)} sequences")
    costs = SequenceCosts.of(build_prefix_tree(sequences), cost_model or CostModel(), loss_masks, keep_together)
    return partition_costs(costs, num_ranks, fill_idle_ranks)


def partition_costs(costs: SequenceCosts, num_ranks: int, fill_idle_ranks: bool = False) -> Partition:
    """``partition_sequences`` where the costs are known; labels of the stops stay together."""
    atoms, atom_of_stop = Chunks.atoms(costs)
    if not len(atoms):
        return Partition.of(costs, np.zeros(0, dtype=np.int64), num_ranks)
    units, bound = np.arange(len(atoms)), None
    if not costs.labelled:
        units = first_stops_of_leaves(costs)
        bound = np.empty(len(atoms), dtype=np.int64)
        bound[costs.stop_of_sequence] = contiguous(costs.tree, num_ranks)
    rank = assign(atoms, num_ranks, units, bound)
    if fill_idle_ranks:
        rank = fill_idle(atoms, rank, num_ranks)
    rank = rank[atom_of_stop[costs.stop_of_sequence]]
    if fill_idle_ranks and not costs.labelled:
        rank = spread_duplicates(costs, rank, num_ranks)
    return Partition.of(costs, rank, num_ranks)


def spread_duplicates(costs: SequenceCosts, rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """Give idle ranks equal sequences, the cheapest first, as far as a rank with several sequences has some."""
    rank = rank.copy()
    size = np.bincount(rank, minlength=num_ranks)
    idle = np.flatnonzero(size == 0)
    if not len(idle) or len(rank) == np.count_nonzero(size):
        return rank
    stop = costs.stop_of_sequence
    later = np.ones(len(rank), dtype=bool)  # Of equal sequences, all but the first, which stays.
    later[np.unique(stop, return_index=True)[1]] = False
    candidates = np.flatnonzero(later)
    order = candidates[np.lexsort((candidates, stop[candidates], costs.alone[stop[candidates]]))]
    for target, sequence in zip(idle, order, strict=False):
        rank[sequence] = target
    return rank


def least_slowest(costs: SequenceCosts, num_ranks: int) -> float:
    """A cost that the slowest rank of no partition can be below.

    The largest of three: the cost of all sequences together over the ranks; the costliest sequence; and, as of any
    (k - 1) R + 1 sequences some rank holds k, k times the least cost of so many, without what they share.
    """
    count = len(costs.stop_of_sequence)
    if not count:
        return 0.0
    whole = RankCounts.of(costs, np.zeros(count, dtype=np.int64), 1)
    mean = float(costs.model.cost(whole.tokens, whole.pairs, whole.edges)[0]) / num_ranks
    stop, one_each = np.unique(costs.stop_of_sequence, return_index=True)  # Equal sequences may cost nothing more.
    length = costs.tree.sequence_lengths
    edges = count_edges(costs.intervals, np.arange(count), count)
    alone = costs.model.cost(length, length * (length + 1) // 2, edges)[one_each]
    unshared = alone - np.maximum(costs.shared, np.append(costs.shared[1:], 0.0))[stop]
    crowded = np.sort(unshared)[::-1][::num_ranks]
    return max(mean, float(alone.max()), float((crowded * np.arange(1, len(crowded) + 1)).max()))
