"""The attention calls that ``layers/attention.py`` measures, cut from rollout files by the project's own planner.

Pure planning: no GPU and no kernels are needed to make the cases or to count their pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dta_kernels.tree_attention.blocks import local_key_end
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.segments.plan import plan_segments, root_paths
from megatron_dta.core.tree import PrefixTree, build_prefix_tree


@dataclass(frozen=True)
class AttentionCase:
    """One call: N queries on A ancestors and themselves.

    Attributes:
        key_end: int32 [A + N], see ``local_key_end``.
    """

    name: str
    num_queries: int
    key_end: np.ndarray

    @property
    def num_ancestors(self) -> int:
        return len(self.key_end) - self.num_queries

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs: key m is seen by the queries at positions max(m, A) .. key_end[m]."""
        first = np.maximum(np.arange(len(self.key_end)), self.num_ancestors)
        return int(np.maximum(self.key_end - first, 0).sum(dtype=np.int64))


def choose_sequences(sequences: Sequence[np.ndarray], unique_tokens: int) -> list[np.ndarray]:
    """The first sequences of a file whose tree has at most this many tokens; the first one cut to fit if need be."""
    if not sequences:
        raise InputError("the file holds no sequence")
    low, high = 0, len(sequences)
    while low < high:
        middle = (low + high + 1) // 2
        if build_prefix_tree(sequences[:middle]).num_tokens <= unique_tokens:
            low = middle
        else:
            high = middle - 1
    return list(sequences[:low]) or [sequences[0][:unique_tokens]]


def whole_tree(tree: PrefixTree, name: str) -> AttentionCase:
    """The tree as one segment, as packed trees are computed."""
    ends = local_key_end(0, tree.num_tokens, np.zeros(0, np.int64), tree.subtree_end)
    return AttentionCase(name, tree.num_tokens, ends)


def segment_cases(tree: PrefixTree, segment_tokens: int, name: str) -> list[AttentionCase]:
    """All segments that the planner cuts of the tree."""
    plan = plan_segments(tree, segment_tokens)
    paths, ends = root_paths(plan), plan.tree.subtree_end
    return [
        AttentionCase(
            f"{name}/{index}",
            end - begin,
            local_key_end(begin, end - begin, ends[paths.stream_indices(index)], ends[begin:end]),
        )
        for index, (begin, end) in enumerate(pairwise(plan.segment_start.tolist()))
    ]


def chain(num_ancestors: int, num_queries: int, name: str) -> AttentionCase:
    """Causal attention of a sequence's last tokens on all of it."""
    ends = np.full(num_ancestors + num_queries, num_ancestors + num_queries, dtype=np.int32)
    return AttentionCase(name, num_queries, ends)


def probe_case(seed: int = 0) -> AttentionCase:
    """A segment of a random tree with ancestors, branches and odd sizes, small enough to check against a reference."""
    generator = np.random.default_rng(seed)
    trunk = generator.integers(0, 1000, 611)
    sequences = []
    for _ in range(5):
        branch = np.concatenate([trunk[: generator.integers(300, 612)], generator.integers(0, 1000, 123)])
        sequences += [np.concatenate([branch, generator.integers(0, 1000, size)]) for size in (3, 71, 190)]
    tree = build_prefix_tree([sequence.astype(np.int32) for sequence in sequences])
    return max(segment_cases(tree, 777, "probe"), key=lambda case: min(case.num_ancestors, case.num_queries))
