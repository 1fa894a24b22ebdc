"""Partitions of other systems, for comparison.

first fit    takes the sequences one by one, longest first. Each goes to the first rank with room for its tokens; a rank
             has room for the mean. A sequence that fits nowhere goes to the rank with the fewest tokens. Shared
             prefixes are ignored.
contiguous   AReaL-DTA (arXiv 2602.00482): cuts the leaves of the prefix tree, in depth-first order, into contiguous
             runs, each as long as its cost stays within a threshold. A binary search finds the smallest threshold that
             needs no more runs than ranks. A sequence that ends inside the tree goes with the first leaf after it.
             Ranks may stay empty. The paper uses a predicted cost (``contiguous_by_cost``, here with this package's
             cost model). ``contiguous`` uses unique tokens alone and ignores attention.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.core.planning.partition.divide import first_stops_of_leaves
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts, path_lengths
from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns, greedy_cut
from megatron_dta.core.tree import PrefixTree


def first_fit(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Rank of each sequence by its length in tokens, int64 [Q]."""
    capacity = -(-int(lengths.sum()) // num_ranks)
    load = [0] * num_ranks
    rank_of = np.zeros(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    for sequence, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        rank = next((rank for rank, tokens in enumerate(load) if tokens + length <= capacity), -1)
        if rank < 0:
            rank = load.index(min(load))
        load[rank] += length
        rank_of[sequence] = rank
    return rank_of


def contiguous_by_cost(costs: SequenceCosts, num_ranks: int) -> np.ndarray:
    """Rank of each sequence, int64 [Q], by predicted cost; ``costs`` must have no labels."""
    if not len(costs.stop_node):
        return np.zeros(0, dtype=np.int64)
    leaves = SequenceRuns.indivisible(costs)[0].joined(first_stops_of_leaves(costs))
    run_of_leaf = np.searchsorted(leaves.even_runs(num_ranks), np.arange(len(leaves)), side="right") - 1
    return run_of_leaf[np.searchsorted(leaves.begin, costs.stop_of_sequence, side="right") - 1]


def contiguous(tree: PrefixTree, num_ranks: int) -> np.ndarray:
    """Rank of each sequence of the tree, int64 [Q], by unique tokens."""
    if not tree.num_sequences:
        return np.zeros(0, dtype=np.int64)
    leaf = np.flatnonzero(tree.node_subtree_end == np.arange(1, tree.num_nodes + 1))
    length, shared = path_lengths(tree, leaf)
    added = length - shared

    def runs(threshold: int) -> list[int]:
        return list(greedy_cut(length, added, threshold))

    low, high = int(length.max()) - 1, int(added.sum())
    while high - low > 1:
        middle = (low + high) // 2
        if len(runs(middle)) <= num_ranks:
            high = middle
        else:
            low = middle
    first_leaf = np.searchsorted(leaf, tree.sequence_node)
    return np.searchsorted(runs(high), first_leaf, side="right") - 1
