"""The prefix forest of a batch of sequences: its *stream* of unique tokens in depth-first preorder, and its nodes.

Three integers describe a token of the stream:

    parent[i]       stream index of the token before it in its sequences, -1 at a root
    position[i]     its depth, the same in every sequence through it
    subtree_end[i]  one past the last stream index inside its subtree

Query ``q`` sees key ``k`` exactly if ``k <= q < subtree_end[k]``. A *node* is a maximal run of tokens with one child
each; it also ends where a sequence ends. Inside a node the three integers are constant or count up, so only nodes are
stored. The arrays per token are derived on first use and cached.

Example: the sequences 5 6 7 and 5 6 8 9 have the stream 5 6 7 8 9 with the nodes (5 6), (7) and (8 9), and

    parent       -1  0  1  1  3
    position      0  1  2  2  3
    subtree_end   5  5  3  5  5

``build_prefix_tree`` builds it:

1. Sort the sequences and find the prefix that each shares with the one before it (``sort_sequences``). Groups of
   sequences are split by blocks of growing length. So a shared token is read once, however many sequences share it, and
   no token after the first difference is read.
2. In sorted order, sequence k adds the tokens after that shared prefix to the stream: a *run*. A node begins at every
   run and wherever a later sequence leaves a run.
3. Parents and subtree ends of the nodes follow from "the last smaller value before" in the arrays of shared lengths,
   which ``_previous_below`` answers for all nodes at once. Nothing recurses, so only memory limits depth and width.

Letters in shapes: N unique tokens, M nodes, Q sequences, T tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dta.core.common.errors import InputError

FIRST_BLOCK_TOKENS = 64
COMPARED_AT_ONCE_BYTES = 1 << 20
MAX_STREAM_TOKENS = 2**31 - 1
TOKEN_TYPE = np.dtype(np.int32)


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A forest of token sequences that share their common prefixes. The arrays must not be modified.

    Nodes are numbered in preorder. Node ``m`` holds the stream tokens ``node_start[m]:node_start[m + 1]``.
    """

    token_ids: np.ndarray  # int32 [N], the stream
    node_start: np.ndarray  # int64 [M + 1]
    node_parent: np.ndarray  # int32 [M], -1 at a root
    node_position: np.ndarray  # int32 [M], position of the node's first token
    node_subtree_end: np.ndarray  # int32 [M], one past the last node of the subtree
    sequence_node: np.ndarray  # int32 [Q], the node that ends with each sequence's last token; duplicates share it
    sequence_lengths: np.ndarray  # int64 [Q]

    @property
    def num_tokens(self) -> int:
        """Number of unique tokens, N."""
        return len(self.token_ids)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, M."""
        return len(self.node_parent)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, including duplicates, Q."""
        return len(self.sequence_node)

    @property
    def num_leaves(self) -> int:
        """Number of nodes without a child."""
        return int(np.count_nonzero(self.node_subtree_end == np.arange(1, self.num_nodes + 1)))

    @cached_property
    def node_lengths(self) -> np.ndarray:
        """Number of tokens in each node, int64 [M]."""
        return np.diff(self.node_start)

    @cached_property
    def node_depth(self) -> np.ndarray:
        """Number of ancestor nodes of each node, int32 [M]: 0 at a root."""
        closed = np.bincount(self.node_subtree_end, minlength=self.num_nodes + 1)[: self.num_nodes]
        return (np.arange(self.num_nodes) - np.cumsum(closed)).astype(np.int32)

    @cached_property
    def parent(self) -> np.ndarray:
        """Stream index of the token before each token in its sequences, -1 at a root: int32 [N]."""
        parent = np.arange(-1, self.num_tokens - 1, dtype=np.int32)
        parent[self.node_start[:-1]] = self._last_token_of_parent()
        return parent

    @cached_property
    def position(self) -> np.ndarray:
        """Number of tokens before each token in its sequences: int32 [N]."""
        first = self.node_position
        last = first + self.node_lengths - 1
        return _count_up(self.num_tokens, self.node_start[:-1], first, last)

    @cached_property
    def subtree_end(self) -> np.ndarray:
        """One past the last stream index inside each token's subtree: int32 [N]."""
        end = self.node_start[self.node_subtree_end].astype(np.int32)
        return np.repeat(end, self.node_lengths)

    def stream_indices(self, sequence: int) -> np.ndarray:
        """Stream indices of one sequence, int32 [T]: ``token_ids[stream_indices(q)]`` is sequence q."""
        return self.stream_indices_of(np.asarray([sequence]))[0]

    def stream_indices_of(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream indices of several sequences, concatenated: (int32 [sum of T], offsets int64 [len + 1])."""
        sequences = np.asarray(sequences, dtype=np.int64)
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths[sequences], out=offsets[1:])
        if len(sequences) == 0:
            return np.zeros(0, dtype=np.int32), offsets
        # Collect every (sequence, node on its path), one level of all paths at a time, from the leaves to the roots.
        nodes, starts = [], []
        node, start = self.sequence_node[sequences], offsets[:-1]
        while len(node):
            nodes.append(node)
            starts.append(start + self.node_position[node])
            up = self.node_parent[node]
            alive = up >= 0
            node, start = up[alive], start[alive]
        node, start = np.concatenate(nodes), np.concatenate(starts)
        by_start = np.argsort(start)
        node, start = node[by_start], start[by_start]
        return _count_up(int(offsets[-1]), start, self.node_start[node], self.node_start[node + 1] - 1), offsets

    def with_node_order(self, order: np.ndarray) -> PrefixTree:
        """The same forest with siblings (and roots) reordered.

        ``order`` [M] lists the current nodes in the new preorder. Raises ValueError if it is not a preorder.
        """
        order = np.asarray(order, dtype=np.int64)
        count = self.num_nodes
        if order.shape != (count,) or not np.array_equal(np.sort(order), np.arange(count)):
            raise ValueError(f"the node order must list each of the {count} nodes once")
        rank = np.empty(count, dtype=np.int32)
        rank[order] = np.arange(count, dtype=np.int32)
        old_parent = self.node_parent[order]
        parent = np.where(old_parent < 0, np.int32(-1), rank[old_parent]) if count else old_parent
        end = (np.arange(count) + self.node_subtree_end[order] - order).astype(np.int32)
        child = np.flatnonzero(parent >= 0)
        # Subtrees keep their sizes, so a nested range that starts at its node contains only the node's descendants.
        if np.any(parent[child] >= child) or np.any(end[child] > end[parent[child]]):
            raise ValueError("the node order is not a depth-first preorder: a subtree is not contiguous")
        lengths = self.node_lengths[order]
        start = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=start[1:])
        old_start = self.node_start[order]
        gather = _count_up(self.num_tokens, start[:-1], old_start, old_start + lengths - 1)
        return PrefixTree(
            token_ids=self.token_ids[gather],
            node_start=start,
            node_parent=parent,
            node_position=self.node_position[order],
            node_subtree_end=end,
            sequence_node=rank[self.sequence_node],
            sequence_lengths=self.sequence_lengths,
        )

    def _last_token_of_parent(self) -> np.ndarray:
        """Stream index of the token before each node's first one, -1 at a root: int64 [M]."""
        return np.where(self.node_parent < 0, -1, self.node_start[self.node_parent + 1] - 1)


def _count_up(total: int, starts: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """int32 [total] of runs that count up by one: run r begins at ``starts[r]`` and has ``first[r]..last[r]``.

    ``starts`` increases from 0, and the runs cover the result. An in-place cumulative sum needs no other array.
    """
    values = np.ones(total, dtype=np.int32)
    if total:
        values[starts[0]] = first[0]
        values[starts[1:]] = first[1:] - last[:-1]
        np.cumsum(values, out=values)
    return values


def build_prefix_tree(sequences: Sequence[np.ndarray]) -> PrefixTree:
    """The forest in which every common prefix of the sequences (integer arrays [T], T >= 1) is stored once.

    The order of siblings depends only on the tokens, not on the order of the sequences. Raises
    InputError for an empty sequence or one that is not an array of 32-bit token ids.
    """
    arrays = as_sequences(sequences)
    return build_from_order(arrays, *sort_sequences(arrays))


def as_sequences(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Convert the sequences to int32 arrays; raises InputError for a sequence that is not a list of 32-bit ids."""
    return [_checked(tokens, index) for index, tokens in enumerate(sequences)]


def build_from_order(arrays: list[np.ndarray], order: np.ndarray, shared: np.ndarray) -> PrefixTree:
    """The forest of sorted sequences; ``order`` and ``shared`` are the results of ``sort_sequences``."""
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
    stream = [arrays[index][length:] for index, length in zip(order.tolist(), shared.tolist(), strict=True)]
    return _tree_of_runs(_concatenate(stream), order, lengths, shared)


def build_forest_without_sharing(sequences: Sequence[np.ndarray]) -> PrefixTree:
    """The forest in which every sequence is a tree of its own, in the order given: dense training in the same form."""
    arrays, count = as_sequences(sequences), len(sequences)
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=count)
    start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(lengths, out=start[1:])
    return PrefixTree(
        token_ids=_concatenate(arrays),
        node_start=start,
        node_parent=np.full(count, -1, dtype=np.int32),
        node_position=np.zeros(count, dtype=np.int32),
        node_subtree_end=np.arange(1, count + 1, dtype=np.int32),
        sequence_node=np.arange(count, dtype=np.int32),
        sequence_lengths=lengths,
    )


def _checked(tokens: np.ndarray, index: int) -> np.ndarray:
    """The sequence as an int32 array [T]."""
    if type(tokens) is np.ndarray and tokens.dtype == TOKEN_TYPE and tokens.ndim == 1 and len(tokens):
        return tokens
    array = np.asarray(tokens)
    if array.ndim != 1 or len(array) == 0:
        raise InputError(
            f"sequence {index} must be a flat list of one or more token ids, but its shape is {array.shape}"
        )
    if array.dtype.kind not in "iu":
        raise InputError(f"sequence {index} must hold integer token ids, but its type is {array.dtype}")
    if array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min:
        raise InputError(f"sequence {index} has a token id that does not fit in 32 bits")
    return array.astype(np.int32)


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    total = sum(map(len, parts))
    if total > MAX_STREAM_TOKENS:
        raise InputError(f"a batch of {total} unique tokens is over the limit of a tree, {MAX_STREAM_TOKENS}: split it")
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def sort_sequences(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Sort the sequences, a prefix before its continuations, and find the prefixes that neighbours share.

    The order is that of the tokens' bytes. Groups of sequences that are equal so far are split by their next block.

    Returns:
        (order int64 [Q], shared int64 [Q]): ``arrays[order[k]]`` is sequence k in sorted order, and ``shared[k]`` is
        the number of tokens that it shares with the one before it.
    """
    order, shared = [0] * len(arrays), [0] * len(arrays)
    comparisons = _Comparisons(shared)
    groups = [(list(range(len(arrays))), 0, 0, FIRST_BLOCK_TOKENS)]  # members, first place in order, depth, block width
    while groups:
        members, position, depth, width = groups.pop()
        end = depth + width
        firsts: dict[bytes, int] = {}  # block -> the first member that has it
        followers: dict[int, list[int]] = {}  # first member -> all members with its block, if there are several
        for member in members:
            first = firsts.setdefault(arrays[member][depth:end].tobytes(), member)
            if first != member:
                if first in followers:
                    followers[first].append(member)
                else:
                    followers[first] = [first, member]
        blocks = sorted(firsts)
        positions = []
        for block in blocks:
            first = firsts[block]
            positions.append(position)
            if first not in followers:
                order[position] = first
                position += 1
                continue
            bucket = followers[first]
            count = len(bucket)
            if len(block) == 4 * width:
                groups.append((bucket, position, end, 2 * width))
            else:  # All sequences end inside this block: duplicates.
                order[position : position + count] = bucket
                shared[position + 1 : position + count] = [depth + len(block) // 4] * (count - 1)
            position += count
        if len(blocks) > 1:
            comparisons.add(blocks, positions, depth, width)
    comparisons.finish()
    return np.asarray(order, dtype=np.int64), np.asarray(shared, dtype=np.int64)


class _Comparisons:
    """Common prefixes of neighbouring blocks, collected so that one NumPy comparison serves many small groups.

    The results are written to ``shared``, at the place of each block except its group's first.
    """

    def __init__(self, shared: list[int]) -> None:
        self._shared = shared
        self._waiting: dict[int, tuple[int, list[bytes], list[int]]] = {}  # width -> depth, blocks, places

    def add(self, blocks: list[bytes], positions: list[int], depth: int, width: int) -> None:
        """Add the sorted blocks of one group; all groups of a width have the same depth."""
        _, waiting, waiting_places = self._waiting.setdefault(width, (depth, [], []))
        waiting.extend(blocks)
        waiting_places.append(-1)  # The first block of a group has no neighbour.
        waiting_places.extend(positions[1:])
        if 4 * width * len(waiting) >= COMPARED_AT_ONCE_BYTES:
            self._compare(width)

    def finish(self) -> None:
        for width in list(self._waiting):
            self._compare(width)

    def _compare(self, width: int) -> None:
        depth, blocks, positions = self._waiting.pop(width)
        rows = max(2, COMPARED_AT_ONCE_BYTES // (4 * width))
        for begin in range(0, len(blocks) - 1, rows):
            batch = blocks[begin : begin + rows + 1]
            sizes = np.fromiter(map(len, batch), dtype=np.int64, count=len(batch)) // 4
            padded = b"".join([block.ljust(4 * width, b"\0") for block in batch])
            tokens = np.frombuffer(padded, dtype=np.int32).reshape(len(batch), width)
            different = tokens[1:] != tokens[:-1]
            first = different.argmax(axis=1)
            first[~different[np.arange(len(first)), first]] = width
            common = np.minimum(first, np.minimum(sizes[1:], sizes[:-1])) + depth
            for position, length in zip(positions[begin + 1 : begin + rows + 1], common.tolist(), strict=True):
                if position >= 0:
                    self._shared[position] = length


def _tree_of_runs(token_ids: np.ndarray, order: np.ndarray, lengths: np.ndarray, shared: np.ndarray) -> PrefixTree:
    """The forest of a stream with ``lengths - shared`` new tokens for each sequence in sorted order."""
    sorted_lengths = lengths[order]
    new = sorted_lengths - shared
    run_start = np.cumsum(new) - new
    # The run that this one leaves: the last before it that starts nearer the root.
    before = _previous_below(shared, shared)
    left = np.where(before < 0, -1, run_start[before] + shared - shared[before]) if len(order) else before
    holds_tokens = np.flatnonzero(new)  # A run without tokens is a duplicate of the sequence before it.
    total = len(token_ids)
    inner = left[(left > 0) & (left < total)]
    node_start = np.unique(np.concatenate([run_start[holds_tokens], inner]))
    # A node is the beginning of a run or a later part of it.
    run = holds_tokens[np.searchsorted(run_start[holds_tokens], node_start, side="right") - 1]
    begins_run = node_start == run_start[run]
    last_of_parent = np.where(begins_run, left[run] - 1, node_start - 1)  # Below 0 at a root.
    parent = np.searchsorted(node_start, last_of_parent, side="right") - 1
    position = shared[run] + node_start - run_start[run]
    count = len(node_start)
    # The next node that starts no deeper ends the subtree: the same query on the reversed order.
    subtree_end = count - 1 - _previous_below(position[::-1], position[::-1] + 1)[::-1]
    sequence_node = np.empty(len(order), dtype=np.int32)
    sequence_node[order] = np.searchsorted(node_start, run_start + new - 1, side="right") - 1
    return PrefixTree(
        token_ids=token_ids,
        node_start=np.append(node_start, total).astype(np.int64),
        node_parent=parent.astype(np.int32),
        node_position=position.astype(np.int32),
        node_subtree_end=subtree_end.astype(np.int32),
        sequence_node=sequence_node,
        sequence_lengths=lengths,
    )


def _previous_below(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """For each i the last j < i with ``values[j] < bounds[i]``, or -1: int64 [n], in O(n log n), no loop over n.

    Computes minima over windows of 1, 2, 4, ... values; then every i steps left over windows not below its bound.
    """
    count = len(values)
    minima = [values]
    while 1 << len(minima) <= count:
        half = minima[-1]
        reach = 1 << (len(minima) - 1)
        minima.append(np.minimum(half[:-reach], half[reach:]))  # minima[w][j] = min(values[j : j + 2**w])
    index = np.arange(count)
    for level in reversed(range(len(minima))):
        start = index - (1 << level)
        window = minima[level][np.maximum(start, 0)] if count else values
        index = np.where((start >= 0) & (window >= bounds), start, index)
    return index - 1
