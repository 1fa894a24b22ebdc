"""What a step leaves beside the gradients: its loss, metrics and counts, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_dta.planning.pipeline.timeline import TimelineEvent
from megatron_dta.planning.step.plan import StepPlan


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step, of all data-parallel ranks together; gradients are in the model's parameters.

    Counts are sums over the replicas of the model: tokens that two of them compute count twice.

    Attributes:
        loss: scalar tensor, the step's loss under the one global denominator.
        metrics: scalar tensors: means over the step's tokens that count in the loss, and largest values.
        sequence_tokens, computed_tokens, segments: tokens of the sequences counted separately, tokens of the forests,
            and the segments that they were cut into.
        peak_in_flight_tokens: most tokens whose K and V were alive at once, as run, on any rank (with several parts of
            the model on a rank, divided by their number).
        recomputed_tokens: tokens whose forward ran twice, on the pipeline stage with most.
        timeline: when each stage of this replica ran what; empty unless it was asked for.
        plan: with a timeline, the plan that was run: the batch's, with empty segments where other ranks share experts.
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
