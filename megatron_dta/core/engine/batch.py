"""Joins a step's plan with the fields of its loss: the input of the engine.

The plan depends on tokens and masks alone, so one plan serves every pass of the step. ``with_fields`` adds values that
an earlier pass computed. Fields cover trained tokens only; they are flat, in sequence order (the pairs of the plan).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.core.objectives.weights import TrainedCounts, loss_weights
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import FIELDS, TrainingSample

if TYPE_CHECKING:
    from megatron_dta.core.config import TreeConfig


@dataclass(frozen=True)
class TreeBatch:
    """Legend: P pairs of a sequence and one of its trained tokens, Q sequences.

    Attributes:
        plan: the step's plan.
        loss_mask: per sequence, bool [T].
        loss_weights: float64 [P], factor of each token's loss in the step's loss.
        fields: float64 [P] for each of ``planning.step.sample.FIELDS``, or None where the samples have none.
        num_sequences: sequences of the whole step, those of other ranks included.
        sequences: int64 [Q], number of each sequence in the whole step.
        preference_pairs: int64 [K, 2], paired sequences by these numbers; None if the objective has no pairs.
        routed_experts: int16 [stream tokens, L, K], see ``TrainingSample``; None if no sample has them.
        teachers: (plan on the device, dtype, device, context group) -> the pass that adds the divergences from teachers
            to the loss (``training.teacher_pass``); None if there are none.
    """

    plan: StepPlan
    loss_mask: list[np.ndarray]
    loss_weights: np.ndarray
    fields: dict[str, np.ndarray | None]
    num_sequences: int
    sequences: np.ndarray | None = None
    preference_pairs: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    teachers: Callable[..., Any] | None = None

    def with_fields(self, **fields: Sequence[np.ndarray]) -> TreeBatch:
        """The same batch with the given fields replaced; each field is one array [T] per sequence."""
        flat = {name: self._flat(name, arrays) for name, arrays in fields.items()}
        return replace(self, fields=self.fields | flat)

    def per_sequence(self, pairs: np.ndarray) -> list[np.ndarray]:
        """Distribute ``pairs`` [P] to one array [T] per sequence, 0 where a token is not trained."""
        outputs = []
        for mask, begin, end in zip(
            self.loss_mask, self.plan.sequence_pairs[:-1], self.plan.sequence_pairs[1:], strict=True
        ):
            values = np.zeros(len(mask), dtype=pairs.dtype)
            values[mask] = pairs[begin:end]
            outputs.append(values)
        return outputs

    def _flat(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if name not in FIELDS:
            raise ValueError(f"{name!r} is not a field of the loss; the fields are {', '.join(FIELDS)}")
        if len(arrays) != len(self.loss_mask):
            raise ValueError(f"{name}: {len(arrays)} arrays for {len(self.loss_mask)} sequences")
        return _trained(arrays, self.loss_mask)


@dataclass(frozen=True)
class StepPart:
    """The place of a rank's samples in the whole step.

    Attributes:
        counts: what the whole step trains; None if the samples are the whole step.
        sequences: numbers of the samples in the whole step; None if they are the whole step.
        preference_pairs: int [K, 2], paired samples by these numbers, for pairwise objectives.
    """

    counts: TrainedCounts | None = None
    sequences: Sequence[int] | None = None
    preference_pairs: np.ndarray | None = None


def prepare_batch(
    samples: Sequence[TrainingSample],
    tree: TreeConfig,
    loss_aggregation: str = "token-mean",
    pipeline: PipelineShape | None = None,
    loss_length: float | None = None,
    part: StepPart | None = None,
) -> TreeBatch:
    """Plan a step over ``samples``, and gather the fields of its loss.

    Args:
        tree: mode, segment size and budgets.
        loss_aggregation: one of ``objectives.weights.AGGREGATIONS``, over the whole step; not used with preference
            pairs, whose loss is the mean over the pairs.
        pipeline: the ranks that share the model (``TreeEngine.pipeline``); None if one process holds all of it. Ranks
            that share experts exchange their plans, so all of them must call this function.
        loss_length: constant length of "sequence-sum".
        part: what the whole step trains, if ``samples`` (possibly empty) are only this rank's part of it, or if its
            objective is over pairs.

    Raises:
        ValueError: a sample has no trained token, or only some samples have a field.
    """
    if tree.tree_memory_gib is not None and (pipeline is None or pipeline.memory is None):
        raise ValueError("tree_memory_gib is set: call TreeEngine.limit_memory and give pipeline=engine.pipeline(...)")
    budget = StepBudget(tree.tree_segment_tokens, tree.tree_memory_tokens, tree.tree_activation_tokens)
    plan = plan_step(samples, tree.tree_mode, budget, pipeline)
    masks = [np.asarray(sample.loss_mask, dtype=bool) for sample in samples]
    fields: dict[str, np.ndarray | None] = {}
    for name in FIELDS:
        arrays = _of_all(samples, name)
        fields[name] = None if arrays is None else _trained(arrays, masks)
    routing = _of_all(samples, "routed_experts")
    routed_experts = None if routing is None else _stream_routing(plan, routing)
    part = part or StepPart()
    counts, preference_pairs = part.counts, part.preference_pairs
    num_sequences = len(samples) if counts is None else counts.sequences
    numbers = np.arange(len(samples)) if part.sequences is None else np.asarray(part.sequences, np.int64)
    if preference_pairs is not None:
        # The loss of a pair is divided among the logprobs of both sequences: every token gets the same factor.
        loss_weights_P = np.full(plan.num_pairs, 1 / max(1, len(preference_pairs)))
    else:
        sequence_weights = np.array([sample.weight for sample in samples])
        counted = np.array([sample.num_trained for sample in samples], np.int64)
        weights = loss_weights(counted, loss_aggregation, counts, sequence_weights, loss_length)
        loss_weights_P = np.repeat(weights, np.diff(plan.sequence_pairs))
    return TreeBatch(plan, masks, loss_weights_P, fields, num_sequences, numbers, preference_pairs, routed_experts)


def _stream_routing(plan: StepPlan, routing: list[np.ndarray]) -> np.ndarray:
    from megatron_dta.core.planning.step.routing_replay import stream_routing

    return stream_routing(plan.segments.tree, routing)


def _of_all(samples: Sequence[TrainingSample], name: str) -> list[np.ndarray] | None:
    """The field of all samples; None if none has it."""
    arrays = [getattr(sample, name) for sample in samples]
    missing = [i for i, array in enumerate(arrays) if array is None]
    if 0 < len(missing) < len(samples):
        raise ValueError(f"{name} is missing in sample {missing[0]}, though other samples have it")
    return None if missing or not samples else arrays


def _trained(arrays: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> np.ndarray:
    values, mask = np.concatenate([np.zeros(0), *arrays]), np.concatenate([np.zeros(0, bool), *masks])
    return values[mask]
