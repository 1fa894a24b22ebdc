"""Why a measured pipeline is less busy than its plan: the planned schedule, simulated with the times that ops took.

planned    the schedule in the cost model's times
replayed   the same schedule in the measured times of its ops: what separates it from the plan is the cost model
measured   what separates it from the replay is neither: messages on their way, a stream or host that waited
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.schedule import PipelineSchedule
from megatron_dta.planning.pipeline.simulation import Timeline, simulate
from megatron_dta.planning.pipeline.timeline import WORK_KINDS, TimelineEvent


def replay(
    schedule: PipelineSchedule, segment_parent: np.ndarray | Sequence[int], events: Sequence[TimelineEvent]
) -> Timeline:
    """Simulate ``schedule`` with the measured times of its ops, messages taking none.

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
    """Seconds that each stage computed, and that it waited for messages."""
    busy, waited = [0.0] * num_stages, [0.0] * num_stages
    for event in events:
        (busy if event.kind in WORK_KINDS else waited)[event.stage] += event.end - event.start
    return busy, waited
