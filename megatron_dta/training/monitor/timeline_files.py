"""Files of timelines: measured ones beside the planned, in the Trace Event Format.

chrome://tracing and Perfetto open them; ``extras/report/plots/timeline.py`` draws the timelines above each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import read_json, replacing
from megatron_dta.core.planning.pipeline.timeline import WORK_KINDS, TimelineEvent


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
