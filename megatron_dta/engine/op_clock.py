"""When each op of a step really ran on this rank: the measured side of a planned timeline.

On a GPU an op's times are those of CUDA events on the stream, read after the step, so that measuring waits for nothing
within it. What an op waits for, its message from another stage, comes before its start and is an event of its own of
kind "wait", which counts as no work. An op that the host launches slower than the device runs it is as long as the
launches. What remains between events is the host's too. Time 0 is one moment for all ranks of a replica, up to the time
that a barrier takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_dta.model import Mesh
from megatron_dta.planning.pipeline.schedule import PipelineOp
from megatron_dta.planning.pipeline.timeline import TimelineEvent


class OpClock:
    """Made by all ranks of a replica just before a pass; see the top of the file."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._stage, self._on_gpu = mesh.pipeline_rank, device.type == "cuda"
        self._marks: list[tuple[str, PipelineOp, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        mesh.gather_over_replica(None)
        self._begin = self._now()

    @contextmanager
    def measure(self, op: PipelineOp) -> Iterator[None]:
        """Note when the block runs, as ``op``."""
        with self._mark(op.kind.value, op):
            yield

    @contextmanager
    def waiting(self, op: PipelineOp) -> Iterator[None]:
        """Note when the block runs, as waiting for what ``op`` needs."""
        with self._mark("wait", op):
            yield

    @contextmanager
    def _mark(self, kind: str, op: PipelineOp) -> Iterator[None]:
        start = self._now()
        yield
        self._marks.append((kind, op, start, self._now()))

    def events(self) -> list[TimelineEvent]:
        """What was measured; waits for the device."""
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
