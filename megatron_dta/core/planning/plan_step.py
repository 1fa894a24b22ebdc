"""Plans a step from its samples: the forest, its segments, what is recomputed, and the passes, equal on all ranks.

The training mode decides the forest:

    dta      the prefix forest, cut into segments: every shared token once, one root-to-leaf path in flight
    packed   whole trees within a token capacity (Tree Training, arXiv 2511.00413): sequences go into packs of at most
             ``--tree-segment-tokens`` unique tokens (``packs``), a pack is one segment, and a prefix that two packs
             share is computed in both
    dense    no sharing: every sequence is a chain of its own; a segment holds several chains or a part of one

The engine does not know the mode, so a comparison of modes compares only their trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.extensions import EXPERT_PARALLEL
from megatron_dta.core.planning.segments.plan import SegmentPlan, default_memory_tokens, plan_segments
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.step.evaluate import StepChoice, choose_kept_within
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan, plan_segmented_step
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS, SIZES, choose_step
from megatron_dta.core.tree import PrefixTree, build_forest_without_sharing, build_prefix_tree

if TYPE_CHECKING:
    from megatron_dta.core.tree.known_paths import KnownPath


def plan_step(
    samples: Sequence[TrainingSample],
    tree_mode: str = "dta",
    budget: StepBudget | None = None,
    pipeline: PipelineShape | None = None,
) -> StepPlan:
    """Return the plan that the engine executes.

    Args:
        samples: the sequences; each must have a trained token.
        tree_mode: "dta", "packed" or "dense", see ``plan_forest``.
        budget: limits of segments, tokens in flight and activations; None for the defaults.
        pipeline: the ranks that run the model; None for a single process. If it has a ``group``, all ranks of the group
            must call this function.

    Raises:
        ValueError: a sample without a trained token.
        InputError: a budget that no plan can keep.
    """
    lengths = [sample.needed_length for sample in samples]
    if 0 in lengths:
        raise ValueError(f"sample {lengths.index(0)} has no trained token; leave it out of the batch")
    budget, pipeline = budget or StepBudget(), pipeline or PipelineShape()
    choice = _choose(samples, tree_mode, budget, pipeline)
    agreed = budget.segment_tokens
    if pipeline.group is not None:
        choice, agreed = _agreed(choice, samples, tree_mode, budget, pipeline)
    while True:
        if any(sample.tree_keys is not None for sample in samples):
            choice = _with_token_ids(choice, samples)
        step = plan_segmented_step(samples, choice, pipeline, budget.activation_tokens)
        try:
            return step if pipeline.group is None else EXPERT_PARALLEL.part.synchronize(step, pipeline)
        except InputError:
            # Each rank's plan fits, but not the common one: shorter segments need less memory. All ranks get here.
            if budget.segment_tokens is not None or agreed < 2 * SIZES[-1]:
                raise
        agreed //= 2
        choice = _choose(samples, tree_mode, replace(budget, segment_tokens=agreed), pipeline)


def _agreed(
    choice: StepChoice, samples: Sequence[TrainingSample], tree_mode: str, budget: StepBudget, pipeline: PipelineShape
) -> tuple[StepChoice, int | None]:
    """The plan again, with the limits that the ranks of the group agree on where none are given, and the size of its
    segments; all ranks call this.

    Segments of one size on all ranks leave no rank waiting for longer ones of another. With the in-flight tokens of the
    rank with the longest paths, which the merged segment tree has in any case, the segments of the others are as full.
    """
    has_tokens = choice.segments.num_segments > 0
    limits_of_ranks = pipeline.group.gather(
        (choice.segments.segment_tokens, choice.memory_tokens) if has_tokens else None
    )
    limits = [limit for limit in limits_of_ranks if limit is not None]
    size = budget.segment_tokens or min((tokens for tokens, _ in limits), default=None)
    if not has_tokens or len(limits_of_ranks) == 1:
        return choice, size
    sized, most = replace(budget, segment_tokens=size), max(in_flight for _, in_flight in limits)
    # On one stage with a limit in bytes, in-flight tokens cost activations.
    is_free = budget.memory_tokens is None and (pipeline.num_stages > 1 or pipeline.memory is None)
    if is_free and choice.memory_tokens < most:
        try:
            return _choose(samples, tree_mode, replace(sized, memory_tokens=most), pipeline), size
        except InputError:
            pass  # There is too little memory for as many; the ranks need not agree on this limit.
    if size < choice.segments.segment_tokens and budget.segment_tokens is None:
        choice = _choose(samples, tree_mode, sized, pipeline)
    return choice, size


def _choose(
    samples: Sequence[TrainingSample], tree_mode: str, budget: StepBudget, pipeline: PipelineShape
) -> StepChoice:
    """Choose the fastest plan if stages or memory ask for it or the size is free, or use the given segment size."""
    lengths = [sample.needed_length for sample in samples]
    sequences = [sample.keys[:length] for sample, length in zip(samples, lengths, strict=True)]
    masks = [sample.loss_mask[:length] for sample, length in zip(samples, lengths, strict=True)]
    known = [sample.path for sample in samples if sample.path is not None]
    paths = known if len(known) == len(samples) else None
    is_free = pipeline.memory is not None or (budget.segment_tokens is None and pipeline.is_measured)
    is_packed, has_stages = tree_mode == "packed", pipeline.num_stages > 1
    if has_stages:
        from megatron_dta.core.planning.pipeline.choice import choose_kept_on_stages, choose_pipeline_step
    if (is_free or has_stages) and not is_packed:
        choose = choose_pipeline_step if has_stages else choose_step
        return choose(build_forest(sequences, tree_mode, paths), masks, pipeline, budget)
    size = budget.segment_tokens or DEFAULT_SEGMENT_TOKENS * pipeline.context_size
    segments = plan_forest(sequences, tree_mode, replace(budget, segment_tokens=size), pipeline, paths)
    in_flight = 0 if is_packed else budget.memory_tokens or default_memory_tokens(segments.tree, size)
    if pipeline.memory is not None:
        choose_kept = choose_kept_on_stages if has_stages else choose_kept_within
        return replace(choose_kept(segments, masks, pipeline), memory_tokens=in_flight)
    kept = np.ones(segments.num_segments, dtype=bool)
    if budget.activation_tokens is not None:
        kept = choose_kept_segments(segments, budget.activation_tokens, pipeline.num_stages)
    return StepChoice(segments, kept, in_flight, np.nan)


def _with_token_ids(choice: StepChoice, samples: Sequence[TrainingSample]) -> StepChoice:
    """``choice`` with the samples' tokens in place of the keys from which its forest was built."""
    tree = choice.segments.tree
    stream, _ = tree.stream_indices_of(np.arange(len(samples)))
    token_ids = np.empty_like(tree.token_ids)
    token_ids[stream] = np.concatenate([sample.token_ids[: sample.needed_length] for sample in samples])
    return replace(choice, segments=replace(choice.segments, tree=replace(tree, token_ids=token_ids)))


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
        from megatron_dta.core.planning.step.packs import plan_packs

        return plan_packs(sequences, budget.segment_tokens)
    tree = build_forest(sequences, tree_mode, paths)
    if pipeline is None or pipeline.num_stages == 1:
        return plan_segments(tree, budget.segment_tokens, budget.memory_tokens)
    from megatron_dta.core.planning.pipeline.segments import plan_pipeline_segments

    return plan_pipeline_segments(
        tree,
        budget.segment_tokens,
        budget.memory_tokens,
        pipeline.num_stages,
        pipeline.max_in_flight_tokens,
        pipeline.cost_model.tokens_of_floor,
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
