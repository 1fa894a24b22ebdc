"""Defines the result of a step besides its gradients: loss, metrics and counts, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from megatron_dta.core.planning.step.plan import StepPlan

if TYPE_CHECKING:
    from megatron_dta.core.planning.pipeline.timeline import TimelineEvent


@dataclass(frozen=True)
class TokenOutputs:
    """What the model computed for the trained tokens of this rank's sequences: one array [T] each, 0 elsewhere.

    Attributes:
        logprobs: logprob of each token (a value model: the value of the state before it).
        entropy: entropy of the distribution that the token was drawn from (a value model: 0).
    """

    logprobs: list[np.ndarray]
    entropy: list[np.ndarray]


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step over all data-parallel ranks; gradients are in the model's parameters.

    Counts are sums over the replicas of the model: a token that two replicas compute counts twice.

    Attributes:
        loss: scalar tensor, the step's loss under the one global denominator.
        metrics: scalar tensors: means over the step's tokens that count in the loss, and maxima.
        sequence_tokens, computed_tokens, segments: tokens of the sequences counted separately, tokens of the forests,
            and the segments that they were cut into.
        peak_in_flight_tokens: maximum number of tokens of any rank whose K and V were alive at once, as executed; with
            several model chunks on a rank, divided by their number.
        recomputed_tokens: tokens whose forward ran twice, on the pipeline stage with the most of them.
        timeline: the time of each op on each stage of this replica; empty unless it was requested.
        plan: with a timeline, the plan that was executed: that of the batch, with empty segments where other ranks
            share experts.
        outputs: logprobs and entropies of the forward passes; None unless they were requested.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    sequence_tokens: int
    computed_tokens: int
    segments: int
    peak_in_flight_tokens: int
    recomputed_tokens: int
    timeline: list[TimelineEvent] = field(default_factory=list)
    plan: StepPlan | None = None
    outputs: TokenOutputs | None = None
