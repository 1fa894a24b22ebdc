"""Measures when each op of a step runs on this rank, for comparison with the planned timeline.

On a GPU, the times are CUDA events on the stream. They are read after the step, so measuring adds no wait within it.
The time in which an op waits for its message from another stage comes before its start and is a separate event of kind
"wait", which does not count as work. If the host launches an op more slowly than the device runs it, the duration of
the op is that of the launches. Gaps between events are time on the host, too. Time 0 is the same moment on all ranks of
a replica, up to the duration of a barrier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.planning.pipeline.schedule import PipelineOp
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent


class OpClock:
    """Clock of one pass; all ranks of a replica must create it together, just before the pass."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._stage, self._on_gpu = mesh.pipeline_rank, device.type == "cuda"
        self._marks: list[tuple[str, PipelineOp, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        mesh.gather_over_replica(None)
        self._begin = self._now()

    def measure(self, op: PipelineOp) -> AbstractContextManager[None]:
        """Record the duration of a block as that of ``op``."""
        return self._mark(op.kind.value, op)

    def waiting(self, op: PipelineOp) -> AbstractContextManager[None]:
        """Record the duration of a block as waiting for the input of ``op``."""
        return self._mark("wait", op)

    @contextmanager
    def _mark(self, kind: str, op: PipelineOp) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((kind, op, start, self._now()))

    def events(self) -> list[TimelineEvent]:
        """The measured events; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            TimelineEvent(self._stage, kind, op.segment, op.chunk, self._seconds(start), self._seconds(end))
            for kind, op, start, end in self._marks
        ]

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: float | torch.cuda.Event) -> float:
        return self._begin.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._begin
