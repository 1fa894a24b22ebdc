"""Samples groups of rollouts without a break, in a thread, while training continues and the weights change.

A group is a prompt with its samples. Groups are numbered; the number decides the prompt and the random numbers.

    admitted -> sampled by the servers -> scored -> finished -> taken for a rollout batch, or dropped as too old

**Admission.** A group may begin when, of all groups that are admitted and not taken, enough others fill the rollout
batches before it: the batch in which it has its place must be trained at most ``max_staleness`` steps after the newest
weights. This bounds both the age of rollouts and the number of open requests.

**Weights** change while groups are sampled. Each token has the version that sampled it, and the age of a rollout is
that of its oldest token.

**Batches** are made of the groups that are finished. A long group may therefore miss the batch of its place and become
too old. So the oldest groups are taken first, and training waits if taking a batch now would leave a group without a
place before it is too old: none is lost. Only a run that continues with a lower bound drops rollouts; it counts them.

**Checkpoints** hold the finished groups and, of the others, the finished requests and the tokens so far, with which a
resumed run continues. So every group is taken once, or dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.stream.begun_group import BegunGroup
from megatron_dta.extras.servers.stream.group_sampler import GroupSampler
from megatron_dta.sampling.host_weights import HostWeights
from megatron_dta.sampling.interface import GenerationResult
from megatron_dta.sampling.sources.batch_source import RolloutError

_POLL_S = 0.05


@dataclass(frozen=True)
class StreamLimits:
    """How groups form batches.

    Attributes:
        groups: groups of a rollout batch.
        steps: optimizer steps that train one batch.
        max_staleness: maximum number of optimizer steps between a token's weights and the first step that trains it.
        num_rollout_batches: number of batches that the run needs; no further one is begun ahead.
    """

    groups: int
    steps: int
    max_staleness: int
    num_rollout_batches: int


def choose_groups(
    finished: Mapping[int, int], begun: Sequence[int], step: int, limits: StreamLimits
) -> list[int] | None:
    """The groups of the batch that is trained from ``step``; None: wait for others.

    Args:
        finished: versions of finished groups, in the order in which they were finished; none is too old.
        begun: versions of the others.
    """
    if len(finished) < limits.groups:
        return None
    # The sort is stable: among equals the group that was finished first.
    chosen = sorted(finished, key=finished.__getitem__)[: limits.groups]

    def batches_left(version: int) -> int:
        return (version + limits.max_staleness - step) // limits.steps

    # Older groups that are not finished must find places in the batches after this one.
    for later in range(batches_left(finished[chosen[-1]])):
        if sum(batches_left(version) <= later for version in begun) > later * limits.groups:
            return None
    return chosen


@dataclass
class _Group(BegunGroup):
    """A group whose requests are sent."""

    scored: Future[list[Rollout]] | None = None


class RolloutStream:
    """See the module's docstring; used by one thread besides its own.

    Args:
        sampler: samples and scores groups; only the stream's thread uses it.
        update: gives the sampler the weights of a version, also while it samples.
    """

    def __init__(
        self, sampler: GroupSampler, update: Callable[[int, Path | HostWeights | None], None], limits: StreamLimits
    ) -> None:
        self._update = update
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._offered: tuple[int, Path | HostWeights | None] | None = None
        self._loaded: int | None = None
        self._error: BaseException | None = None
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="rollout stream", daemon=True)
        self._sampler, self._limits = sampler, limits
        self._open: dict[int, _Group] = {}
        # In the order in which they were finished.
        self._finished: dict[int, list[Rollout]] = {}
        self._again: deque[int] = deque()
        # What an earlier process has sampled of some of these.
        self._begun: dict[int, BegunGroup] = {}
        self._next_group = 0
        self._dropped = {"stale_rollouts": 0, "failed_groups": 0}
        # The batch that is taken next, the step from which it is trained, and whether training waits for it.
        self._batch, self._step, self._is_wanted = 0, 0, False
        self._is_begun = False
        self._failed_in_row = 0
        self._to_score: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Unlike those of a pool, daemon threads do not keep a process from ending when a reward function hangs.
        self._scoring = threading.Thread(target=self._score, name="rollout rewards", daemon=True)

    def offer(self, version: int, weights: Path | HostWeights | None) -> None:
        """Offer the weights of ``version``; the sampler gets the newest ones."""
        with self._changed:
            self._offered = version, weights
            self._changed.notify_all()

    def run(self, job: Callable[[], Any]) -> Future[Any]:
        """Call ``job`` in the thread, with the newest weights, while nothing is sampled."""
        done: Future[Any] = Future()
        with self._changed:
            if self._error is not None:
                done.set_exception(self._error)
                return done
            self._jobs.append((job, done))
            self._start()
            self._changed.notify_all()
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread, waiting up to ``timeout_s`` for its current work. May be called twice."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def take(self, number: int, step: int, timeout_s: float) -> tuple[list[Rollout], dict[str, float]] | None:
        """Wait for batch ``number``, whose training starts after ``step`` optimizer steps.

        Returns:
            The rollouts and their statistics; None if they are not there after ``timeout_s``; then call again.

        Raises:
            Exception: the error that ended the thread.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            self._batch, self._step, self._is_wanted = number, step, True
            self._start()
            while self._error is None:
                chosen = self._chosen()
                if chosen is not None:
                    break
                # The thread may be waiting: a wanted batch, or groups dropped as too old, let it admit others.
                self._changed.notify_all()
                if time.monotonic() >= end:
                    return None
                self._changed.wait(end - time.monotonic())
            else:
                raise self._error
            rollouts = [rollout for group in sorted(chosen) for rollout in self._finished.pop(group)]
            statistics = self._statistics(rollouts)
            self._batch, self._step, self._is_wanted = number + 1, step + self._limits.steps, False
            self._changed.notify_all()
        return rollouts, statistics

    def state_dict(self) -> dict[str, Any]:
        """The finished groups, the numbers of those that are not, and what is sampled of these."""
        so_far = self._sampler.sampled_so_far()
        with self._changed:
            begun = {
                number: BegunGroup(group.version, dict(group.results), so_far.get(number, group.responses))
                for number, group in self._open.items()
            }
            return {
                "begun": self._begun | begun,
                "finished": dict(self._finished),
                "unfinished": sorted([*self._open, *self._again]),
                "next_group": self._next_group,
                "dropped": dict(self._dropped),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned; call before any other method."""
        self._finished = dict(state["finished"])
        self._again = deque(state["unfinished"])
        self._begun = dict(state["begun"])
        self._next_group, self._dropped = state["next_group"], dict(state["dropped"])

    def _chosen(self) -> list[int] | None:
        """The groups of the wanted batch; None while it is incomplete. Drops rollouts that are too old for it."""
        oldest = self._step - self._limits.max_staleness
        for number, group in list(self._finished.items()):
            fresh = [rollout for rollout in group if rollout.policy_version >= oldest]
            # A lone rollout has nothing to be compared with.
            kept = fresh if len(fresh) > 1 or len(fresh) == len(group) else []
            self._dropped["stale_rollouts"] += len(group) - len(kept)
            if kept:
                self._finished[number] = kept
            else:
                del self._finished[number]
        versions = {
            number: min(rollout.policy_version for rollout in group) for number, group in self._finished.items()
        }
        # Those of an earlier process may not have been admitted yet.
        begun = [group.version for group in (*self._open.values(), *self._begun.values())]
        return choose_groups(versions, begun, self._step, self._limits)

    def _statistics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Metrics of a batch, with the groups and rollouts dropped since the last one."""
        versions = [rollout.token_versions[rollout.loss_mask] for rollout in rollouts]
        step = self._step
        statistics = {
            "token_staleness": float(step - np.mean(np.concatenate(versions))),
            "mixed_rollouts": float(np.mean([of_tokens.min() < of_tokens.max() for of_tokens in versions])),
            "unfinished_groups": float(len(self._open)),
            **{name: float(count) for name, count in self._dropped.items()},
        }
        self._dropped = dict.fromkeys(self._dropped, 0)
        return statistics | self._sampler.statistics()

    def _may_admit(self) -> bool:
        if self._offered is None or not self._is_begun or self._jobs:
            return False
        ahead = (len(self._open) + len(self._finished)) // self._limits.groups
        if self._batch + ahead >= self._limits.num_rollout_batches and not (self._is_wanted and ahead == 0):
            return False
        return self._step + ahead * self._limits.steps - self._offered[0] <= self._limits.max_staleness

    def _start(self) -> None:
        """Start the threads if they may run and do not yet."""
        self._is_begun = True
        if not self._thread.is_alive() and self._error is None and not self._stops:
            self._thread.start()
            self._scoring.start()

    def _load_offered(self, offered: tuple[int, Path | HostWeights | None] | None) -> None:
        """Give the sampler these weights unless it has them."""
        if offered is not None and offered[0] != self._loaded:
            self._update(*offered)
            self._loaded = offered[0]

    def _run_job(self) -> None:
        """Run the job that waits longest."""
        with self._changed:
            job, done = self._jobs.popleft()
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
            raise

    def _run(self) -> None:
        with alone():
            try:
                self._sampler.begin()
                while self._work():
                    pass
            except BaseException as error:
                with self._changed:
                    self._error = error
                    for _, done in self._jobs:
                        done.set_exception(error)
                    self._jobs.clear()
                    self._changed.notify_all()
        self._to_score.put(None)

    def _score(self) -> None:
        while (work := self._to_score.get()) is not None:
            work()

    def _work(self) -> bool:
        """Admit groups, collect results, load weights or run a job; False if the thread must end."""
        with self._changed:
            while not (self._stops or self._has_work()):
                self._changed.wait()
            if self._stops:
                return False
            offered = self._offered
        self._load_offered(offered)
        self._admit()
        if self._sampler.num_open:
            self._receive(self._sampler.poll(_POLL_S))
        elif self._jobs and not self._open:
            self._run_job()
            self._sampler.begin()
        else:
            with self._changed:
                self._changed.wait(_POLL_S)
        self._finish()
        return True

    def _has_work(self) -> bool:
        is_new = self._offered is not None and self._offered[0] != self._loaded
        return bool(is_new or self._open or self._jobs or self._may_admit())

    def _admit(self) -> None:
        with self._changed:
            # Only with weights that the servers have.
            while self._offered is not None and self._offered[0] == self._loaded and self._may_admit():
                number = self._again.popleft() if self._again else self._next_group
                self._next_group = max(self._next_group, number + 1)
                begun = self._begun.pop(number, BegunGroup(self._loaded))
                # A continued run may have fewer samples.
                kept = {sample: result for sample, result in begun.results.items() if sample < self._sampler.samples}
                self._open[number] = _Group(begun.version, kept, begun.responses)
                self._sampler.submit(number, self._open[number])
                self._score_if_whole(number)

    def _receive(self, results: list[GenerationResult]) -> None:
        for result in results:
            number, sample = self._sampler.sample_of(result.request_id)
            self._open[number].results[sample] = result
            self._score_if_whole(number)

    def _score_if_whole(self, number: int) -> None:
        group = self._open[number]
        if len(group.results) == self._sampler.samples:
            ordered = [group.results[i] for i in range(self._sampler.samples)]
            group.scored = Future()
            self._to_score.put(partial(self._score_group, number, ordered, group.scored))

    def _score_group(self, number: int, results: list[GenerationResult], scored: Future[list[Rollout]]) -> None:
        try:
            scored.set_result(self._sampler.score(number, results))
        except Exception as error:
            scored.set_exception(error)

    def _finish(self) -> None:
        with self._changed:
            for number, group in list(self._open.items()):
                if group.scored is None or not group.scored.done():
                    continue
                rollouts = group.scored.result()
                del self._open[number]
                self._failed_in_row = 0 if rollouts else self._failed_in_row + 1
                if rollouts:
                    self._finished[number] = rollouts
                else:
                    self._dropped["failed_groups"] += 1
                if self._failed_in_row >= self._limits.groups:
                    why = self._sampler.last_failure
                    raise RolloutError(f"every reward of {self._failed_in_row} groups has failed; the last one: {why}")
                self._changed.notify_all()
