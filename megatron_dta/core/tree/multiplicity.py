"""Counts how often each token of the forest occurs in the sequences."""

from __future__ import annotations

import numpy as np

from megatron_dta.core.tree import PrefixTree


def token_weights(tree: PrefixTree, sequence_weights: np.ndarray) -> np.ndarray:
    """For each stream token, the sum of ``sequence_weights`` [Q] over the sequences through it: float64 [N].

    With weights of 1 this is the number of sequences through the token. The sums run from the leaves up, so a small
    weight is not lost to rounding next to a large one in another subtree.
    """
    weights = np.zeros(tree.num_nodes, dtype=np.float64)
    np.add.at(weights, tree.sequence_node, sequence_weights)
    totals = weights.tolist()
    parents = tree.node_parent.tolist()
    for node in range(tree.num_nodes - 1, -1, -1):
        if parents[node] >= 0:
            totals[parents[node]] += totals[node]
    return np.repeat(np.asarray(totals, dtype=np.float64), np.diff(tree.node_start))
