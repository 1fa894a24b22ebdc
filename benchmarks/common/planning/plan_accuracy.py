"""Compares planned steps with measured ones: predicted seconds, and where a pipeline's utilisation is lost.

``replay`` simulates the planned schedule with the measured times of its ops, which gives three utilisations:

planned    the schedule with the times of the cost model
replayed   the same schedule with the measured times; differs from the plan by the error of the cost model
measured   differs from the replay by the time of messages and by waits of a stream or the host
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import PipelineSchedule
from megatron_dta.core.planning.pipeline.simulation import Timeline, simulate
from megatron_dta.core.planning.pipeline.timeline import WORK_KINDS, TimelineEvent, busy_seconds
from megatron_dta.core.planning.step.passes import PipelineShape
from megatron_dta.core.planning.step.plan import StepPlan


def predicted_seconds(step: StepPlan, shape: PipelineShape) -> float:
    """Predicted seconds of forward and backward on one replica, recomputation included.

    Work after the last backward (gradient reduction, optimizer) is not included.
    """
    segments = step.segments
    costs = PipelineCosts.of_segments(
        shape.cost_model,
        segments.lengths,
        segments.attention_pairs,
        np.diff(step.segment_edges),
        shape.layers,
        ~step.training.kept,
    )
    if shape.num_stages == 1:
        return float(costs.work.sum())
    return float(simulate(step.training.schedule, segments.segment_parent, costs).makespan)


def replay(
    schedule: PipelineSchedule, segment_parent: np.ndarray | Sequence[int], events: Sequence[TimelineEvent]
) -> Timeline:
    """Simulate ``schedule`` with the measured times of its ops and instantaneous messages.

    Raises:
        ValueError: an op of the schedule was not measured.
    """
    shape = schedule.num_virtual_stages, len(segment_parent)
    times = {kind: np.full(shape, np.nan) for kind in ("F", "B")}
    for event in events:
        if event.kind in times:
            times[event.kind][schedule.virtual_stage(event.stage, event.chunk), event.segment] = event.end - event.start
    ran = {op.kind.value for ops in schedule.ops for op in ops}
    for kind, values in times.items():
        if kind in ran and np.isnan(values).any():
            v, segment = np.argwhere(np.isnan(values))[0]
            raise ValueError(f"{kind}({segment}) of virtual stage {v} was not measured")
    forward, backward = (np.nan_to_num(times[kind]) for kind in ("F", "B"))
    return simulate(schedule, segment_parent, PipelineCosts(forward, backward))


def stage_seconds(events: Sequence[TimelineEvent], num_stages: int) -> tuple[list[float], list[float]]:
    """Return the seconds that each stage computed, and that it waited for messages."""
    waited = [0.0] * num_stages
    for event in events:
        if event.kind not in WORK_KINDS:
            waited[event.stage] += event.end - event.start
    return busy_seconds(events, num_stages), waited
