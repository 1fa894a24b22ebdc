"""Timelines of pipeline stages, in one format for simulated and measured steps.

A timeline is a list of events, each an interval of one stage. It is stored as JSON with one event per line, and can be
written as a Chrome trace for chrome://tracing and Perfetto. ``extras/report/plots/timeline.py`` draws several timelines
above each other to compare a plan with its execution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import read_json, replacing
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
    for event in sorted((each for each in events if each.kind in WORK_KINDS), key=lambda each: each.start):
        busy[event.stage] += max(0.0, event.end - max(event.start, until[event.stage]))
        until[event.stage] = max(event.end, until[event.stage])
    return busy


def write_timeline(path: str | Path, events: Sequence[TimelineEvent]) -> None:
    """Write a JSON array of objects with the attributes of ``TimelineEvent``, one a line.

    Raises InputError where the file cannot be written.
    """
    _write(path, ",\n".join(json.dumps(asdict(event)) for event in events).join(("[\n", "\n]\n")))


def read_timeline(path: str | Path) -> list[TimelineEvent]:
    """Read a file of ``write_timeline``.

    Raises InputError naming the file and the invalid event.
    """
    values = read_json(path)
    if not isinstance(values, list):
        raise InputError(f"{path}: must hold one JSON array of events")
    return [_event(value, f"{path}: event {index}") for index, value in enumerate(values)]


def _event(value: object, place: str) -> TimelineEvent:
    names = [field.name for field in fields(TimelineEvent)]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        raise InputError(f"{place}: must be an object with {', '.join(names)}")
    for name in ("stage", "segment", "chunk"):
        if isinstance(value[name], bool) or not isinstance(value[name], int):
            raise InputError(f"{place}: {name} must be a whole number, not {value[name]!r}")
    for name in ("start", "end"):
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise InputError(f"{place}: {name} must be a number, not {number!r}")
    if not isinstance(value["kind"], str):
        raise InputError(f"{place}: kind must be a string, not {value['kind']!r}")
    if value["stage"] < 0 or value["end"] < value["start"]:
        raise InputError(f"{place}: has a negative stage, or ends before it starts")
    return TimelineEvent(**value)


def write_chrome_trace(path: str | Path, events: Sequence[TimelineEvent], name: str = "pipeline") -> None:
    """Write the Trace Event Format of chrome://tracing (complete events, microseconds), a thread for each stage.

    Raises InputError where the file cannot be written.
    """
    entries: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": name}}]
    for stage in sorted({event.stage for event in events}):
        entries.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": stage, "args": {"name": f"stage {stage}"}})
    for event in events:
        entries.append(
            {
                "name": event.kind if event.segment < 0 else f"{event.kind} {event.segment}",
                "cat": event.kind,
                "ph": "X",
                "pid": 0,
                "tid": event.stage,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"segment": event.segment, "chunk": event.chunk},
            }
        )
    _write(path, json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))


def _write(path: str | Path, text: str) -> None:
    with replacing(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")
