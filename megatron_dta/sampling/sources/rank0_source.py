"""Samples rollouts on rank 0, in a thread, and broadcasts them to all ranks: from servers.

The wrapped source and evaluation run as if there were one process, and their results are broadcast. Rank 0 sends the
waiting ranks a message every second, so a long rollout batch is not mistaken for a dead rank.

**Weights.** Before a rollout batch is sampled and before an evaluation, all ranks write the weights of the step to a
folder or to the host memory of rank 0. The servers get them from there, unless they already have the weights of that
step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from megatron_dta.common.futures import in_daemon_thread
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import alone, current_mesh
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.host_weights import HostWeights
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.sources.batch_source import Evaluation, RolloutError, RolloutSource

_WAIT_S, _STOP_S = 1.0, 10.0

Answer = TypeVar("Answer")


class WeightsWriter(Protocol):
    """Writes the weights for servers; implemented in ``extras.servers.weights.send``."""

    def write(self, version: int) -> Path | HostWeights | None:
        """Write the current weights; every rank calls this. Returns on the first rank what an engine takes."""

    def delete_before(self, version: int) -> None:
        """Delete earlier versions; the first rank calls this, from any thread."""

    def close(self) -> None:
        """Delete all versions; the first rank calls this."""


class Rank0Source(RolloutSource):
    """Returns the rollouts of ``inner``, which runs on rank 0, on all ranks.

    Args:
        inner, engine: the source and the engine it samples with; None on the other ranks.
        writer: writes the engine's weights, None if the engine needs none; given on all ranks or on none.
        current_step: optimizer steps done so far.
    """

    def __init__(
        self,
        inner: RolloutSource | None,
        engine: RolloutEngine | None,
        writer: WeightsWriter | None,
        current_step: Callable[[], int],
    ) -> None:
        self._mesh = current_mesh()
        self._inner, self._engine, self._writer, self._current_step = inner, engine, writer, current_step
        self._written: int | None = None
        self._updated: int | None = None
        self._offered: tuple[int, Path | HostWeights | None] | None = None
        self._working: Future[Any] | None = None
        self._statistics: dict[str, float] = {}

    def next_batch(self, step: int) -> list[Rollout]:
        current = self._current_step()
        self._offer_weights(current)
        rollouts, statistics = self._from_first(self._taking(step, current))
        self._statistics = dict(statistics)
        if self._writer is not None:
            self._statistics["rollout_staleness"] = float(current - min(r.policy_version or 0 for r in rollouts))
        return rollouts

    def statistics(self) -> dict[str, float]:
        """Statistics of the last batch, and ``rollout_staleness``: optimizer steps since its weights."""
        return self._statistics

    def timing(self) -> dict[str, float]:
        """Timing of ``inner`` for the batch that it sampled last, and the engine's counts since this process started;
        empty on ranks other than 0.
        """
        if self._engine is None:
            return {}
        inner = {} if self._inner is None else self._inner.timing()
        names = (
            "servers", "open_requests", "queued_requests", "retried_requests", "decoded_tokens", "reused_tokens",
            "weight_update_seconds", "rejected_tokens",
        )  # fmt: skip
        engine = self._engine.statistics()
        return inner | {f"rollout_{name}": engine[name] for name in names if name in engine}

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``; the same on every rank."""
        return self._mesh.from_first({} if self._inner is None else self._inner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._inner is not None:
            self._inner.load_state_dict(state)

    def close(self) -> None:
        if self._engine is None:
            return
        self._engine.interrupt()
        self._stop()
        if self._inner is not None:
            self._inner.close()
        self._engine.close()
        if self._writer is not None:
            self._writer.close()

    def call(self, job: Callable[[], Answer] | None, step: int) -> Answer:
        """Call ``job`` on rank 0 with the weights of ``step``, between two batches; its result on all ranks."""
        self._offer_weights(step)
        return self._from_first(_waiting(None if job is None else self._run(job)))

    def _taking(self, number: int, current: int) -> Callable[[], tuple[list[Rollout], dict[str, float]] | None]:
        """Start a batch that is trained after ``current`` optimizer steps; returns a function that polls for it."""
        del current
        if self._inner is None:
            return _waiting(None)
        return _waiting(self._run(lambda: (self._inner.next_batch(number), self._inner.statistics())))

    def _run(self, job: Callable[[], Answer]) -> Future[Answer]:
        """Call ``job`` in a thread, with the newest weights."""
        version, weights = self._offered

        def work() -> Answer:
            with alone():
                self._update(version, weights)
                return job()

        self._working = in_daemon_thread(work, "rollouts")
        return self._working

    def _stop(self) -> None:
        """Wait for the thread, a limited time."""
        if self._working is not None:
            wait([self._working], _STOP_S)

    def _offer(self, version: int, weights: Path | HostWeights | None) -> None:
        """Give the sampler these weights from its next work on; on rank 0."""
        self._offered = version, weights

    def _offer_weights(self, step: int) -> None:
        """Give the sampler the weights of ``step`` from its next work on."""
        if self._written == step:
            return
        weights = self._writer.write(step) if self._writer is not None else None
        self._written = step
        if self._mesh.rank == 0:
            self._offer(step, weights)

    def _update(self, version: int, weights: Path | HostWeights | None) -> None:
        if self._updated == version:
            return
        self._engine.update_weights(version, weights)
        self._updated = version
        if self._writer is not None:
            self._writer.delete_before(version)

    def _from_first(self, ask: Callable[[], Answer | None]) -> Answer:
        """The first result of ``ask`` on rank 0 that is not None, on all ranks; its errors are raised on all ranks."""
        while True:
            answer: tuple[str, Any] = ("wait", None)
            error: Exception | None = None
            if self._mesh.rank == 0:
                try:
                    value = ask()
                    answer = ("wait", None) if value is None else ("done", value)
                except InputError as caught:
                    answer, error = ("refused", str(caught)), caught
                except Exception as caught:
                    answer, error = ("failed", f"rank 0: {type(caught).__name__}: {caught}"), caught
            kind, value = self._mesh.from_first(answer)
            if kind == "done":
                return value
            if kind == "refused":
                raise RolloutError(value) from error
            if kind == "failed":
                raise error or RuntimeError(value)


def _waiting(done: Future[Answer] | None) -> Callable[[], Answer | None]:
    """A function that waits a short time for the result of ``done``, which is None on the other ranks."""

    def ask() -> Answer | None:
        try:
            return done.result(_WAIT_S)
        except TimeoutError:
            if done.done():
                raise
            return None

    return ask


class Rank0Evaluation(Evaluation):
    """Runs ``inner`` (None on the other ranks) on rank 0, between the rollout batches of ``source``."""

    def __init__(self, inner: Evaluation | None, source: Rank0Source) -> None:
        self._inner, self._source = inner, source

    def evaluate(self, step: int) -> dict[str, float]:
        return self._source.call(None if self._inner is None else lambda: self._inner.evaluate(step), step)


def pack_rollout(rollout: Rollout) -> dict[str, Any]:
    """Convert a rollout to tensors, numbers and strings; fields that are None are left out."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
        if value is not None
    }


def unpack_rollout(packed: dict[str, Any]) -> Rollout:
    return Rollout(**{name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in packed.items()})
