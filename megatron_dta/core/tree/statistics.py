"""Measures the sharing in a prefix forest: the tokens and attention pairs that separate sequences would repeat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.core.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class TreeStatistics:
    """Statistics of one forest. Reuse factors are 1.0 if nothing is shared, and for an empty forest."""

    sequences: int  # number of sequences, including duplicates
    tokens: int  # number of tokens in all sequences
    unique_tokens: int  # number of tokens in the stream
    token_reuse: float  # tokens / unique_tokens
    attention_reuse: float  # causal (query, key) pairs of separate sequences / visible pairs of the forest
    trees: int  # number of roots
    nodes: int
    leaves: int
    depth: int  # largest number of nodes on a path from a root
    branching: float  # mean number of children of nodes with at least two; 0.0 if there is none
    max_branching: int  # largest number of children of a node (roots are not siblings)
    longest_sequence: int  # tokens


def tree_statistics(tree: PrefixTree) -> TreeStatistics:
    """Compute the statistics of a forest from its nodes, in O(nodes + sequences)."""
    lengths = tree.sequence_lengths
    tokens = int(lengths.sum())
    separate_pairs = _causal_pairs(lengths)
    start = tree.node_position.astype(np.int64)
    visible_pairs = _causal_pairs(start + tree.node_lengths) - _causal_pairs(start)
    children = np.bincount(tree.node_parent[tree.node_parent >= 0], minlength=tree.num_nodes)
    branching = children[children >= 2]
    return TreeStatistics(
        sequences=tree.num_sequences,
        tokens=tokens,
        unique_tokens=tree.num_tokens,
        token_reuse=tokens / tree.num_tokens if tree.num_tokens else 1.0,
        attention_reuse=separate_pairs / visible_pairs if visible_pairs else 1.0,
        trees=int(np.count_nonzero(tree.node_parent < 0)),
        nodes=tree.num_nodes,
        leaves=tree.num_leaves,
        depth=int(tree.node_depth.max(initial=-1)) + 1,
        branching=float(branching.mean()) if len(branching) else 0.0,
        max_branching=int(children.max(initial=0)),
        longest_sequence=int(lengths.max(initial=0)),
    )


def _causal_pairs(lengths: np.ndarray) -> int:
    """Sum of L (L + 1) / 2."""
    return int((lengths * (lengths + 1) // 2).sum())
