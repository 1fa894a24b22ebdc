"""Two partitions that others use, to compare with: both balance token counts, and neither counts attention.

first fit    sequences one by one, the longest first, each into the first rank with room for its tokens; a rank has room
             for the mean, and what fits nowhere goes to the rank with fewest tokens. Knows nothing of prefixes.
contiguous   AReaL-DTA (arXiv 2602.00482): the leaves of the prefix tree in depth-first order are cut into contiguous
             runs, each as long as its unique tokens stay within a threshold, and the least threshold that needs no
             more runs than ranks is found by binary search. Sequences that end inside the tree go with the first leaf
             behind them. Ranks may stay empty.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.sequence_costs import shared_node
from megatron_dta.tree import PrefixTree


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


def contiguous(tree: PrefixTree, num_ranks: int) -> np.ndarray:
    """Rank of each sequence of the tree, int64 [Q]."""
    if not tree.num_sequences:
        return np.zeros(0, dtype=np.int64)
    leaf = np.flatnonzero(tree.node_subtree_end == np.arange(1, tree.num_nodes + 1))
    end = tree.node_position.astype(np.int64) + tree.node_lengths
    join = shared_node(tree, leaf)
    length, shared = end[leaf], np.where(join < 0, 0, end[join])
    reach = np.cumsum(length - shared)  # Leaves j..i have reach[i] - reach[j] + length[j] unique tokens.
    low, high = int(length.max()) - 1, int(reach[-1])
    while high - low > 1:
        middle = (low + high) // 2
        if len(_runs(length, reach, middle)) <= num_ranks:
            high = middle
        else:
            low = middle
    begins = _runs(length, reach, high)
    first_leaf = np.searchsorted(leaf, tree.sequence_node)
    return np.searchsorted(begins, first_leaf, side="right") - 1


def _runs(length: np.ndarray, reach: np.ndarray, threshold: int) -> list[int]:
    """First leaf of each run; every leaf fits the threshold."""
    begins = []
    leaf = 0
    while leaf < len(length):
        begins.append(leaf)
        leaf = int(np.searchsorted(reach, threshold + reach[leaf] - length[leaf], side="right"))
    return begins
