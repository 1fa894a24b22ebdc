"""Computes the cost of any set of sequences from two numbers per sequence: its own cost, and its overlap with the last.

The distinct sequences of a forest in depth-first order are its *stops*. A rank that holds some of them computes the
union of their paths, and

    cost(stops s1 < s2 < ...) = sum of alone[s] - sum of shared between neighbours (s1, s2), (s2, s3), ...

where the cost that two stops share is the minimum ``shared`` of all neighbours between them. So ranks, runs of stops
and whole subtrees can be added, removed and moved by looking at their borders alone.

Edges that several stops train are counted wherever their node is computed. This is slightly too much on a rank that
holds only other sequences through that node. Edges that one stop trains are counted with it. ``RankCounts`` counts
exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.range_minimum import RangeMinimum
from megatron_dta.core.tree import PrefixTree
from megatron_dta.core.tree.trained_edges import TrainedIntervals, count_edges, split_edges, trained_intervals


@dataclass(frozen=True)
class SequenceCosts:
    """The K stops of a forest and their costs. Stops with one label must stay together, as one indivisible run.

    Attributes:
        tree: the forest.
        intervals: the forest's trained edges.
        model: the cost model.
        stop_of_sequence: int64 [Q], stop of each sequence.
        stop_node: int64 [K], node that ends with each stop's last token; ascending.
        stop_label: int64 [K], label of each stop, numbered by first stop; without labels, the stop's own number.
        alone: float64 [K], cost of each stop alone.
        shared: float64 [K], cost that each stop shares with the stop before it; 0 for the first.
    """

    tree: PrefixTree
    intervals: TrainedIntervals
    model: CostModel
    stop_of_sequence: np.ndarray
    stop_node: np.ndarray
    stop_label: np.ndarray
    alone: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(
        cls,
        tree: PrefixTree,
        model: CostModel,
        loss_masks: Sequence[np.ndarray] | None = None,
        labels: Sequence[str] | None = None,
    ) -> SequenceCosts:
        """Stops and costs of ``tree``'s sequences; sequences with equal ``labels`` stay together."""
        node = tree.sequence_node.astype(np.int64)
        if labels is None:
            stop_node, stop_of_sequence = np.unique(node, return_inverse=True)
            stop_label = np.arange(len(stop_node))
        else:
            # A node where sequences of several labels end has one stop per label, in the order of the labels.
            names, label = np.unique(np.asarray(labels, dtype=str), return_inverse=True)
            key, stop_of_sequence = np.unique(node * len(names) + label, return_inverse=True)
            stop_node, stop_label = np.divmod(key, len(names)) if len(key) else (key, key)
            _, first, inverse = np.unique(stop_label, return_index=True, return_inverse=True)
            rank = np.empty(len(first), dtype=np.int64)
            rank[np.argsort(first)] = np.arange(len(first))
            stop_label = rank[inverse]
        intervals = trained_intervals(tree, loss_masks)
        own_edges, node_edges = split_edges(tree, intervals, stop_of_sequence, len(stop_node))
        start = tree.node_position.astype(np.int64)
        end = start + tree.node_lengths
        path_cost = model.cost(end, end * (end + 1) // 2, path_sums(tree, node_edges))
        join = shared_node(tree, stop_node)
        return cls(
            tree=tree,
            intervals=intervals,
            model=model,
            stop_of_sequence=stop_of_sequence,
            stop_node=stop_node,
            stop_label=stop_label,
            alone=path_cost[stop_node] + model.cost(0, 0, own_edges),
            shared=np.where(join < 0, 0.0, path_cost[join]),
        )

    @cached_property
    def least_shared(self) -> RangeMinimum:
        """Range minima of ``shared``: stops i < j share ``least_shared(i + 1, j + 1)``."""
        return RangeMinimum(self.shared)

    def between(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Cost that stops ``first`` < ``second`` share, for arrays of stops."""
        return self.least_shared(first + 1, second + 1)


def path_sums(tree: PrefixTree, values: np.ndarray) -> np.ndarray:
    """Sum of integer ``values`` [M] over each node and its ancestors, int64 [M]."""
    left = np.zeros(tree.num_nodes + 1, dtype=np.int64)
    np.add.at(left, tree.node_subtree_end, values)
    return np.cumsum(values) - np.cumsum(left)[: tree.num_nodes]


def shared_node(tree: PrefixTree, stop_node: np.ndarray) -> np.ndarray:
    """Last node that each stop's path shares with the stop before it, or -1: int64 [K].

    ``stop_node`` is ascending and contains every leaf. So the stop after a leaf is in the next subtree, whose root is
    the next node; the stop after any other stop is in that stop's own subtree.
    """
    if not len(stop_node):
        return np.zeros(0, dtype=np.int64)
    before, node = stop_node[:-1], stop_node[1:]
    inside = node < tree.node_subtree_end[before]
    next_node = np.minimum(before + 1, tree.num_nodes - 1)
    return np.concatenate([[-1], np.where(inside, before, tree.node_parent[next_node])]).astype(np.int64)


def path_lengths(tree: PrefixTree, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of tokens on each node's path, and of those that it shares with the node before, int64 [K] each.

    ``nodes`` is as in ``shared_node``.
    """
    end = tree.node_position.astype(np.int64) + tree.node_lengths
    join = shared_node(tree, nodes)
    return end[nodes], np.where(join < 0, 0, end[join])


@dataclass(frozen=True)
class RankCounts:
    """Exact numbers of tokens, (query, key) pairs and trained edges on every rank: int64 [ranks] each."""

    tokens: np.ndarray
    pairs: np.ndarray
    edges: np.ndarray

    @classmethod
    def of(cls, costs: SequenceCosts, rank_of_sequence: np.ndarray, num_ranks: int) -> RankCounts:
        """Count the forests of the ranks' sequences."""
        tree = costs.tree
        nodes, stop = np.unique(tree.sequence_node, return_inverse=True)
        lengths, with_last = path_lengths(tree, nodes.astype(np.int64))
        between = RangeMinimum(with_last)
        held = np.unique(rank_of_sequence.astype(np.int64) * max(len(nodes), 1) + stop)  # Sorted by rank, then stop.
        rank, stop = np.divmod(held, max(len(nodes), 1))
        same = np.flatnonzero(rank[1:] == rank[:-1]) + 1
        shared = np.zeros(len(held), dtype=np.int64)
        shared[same] = between(stop[same - 1] + 1, stop[same] + 1)
        length = lengths[stop]
        tokens, pairs = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
        np.add.at(tokens, rank, length - shared)
        np.add.at(pairs, rank, (length * (length + 1) - shared * (shared + 1)) // 2)
        return cls(tokens, pairs, count_edges(costs.intervals, rank_of_sequence, num_ranks))
