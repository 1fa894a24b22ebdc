"""Samples rollout batches in a thread during training, with a bound on the age of their weights.

    training                          prefetcher
    offers weights of step v   ---->  newest offered weights
    takes batch k              <----  sampled batches: k, k + 1, ...

Batch k is trained from some step u(k) on. It may be sampled with weights of version v as soon as
u(k) - v <= max_staleness, and it is sampled with the newest weights available at that time. With a bound of 0 this
holds only while training waits for the batch, so sampling and training alternate. Weights change only between batches,
so all tokens of a batch have one version, their ``policy_version``.

Example: with one step per batch, u(k) = k. With max_staleness 1 and weights of version 4, batches 4 and 5 may be
sampled; batch 6 waits for version 5.

An error ends the thread and is raised by the next call of ``take``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.host_weights import HostWeights
from megatron_dta.sampling.sources.sampling_thread import SamplingThread


class RolloutPrefetcher(SamplingThread):
    """Samples rollout batches ahead of training in its own thread.

    Args:
        collect: samples the batch with the given number; called in the thread, one at a time.
        update: gives the sampler the weights of a version; called in the thread, between batches.
        steps_per_rollout_batch: optimizer steps that train one batch.
        max_staleness: maximum number of optimizer steps between a batch's weights and the first step that trains it.
        num_rollout_batches: number of batches that the run needs; no further one is started ahead.
    """

    def __init__(
        self,
        collect: Callable[[int], list[Rollout]],
        update: Callable[[int, Path | HostWeights | None], None],
        steps_per_rollout_batch: int,
        max_staleness: int,
        num_rollout_batches: int,
    ) -> None:
        super().__init__("rollout prefetcher", update)
        self._collect = collect
        self._steps, self._max_staleness, self._num_rollout_batches = (
            steps_per_rollout_batch,
            max_staleness,
            num_rollout_batches,
        )
        self._ready: dict[int, list[Rollout]] = {}
        # Batch and step of the last call of ``take``, from which the steps of the other batches follow.
        self._place: tuple[int, int] | None = None
        self._next = 0

    def take(self, number: int, step: int, timeout_s: float) -> list[Rollout] | None:
        """Wait for batch ``number``, whose training starts after ``step`` optimizer steps.

        Returns:
            The rollouts, or None if they are not ready after ``timeout_s``; then call again.

        Raises:
            Exception: the error that ended the thread.
        """
        with self._changed:
            if self._place is None:
                # The restored batches may come from a run with a higher bound.
                oldest = min((r.policy_version or 0 for r in self._ready.get(number, ())), default=step)
                if self._offered is not None and step - oldest > self._max_staleness:
                    self._ready.clear()
            self._place = number, step
            if number not in self._ready and self._next != number:
                self._ready.clear()
                self._next = number
            self._start()
            self._changed.notify_all()
            self._wait(lambda: number in self._ready, timeout_s)
            return self._ready.pop(number, None)

    def finish_begun(self, timeout_s: float) -> bool:
        """Whether all batches that the bound allows so far are sampled; waits up to ``timeout_s`` for them."""
        with self._changed:
            self._wait(lambda: not self._may_begin(), timeout_s)
            return not self._may_begin()

    def ready(self) -> dict[int, list[Rollout]]:
        """The batches that are sampled but not taken, by number."""
        with self._changed:
            return dict(self._ready)

    def restore(self, ready: Mapping[int, list[Rollout]]) -> None:
        """Start with batches of an earlier run, which have consecutive numbers; call before any other method."""
        self._ready = dict(ready)
        self._next = max(ready, default=-1) + 1

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``condition`` holds; raise the thread's error if there is one and it does not hold."""
        end = time.monotonic() + timeout_s
        while not condition() and self._error is None and time.monotonic() < end:
            self._changed.wait(end - time.monotonic())
        if self._error is not None and not condition():
            raise self._error

    def _may_begin(self) -> bool:
        """Whether the next batch may be sampled with the newest weights."""
        if self._offered is None or self._place is None:
            return False
        number, step = self._place
        # A requested batch is always sampled: if batches contain less to train than planned, a run needs more of them.
        if self._next >= self._num_rollout_batches and self._next != number:
            return False
        return step + (self._next - number) * self._steps - self._offered[0] <= self._max_staleness

    def _work(self) -> bool:
        """Run one job or sample one batch; False if the thread must end."""
        with self._changed:
            while not (self._stops or self._jobs or self._may_begin()):
                self._changed.wait()
            if self._stops:
                return False
            has_job, offered, number = bool(self._jobs), self._offered, self._next
        self._load_offered(offered)
        if has_job:
            self._run_job()
            return True
        rollouts = self._collect(number)
        with self._changed:
            self._ready[number] = rollouts
            self._next = number + 1
            self._changed.notify_all()
        return True
