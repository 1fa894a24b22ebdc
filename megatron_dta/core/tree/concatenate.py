"""Concatenates several forests into one without merging their shared prefixes, as packed trees require."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.tree.prefix_tree import PrefixTree


def concatenate_forests(trees: Sequence[PrefixTree], sequences: np.ndarray) -> PrefixTree:
    """The forest of all ``trees``, with their streams concatenated.

    Args:
        trees: at least one forest.
        sequences: int64 [Q], the new index of each sequence, in the order of the trees and of the sequences within
            them.
    """
    first_node = np.concatenate([[0], np.cumsum([tree.num_nodes for tree in trees])]).astype(np.int64)
    first_token = np.concatenate([[0], np.cumsum([tree.num_tokens for tree in trees])]).astype(np.int64)
    node_start = [tree.node_start[:-1] + offset for tree, offset in zip(trees, first_token[:-1], strict=True)]
    node_parent = [
        np.where(tree.node_parent >= 0, tree.node_parent + offset, -1)
        for tree, offset in zip(trees, first_node[:-1], strict=True)
    ]
    node_subtree_end = [tree.node_subtree_end + offset for tree, offset in zip(trees, first_node[:-1], strict=True)]
    sequence_node = [tree.sequence_node + offset for tree, offset in zip(trees, first_node[:-1], strict=True)]
    back = np.empty(len(sequences), dtype=np.int64)
    back[sequences] = np.arange(len(sequences))
    like = trees[0]
    return PrefixTree(
        token_ids=np.concatenate([tree.token_ids for tree in trees]),
        node_start=np.concatenate([*node_start, first_token[-1:]]).astype(like.node_start.dtype),
        node_parent=np.concatenate(node_parent).astype(like.node_parent.dtype),
        node_position=np.concatenate([tree.node_position for tree in trees]),
        node_subtree_end=np.concatenate(node_subtree_end).astype(like.node_subtree_end.dtype),
        sequence_node=np.concatenate(sequence_node)[back].astype(like.sequence_node.dtype),
        sequence_lengths=np.concatenate([tree.sequence_lengths for tree in trees])[back],
    )
