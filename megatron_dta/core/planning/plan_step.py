"""Plans a step from its samples: the forest, its segments, what is recomputed, and the passes, equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.extensions import EXPERT_PARALLEL
from megatron_dta.core.planning.segments.cut import default_memory_tokens
from megatron_dta.core.planning.step.choice import DEFAULT_SEGMENT_TOKENS, SIZES, choose_kept_of, choose_step
from megatron_dta.core.planning.step.evaluate import StepChoice
from megatron_dta.core.planning.step.modes import build_forest, plan_forest
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan, plan_segmented_step
from megatron_dta.core.planning.step.sample import TrainingSample


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
    lengths = [sample.needed_length() for sample in samples]
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
    lengths = [sample.needed_length() for sample in samples]
    sequences = [sample.keys[:length] for sample, length in zip(samples, lengths, strict=True)]
    masks = [sample.loss_mask[:length] for sample, length in zip(samples, lengths, strict=True)]
    known = [sample.path for sample in samples if sample.path is not None]
    paths = known if len(known) == len(samples) else None
    is_free = pipeline.memory is not None or (budget.segment_tokens is None and pipeline.is_measured)
    if (is_free or pipeline.num_stages > 1) and tree_mode != "packed":
        return choose_step(build_forest(sequences, tree_mode, paths), masks, pipeline, budget)
    size = budget.segment_tokens or DEFAULT_SEGMENT_TOKENS * pipeline.context_size
    segments = plan_forest(sequences, tree_mode, replace(budget, segment_tokens=size), pipeline, paths)
    choice = choose_kept_of(segments, masks, pipeline, budget.activation_tokens)
    in_flight = 0 if tree_mode == "packed" else budget.memory_tokens or default_memory_tokens(segments.tree, size)
    return replace(choice, memory_tokens=in_flight)


def _with_token_ids(choice: StepChoice, samples: Sequence[TrainingSample]) -> StepChoice:
    """``choice`` with the samples' tokens in place of the keys from which its forest was built."""
    tree = choice.segments.tree
    stream, _ = tree.stream_indices_of(np.arange(len(samples)))
    token_ids = np.empty_like(tree.token_ids)
    token_ids[stream] = np.concatenate([sample.token_ids[: sample.needed_length()] for sample in samples])
    return replace(choice, segments=replace(choice.segments, tree=replace(tree, token_ids=token_ids)))
