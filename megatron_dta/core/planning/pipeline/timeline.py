"""Timelines of pipeline stages, simulated or measured: events, each an interval of one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dta.core.planning.pipeline.schedule import PipelineSchedule
from megatron_dta.core.planning.pipeline.simulation import Timeline

# Kinds of a schedule's ops. Other kinds in measured timelines do not count as work.
WORK_KINDS = ("F", "B")


@dataclass(frozen=True)
class TimelineEvent:
    """An interval of one stage.

    Attributes:
        stage: pipeline rank.
        kind: "F" or "B" as in ``OpKind``, or the name of another activity.
        segment: segment of the op; -1 if there is none.
        chunk: model chunk of the stage.
        start, end: seconds from the start of the step.
    """

    stage: int
    kind: str
    segment: int
    chunk: int
    start: float
    end: float


def timeline_events(schedule: PipelineSchedule, timeline: Timeline) -> list[TimelineEvent]:
    """The events of a simulated schedule, stage by stage in the order of their ops."""
    return [
        TimelineEvent(stage, op.kind.value, op.segment, op.chunk, float(start), float(end))
        for stage, ops in enumerate(schedule.ops)
        for op, start, end in zip(ops, timeline.start[stage], timeline.end[stage], strict=True)
    ]


def timeline_span(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    """Start of the first event and end of the last one; (0, 0) without events."""
    if not events:
        return 0.0, 0.0
    return min(event.start for event in events), max(event.end for event in events)


def timeline_utilisation(events: Sequence[TimelineEvent], num_stages: int) -> float:
    """Share of all stages' time, from the first event to the last, that ops of the schedule took; 1 without events."""
    start, end = timeline_span(events)
    return sum(busy_seconds(events, num_stages)) / (num_stages * (end - start)) if end > start else 1.0


def busy_seconds(events: Sequence[TimelineEvent], num_stages: int) -> list[float]:
    """Time in which each stage ran ops; ops that take turns share theirs."""
    busy, until = [0.0] * num_stages, [-math.inf] * num_stages
    for event in sorted((event for event in events if event.kind in WORK_KINDS), key=lambda event: event.start):
        busy[event.stage] += max(0.0, event.end - max(event.start, until[event.stage]))
        until[event.stage] = max(event.end, until[event.stage])
    return busy
