"""Writes the planned and the measured timeline of a step's pipeline stages; ``megatron-dta report-run`` draws them.

DIR/step_4.json            measured events, one per line
DIR/step_4_planned.json    planned events by the cost model, if there are several stages
DIR/step_4_trace.json      both as a Chrome trace, for chrome://tracing or Perfetto
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dta.core.planning.pipeline.timeline import WORK_KINDS, TimelineEvent, write_chrome_trace, write_timeline


def write_step_timeline(path: Path, measured: Sequence[TimelineEvent], planned: Sequence[TimelineEvent]) -> None:
    """Write the files of a step; ``path`` is the prefix of their names."""
    write_timeline(path.with_name(f"{path.name}.json"), measured)
    if planned:
        write_timeline(path.with_name(f"{path.name}_planned.json"), planned)
    num_stages = 1 + max(event.stage for event in measured)
    # In one trace the planned stages come after the measured ones.
    shifted = [replace(event, stage=event.stage + num_stages) for event in scaled(planned, measured)]
    write_chrome_trace(path.with_name(f"{path.name}_trace.json"), [*measured, *shifted])


def scaled(planned: Sequence[TimelineEvent], measured: Sequence[TimelineEvent]) -> list[TimelineEvent]:
    """Scale ``planned`` to the total work of ``measured``, since the cost model's unit may not be seconds."""
    work, measured_work = (
        sum(event.end - event.start for event in events if event.kind in WORK_KINDS) for events in (planned, measured)
    )
    factor = measured_work / work if work else 1.0
    return [replace(event, start=event.start * factor, end=event.end * factor) for event in planned]
