"""When each op of a step really ran on this rank: the measured side of a planned timeline.

On a GPU an op's times are those of CUDA events on the stream, read after the step, so that measuring waits for nothing
within it. What an op waits for, its message from another stage, comes before its start. Time 0 is one moment for all
ranks of a replica, up to the time that a barrier takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_dta.model import Mesh
from megatron_dta.planning.pipeline_schedule import PipelineOp
from megatron_dta.planning.timeline import TimelineEvent


class OpClock:
    """Made by all ranks of a replica just before a pass; see the top of the file."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._stage, self._on_gpu = mesh.pipeline_rank, device.type == "cuda"
        self._marks: list[tuple[PipelineOp, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        mesh.gather_over_replica(None)
        self._begin = self._now()

    @contextmanager
    def measure(self, op: PipelineOp) -> Iterator[None]:
        """Note when the block runs, as ``op``."""
        start = self._now()
        yield
        self._marks.append((op, start, self._now()))

    def events(self) -> list[TimelineEvent]:
        """What was measured; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            TimelineEvent(self._stage, op.kind.value, op.segment, op.chunk, self._seconds(start), self._seconds(end))
            for op, start, end in self._marks
        ]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: float | torch.cuda.Event) -> float:
        return self._begin.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._begin
