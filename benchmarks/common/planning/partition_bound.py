"""A bound that no division of sequences over ranks can beat."""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.partition.sequence_costs import RankCounts, SequenceCosts
from megatron_dta.core.tree.trained_edges import count_edges


def least_slowest(costs: SequenceCosts, num_ranks: int) -> float:
    """Lower bound on the cost of the slowest rank of any partition.

    The bound is the largest of three: the cost of all sequences together divided by the number of ranks; the cost of
    the costliest sequence; and k times the smallest unshared cost among (k - 1) R + 1 sequences, of which some rank
    holds at least k.
    """
    count = len(costs.stop_of_sequence)
    if not count:
        return 0.0
    everything = RankCounts.of(costs, np.zeros(count, dtype=np.int64), 1)
    mean = float(costs.model.cost(everything.tokens, everything.pairs, everything.edges)[0]) / num_ranks
    stop, one_each = np.unique(costs.stop_of_sequence, return_index=True)  # A copy of an equal sequence may be free.
    length = costs.tree.sequence_lengths
    edges = count_edges(costs.intervals, np.arange(count), count)
    alone = costs.model.cost(length, length * (length + 1) // 2, edges)[one_each]
    unshared = alone - np.maximum(costs.shared, np.append(costs.shared[1:], 0.0))[stop]
    crowded = np.sort(unshared)[::-1][::num_ranks]
    return max(mean, float(alone.max()), float((crowded * np.arange(1, len(crowded) + 1)).max()))
