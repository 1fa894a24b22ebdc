"""Timelines of pipeline stages, in one format for simulated and measured steps.

A timeline is a list of events, each an interval of one stage. A file holds named timelines in the Trace Event Format,
which chrome://tracing and Perfetto open; ``extras/report/plots/timeline.py`` draws them above each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    for event in sorted((event for event in events if event.kind in WORK_KINDS), key=lambda event: event.start):
        busy[event.stage] += max(0.0, event.end - max(event.start, until[event.stage]))
        until[event.stage] = max(event.end, until[event.stage])
    return busy


def beside_plan(
    measured: Sequence[TimelineEvent], planned: Sequence[TimelineEvent]
) -> dict[str, Sequence[TimelineEvent]]:
    """Name both timelines, with planned times scaled to the measured work: the cost model's unit may not be seconds."""
    if not planned:  # There is one stage.
        return {"measured": measured}
    work, measured_work = (
        sum(event.end - event.start for event in events if event.kind in WORK_KINDS) for events in (planned, measured)
    )
    factor = measured_work / work if work else 1.0
    scaled = [replace(event, start=event.start * factor, end=event.end * factor) for event in planned]
    return {"planned": scaled, "measured": measured}


def write_timelines(path: str | Path, timelines: Mapping[str, Sequence[TimelineEvent]]) -> None:
    """Write a trace with a process for each timeline and a thread for each stage, in microseconds.

    Raises InputError where the file cannot be written.
    """
    entries: list[dict[str, object]] = []
    for process, (name, events) in enumerate(timelines.items()):
        entries.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for stage in sorted({event.stage for event in events}):
            names = {"name": f"stage {stage}"}
            entries.append({"name": "thread_name", "ph": "M", "pid": process, "tid": stage, "args": names})
        for event in events:
            times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6, "args": asdict(event)}
            label = event.kind if event.segment < 0 else f"{event.kind} {event.segment}"
            entries.append({"name": label, "ph": "X", "pid": process, "tid": event.stage, **times})
    with replacing(Path(path)) as temporary:
        temporary.write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")


def read_timelines(path: str | Path) -> dict[str, list[TimelineEvent]]:
    """Read a file of ``write_timelines``; raises InputError where it is none."""
    trace = read_json(path)
    try:
        timelines: dict[int, tuple[str, list[TimelineEvent]]] = {}
        for entry in trace["traceEvents"]:
            if entry["name"] == "process_name":
                timelines[entry["pid"]] = (str(entry["args"]["name"]), [])
            elif entry["ph"] == "X":
                event = TimelineEvent(**entry["args"])
                if event.stage < 0 or not 0 <= event.end - event.start < math.inf:
                    raise ValueError(f"{event} has a negative stage, or ends before it starts")
                timelines[entry["pid"]][1].append(event)
        return dict(timelines.values())
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a timeline of a step ({type(error).__name__}: {error})") from None
