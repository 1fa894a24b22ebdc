"""Finds which edges of a forest are trained and by which sequences, as intervals of the stream.

An edge parent -> child is identified by its child's place in the stream. A sequence's loss mask is a few runs of
positions, and each run becomes one interval of the stream for every node that it passes through. No code loops over
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_dta.core.tree import PrefixTree


class TrainedIntervals(NamedTuple):
    """Intervals of the stream and the sequence that trains each, int64 [I]; they overlap if sequences share edges."""

    sequence: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def trained_intervals(tree: PrefixTree, loss_masks: Sequence[np.ndarray] | None) -> TrainedIntervals:
    """The trained edges of every sequence.

    Args:
        loss_masks: for each sequence bool [T], False at position 0; None to train all positions but the first.
    """
    offsets = np.concatenate([[0], np.cumsum(tree.sequence_lengths)]).astype(np.int64)
    run_begin, run_end = _mask_runs(offsets, loss_masks)
    sequence, node = _nodes_to_first_run(tree, offsets, run_begin)
    # Places in the concatenated sequences: of each node on a path, and of each run of trained tokens.
    node_begin = offsets[sequence] + tree.node_position[node]
    node_end = node_begin + tree.node_lengths[node]
    first = np.searchsorted(run_end, node_begin, side="right")
    count = np.maximum(np.searchsorted(run_begin, node_end, side="left") - first, 0)
    pair = np.repeat(np.arange(len(node)), count)
    run = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count) + first[pair]
    to_stream = (tree.node_start[node] - node_begin)[pair]
    begin = np.maximum(run_begin[run], node_begin[pair]) + to_stream
    end = np.minimum(run_end[run], node_end[pair]) + to_stream
    return TrainedIntervals(sequence[pair], begin, end)


def _mask_runs(offsets: np.ndarray, loss_masks: Sequence[np.ndarray] | None) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of each run of trained tokens, as places in the concatenated sequences."""
    if loss_masks is None:
        begin, end = offsets[:-1] + 1, offsets[1:]
        return begin[begin < end], end[begin < end]
    flat = np.concatenate([np.zeros(0, dtype=bool), *loss_masks])
    if flat.dtype != bool or len(loss_masks) != len(offsets) - 1 or len(flat) != offsets[-1]:
        raise ValueError("loss_masks must be one bool array for each sequence, as long as the sequence")
    if flat[offsets[:-1]].any():
        raise ValueError("a loss mask is true at position 0, but no prefix predicts the first token")
    change = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    if len(change) % 2:
        change = np.append(change, len(flat))
    return change[0::2], change[1::2]


def _nodes_to_first_run(tree: PrefixTree, offsets: np.ndarray, run_begin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, node) for the nodes of every path from its end up to the first trained token."""
    first = np.append(run_begin, offsets[-1])[np.searchsorted(run_begin, offsets[:-1])]
    sequence = np.flatnonzero(first < offsets[1:])
    position = (first - offsets[:-1])[sequence]
    node = tree.sequence_node[sequence].astype(np.int64)
    sequences, nodes = [sequence], [node]
    while len(node):
        above = tree.node_position[node] > position
        sequence, position, node = sequence[above], position[above], tree.node_parent[node[above]].astype(np.int64)
        sequences.append(sequence)
        nodes.append(node)
    return np.concatenate(sequences), np.concatenate(nodes)


def merge_intervals(owner: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The union of each owner's intervals: disjoint (owner, begin, end), sorted by owner and place."""
    if not len(owner):
        return owner, begin, end
    # Put the owners side by side on one line, so that no interval reaches into the next owner's part.
    width = int(end.max()) + 1
    line_begin, line_end = owner * width + begin, owner * width + end
    order = np.argsort(line_begin, kind="stable")
    line_begin, reach = line_begin[order], np.maximum.accumulate(line_end[order])
    new = np.append(True, line_begin[1:] > reach[:-1])
    last = np.append(np.flatnonzero(new)[1:] - 1, len(new) - 1)
    owner = owner[order][new]
    return owner, line_begin[new] - owner * width, reach[last] - owner * width


def count_edges(intervals: TrainedIntervals, owner_of_sequence: np.ndarray, num_owners: int) -> np.ndarray:
    """Number of unique trained edges of each owner's sequences, int64 [num_owners]."""
    owner, begin, end = merge_intervals(owner_of_sequence[intervals.sequence], intervals.begin, intervals.end)
    counts = np.zeros(num_owners, dtype=np.int64)
    np.add.at(counts, owner, end - begin)
    return counts


def split_edges(
    tree: PrefixTree, intervals: TrainedIntervals, owner_of_sequence: np.ndarray, num_owners: int
) -> tuple[np.ndarray, np.ndarray]:
    """Count the edges that a single owner trains, and those that several owners train.

    Returns:
        int64 [num_owners], edges that only this owner's sequences train, and int64 [nodes], the other trained edges of
        each node.
    """
    owner, begin, end = merge_intervals(owner_of_sequence[intervals.sequence], intervals.begin, intervals.end)
    points = np.unique(np.concatenate([begin, end, tree.node_start]))
    begin, end = np.searchsorted(points, begin), np.searchsorted(points, end)
    cover = np.cumsum(np.bincount(begin, minlength=len(points)) - np.bincount(end, minlength=len(points)))[:-1]
    alone = np.concatenate([[0], np.cumsum(np.where(cover == 1, np.diff(points), 0))])
    several = np.concatenate([[0], np.cumsum(np.where(cover > 1, np.diff(points), 0))])
    unshared = np.zeros(num_owners, dtype=np.int64)
    np.add.at(unshared, owner, alone[end] - alone[begin])
    return unshared, np.diff(several[np.searchsorted(points, tree.node_start)])
