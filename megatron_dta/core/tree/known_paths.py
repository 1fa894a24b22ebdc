"""Builds the prefix forest of sequences whose common nodes are known, for example from tree sampling.

Sequences with the same node share it, so its tokens are read once. Tokens are compared only where this knowledge ends:
at roots, and between siblings that happen to begin with the same token. If one such node is a prefix of another, the
sort of ``sort_sequences`` continues from there. The result equals that of ``build_prefix_tree`` bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.tree.prefix_tree import PrefixTree, as_sequences, build_from_order, sort_sequences


@dataclass(frozen=True)
class KnownPath:
    """The known nodes on the path of a sequence.

    Attributes:
        nodes: int64 [D], ids of the nodes from the root; equal ids mean the same node, with the same tokens before and
            in it.
        ends: int64 [D], position in the sequence at which each node ends, ascending; a node that continues beyond the
            sequence is cut at the sequence's end.
    """

    nodes: np.ndarray
    ends: np.ndarray


def build_from_known_paths(sequences: Sequence[np.ndarray], paths: Sequence[KnownPath]) -> PrefixTree:
    """The prefix forest of ``sequences`` (int arrays [T], T >= 1); each path must reach the end of its sequence.

    Raises ValueError if a path does not reach the end of its sequence, or if the numbers of both differ.
    """
    arrays = as_sequences(sequences)
    if len(arrays) != len(paths):
        raise ValueError(f"{len(paths)} paths for {len(arrays)} sequences")
    for i, (array, path) in enumerate(zip(arrays, paths, strict=True)):
        if len(path.nodes) != len(path.ends) or not len(path.ends) or path.ends[-1] < len(array):
            raise ValueError(f"sequence {i}: its nodes do not reach to its end, {len(array)}")
    order, shared = _sorted(arrays, [path.nodes.tolist() for path in paths], [path.ends.tolist() for path in paths])
    return build_from_order(arrays, np.asarray(order, np.int64), np.asarray(shared, np.int64))


_UNKNOWN = -1


def _sorted(arrays: list[np.ndarray], nodes: list[list[int]], ends: list[list[int]]) -> tuple[list[int], list[int]]:
    """The result of ``sort_sequences``, from the known nodes."""
    order: list[int] = []
    shared: list[int] = []
    # Stack entries: members; number of tokens that all of them share; level of the node that they continue with, or
    # _UNKNOWN if no more is known; number of tokens shared with the sequence before them.
    waiting = [(list(range(len(arrays))), 0, 0, 0)]
    while waiting:
        members, depth, level, before = waiting.pop()
        if level == _UNKNOWN:
            indices, common = sort_sequences([arrays[i][depth:] for i in members])
            order += [members[index] for index in indices.tolist()]
            shared += [before, *(depth + common[1:]).tolist()]
            continue
        branches: dict[int, list[int]] = {}
        for i in members:
            if len(arrays[i]) > depth:
                branches.setdefault(nodes[i][level], []).append(i)
            else:
                order.append(i)
                shared.append(before)
                before = depth
        by_first: dict[bytes, list[list[int]]] = {}
        for branch in branches.values():
            by_first.setdefault(arrays[branch[0]][depth : depth + 1].tobytes(), []).append(branch)
        following: list[tuple[list[int], int, int, int]] = []
        for first in sorted(by_first):
            for alike, common in _distinguish(by_first[first], arrays, ends, level, depth):
                before = before if common is None else common
                if len(alike) == 1:
                    following += _within(alike[0], arrays, ends, level, before)
                else:
                    following.append((sorted(i for branch in alike for i in branch), depth, _UNKNOWN, before))
            before = depth
        waiting += following[::-1]
    return order, shared


def _distinguish(
    branches: list[list[int]], arrays: list[np.ndarray], ends: list[list[int]], level: int, depth: int
) -> list[tuple[list[list[int]], int | None]]:
    """Sort branches that begin with the same token, as far as the tokens of their own nodes distinguish them.

    Returns groups of branches in order, each with the number of tokens shared with the group before (None for the
    first). Branches stay in one group if the node of one is a prefix of the others', and all stay in one group if a
    sequence ends within its node.
    """
    node_ends = [max(ends[i][level] for i in branch) for branch in branches]
    within = (len(arrays[i]) < end for branch, end in zip(branches, node_ends, strict=True) for i in branch)
    if len(branches) == 1 or any(within):
        return [(branches, None)]
    slices = [arrays[branch[0]][depth:end] for branch, end in zip(branches, node_ends, strict=True)]
    order, common = sort_sequences(slices)
    groups: list[tuple[list[list[int]], int | None]] = []
    shortest = 0
    for index, shared in zip(order.tolist(), common.tolist(), strict=True):
        if groups and shared >= shortest:
            groups[-1][0].append(branches[index])
        else:
            groups.append(([branches[index]], depth + shared if groups else None))
            shortest = len(slices[index])
    return groups


def _within(
    members: list[int], arrays: list[np.ndarray], ends: list[list[int]], level: int, before: int
) -> list[tuple[list[int], int, int, int]]:
    """Stack entries, in order, for sequences that all run through one node: first those that end within it."""
    end = max(ends[i][level] for i in members)  # a cut path ends where its sequence does
    groups = []
    for i in sorted((i for i in members if len(arrays[i]) < end), key=lambda i: len(arrays[i])):
        groups.append(([i], len(arrays[i]), level, before))
        before = len(arrays[i])
    outside = [i for i in members if len(arrays[i]) >= end]
    return [*groups, (outside, end, level + 1, before)] if outside else groups
