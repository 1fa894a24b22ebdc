"""Counts the tokens of packed trees: contiguous cuts against first fit decreasing, and a lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from megatron_dta.core.planning.step.packs import Leaves, candidate_packs, pack_sequences, packed_tokens
from megatron_dta.core.tree import build_prefix_tree
from papers.tree_training_parts.data import TreeSet

METHODS = {
    "contiguous": "contiguous",
    "first fit of leaves": "leaves_first_fit",
    "least added of leaves": "leaves_least_added",
    "first fit of runs": "runs",
    "least added of runs": "runs",
}


def packing_rows(trees: TreeSet, capacities: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A row for each capacity; one that is below the longest sequence is raised to it."""
    tree, leaves = trees.tree, Leaves.of(trees.tree)
    for capacity in sorted({max(capacity, trees.longest) for capacity in capacities}):
        row: dict[str, Any] = {"set": trees.name, "capacity": capacity, "sequence_tokens": trees.tokens}
        for method, pack in candidate_packs(tree, leaves, capacity):
            tokens, name = packed_tokens(leaves.lengths, leaves.shared, pack), METHODS[method]
            if tokens < row.get(f"{name}_tokens", np.inf):
                row |= {f"{name}_tokens": tokens, f"{name}_packs": int(pack.max()) + 1}
        row |= _of_better(trees, capacity)
        row["unique_tokens"] = tree.num_tokens
        row["saved_over_contiguous"] = 1 - row["better_tokens"] / row["contiguous_tokens"]
        row["over_unique"] = row["better_tokens"] / row["unique_tokens"] - 1
        yield row


def _of_better(trees: TreeSet, capacity: int) -> dict[str, int]:
    """Of what ``--tree-mode packed`` does, counted in the trees that it builds."""
    packs = pack_sequences(trees.tree, capacity)
    packed = [build_prefix_tree([trees.samples[i].token_ids for i in pack]).num_tokens for pack in packs]
    return {"better_tokens": sum(packed), "better_packs": len(packed), "fullest_pack": max(packed)}
