"""Builds the forest and the segments of each training mode.

    dta      the prefix forest, cut into segments: every shared token once, one root-to-leaf path in flight
    packed   whole trees within a token capacity (Tree Training, arXiv 2511.00413): sequences go into packs of at most
             ``--tree-segment-tokens`` unique tokens (``packs``), a pack is one segment, and a prefix that two packs
             share is computed in both
    dense    no sharing: every sequence is a chain of its own; a segment holds several chains or a part of one

The engine does not know the mode, so a comparison of modes compares only their trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.segments.cut import plan_segments
from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.tree import PrefixTree, build_forest_without_sharing, build_prefix_tree

if TYPE_CHECKING:
    from megatron_dta.core.tree.known_paths import KnownPath


def plan_forest(
    sequences: Sequence[np.ndarray],
    tree_mode: str,
    budget: StepBudget,
    pipeline: PipelineShape | None = None,
    paths: Sequence[KnownPath] | None = None,
) -> SegmentPlan:
    """Build the forest of ``sequences`` for a mode and cut it into segments.

    Args:
        sequences: int32 arrays of token ids, none empty.
        tree_mode: "dta", "packed" or "dense".
        budget: limits of segments and of tokens in flight; its segment size must be given (the capacity of a pack).
        pipeline: the stages; with several, the planner makes more and smaller segments, but not smaller packs. None
            for a single process.
        paths: known nodes of the sequences, if any; the forest of "dta" is then built from them.

    Raises:
        InputError: a sequence is longer than a pack, or no plan fits the budget.
    """
    if tree_mode == "packed":
        return plan_packs(sequences, budget.segment_tokens)
    tree = build_forest(sequences, tree_mode, paths)
    if pipeline is None or pipeline.num_stages == 1:
        return plan_segments(tree, budget.segment_tokens, budget.memory_tokens)
    from megatron_dta.core.planning.pipeline.segments import plan_pipeline_segments, tokens_of_floor

    return plan_pipeline_segments(
        tree,
        budget.segment_tokens,
        budget.memory_tokens,
        pipeline.num_stages,
        pipeline.max_in_flight_tokens,
        tokens_of_floor(pipeline.cost_model),
    )


def build_forest(
    sequences: Sequence[np.ndarray], tree_mode: str, paths: Sequence[KnownPath] | None = None
) -> PrefixTree:
    """Build the forest of "dta" or "dense"; arguments as in ``plan_forest``."""
    if tree_mode == "dta":
        if paths is None:
            return build_prefix_tree(sequences)
        from megatron_dta.core.tree.known_paths import build_from_known_paths

        return build_from_known_paths(sequences, paths)
    if tree_mode == "dense":
        return build_forest_without_sharing(sequences)
    raise ValueError(f"unknown tree_mode {tree_mode!r}")


def plan_packs(sequences: Sequence[np.ndarray], capacity: int) -> SegmentPlan:
    """Divide the sequences into trees of at most ``capacity`` tokens, each one segment, with few tokens in total."""
    from megatron_dta.core.planning.step.packs import pack_sequences
    from megatron_dta.core.tree.concatenate import concatenate_forests

    if not len(sequences):
        return plan_segments(build_prefix_tree(sequences), capacity)
    longest = max(len(sequence) for sequence in sequences)
    if longest > capacity:
        raise InputError(
            f"--tree-segment-tokens {capacity} is less than the longest sequence ({longest} tokens), which --tree-mode "
            f"packed must hold in one pack; raise it to {longest} or more, or use --tree-mode dta"
        )
    packs = pack_sequences(build_prefix_tree(sequences), capacity)
    trees = [build_prefix_tree([sequences[i] for i in pack]) for pack in packs]
    forest = concatenate_forests(trees, np.concatenate(packs))
    segment_start = np.concatenate([[0], np.cumsum([tree.num_tokens for tree in trees])]).astype(np.int64)
    parents = np.full(len(trees), -1, dtype=np.int32)
    return SegmentPlan(tree=forest, segment_start=segment_start, segment_parent=parents, segment_tokens=capacity)
