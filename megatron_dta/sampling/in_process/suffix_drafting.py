"""Proposes drafts from suffix trees of recent samples (``megatron_dta.sampling.speculation``).

The prompt identifies the problem of a request, so the branches of a tree and the turns of an episode share their
drafts. The length of a response is the length of its whole path; it is known when a request ends that no other request
continues. Evaluations have separate trees.

A clock decides which rounds ask for drafts (``speculation.clock``). Before it tries drafts there are no trees: complete
samples are kept as arrays, which the speculator learns when a trial begins, and requests have no slots. A round of a
trial opens slots for its rows, which inserts what is known of their problems. Trees are dropped when drafts have lost.

A checkpoint holds the recent samples of all replicas (``_share``), so those of the first replica serve any number of
replicas. What is sampled does not depend on them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.sampling.in_process.drafting import FREE_TOKENS, Drafting, Round
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.clock import DraftingClock, PlainEnd, PlainSchedule
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Proposal, Speculator
from megatron_dta.sampling.speculation.waiting_samples import WaitingSamples

_STATE = "speculation"
_INSERT_SECONDS = 3e-6
"""Assumed seconds to insert a token, or to learn a sample."""


@dataclass(eq=False, slots=True)
class _Path(PlainEnd):
    """The position of a request on the path of its response.

    Attributes:
        problem: digest of the prompt.
        is_branch: the problem's tree contains the prompt already.
        before: tokens of the response that were sampled before this request.
        above: the request that this one continues.
        length: sampled tokens of the response at the request's end; None while it runs and once it was counted.
        is_continued: another request continues this one from its end.
    """

    problem: str
    is_branch: bool
    before: int
    above: _Path | None
    length: int | None = None
    is_continued: bool = False


class SuffixDrafting(Drafting):
    """Drafts from a ``Speculator``.

    follows_clock: if False, gate and costs of ``speculator`` decide, so that repeated runs make the same drafts.
    """

    def __init__(self, speculator: Speculator, follows_clock: bool = True) -> None:
        self.speculator, self.follows_clock = speculator, follows_clock
        self._phase = speculator  # the speculator of the present phase
        self._begins = True  # the phase has had no drafts
        self._policy_version: int | None = None
        speculator.gate.decides, speculator.gate.free_tokens = not follows_clock, FREE_TOKENS * follows_clock
        self._clock = DraftingClock() if follows_clock else None
        self._is_shared = self._evaluates = False
        self._slots: dict[Request, int] = {}
        self._paths: dict[Request, _Path | None] = {}  # running and held requests; None until it is needed
        self._proposal: Proposal | None = None
        self._last: Round | None = None
        self._rows: list[PlainEnd] = []  # of the last round, once drafts were asked for
        self._opened: tuple[list[Request], np.ndarray] = [], np.zeros(0, np.int64)  # rows and slots of the last drafts
        # Of the last round that was verified: whether it asked for drafts; and the proposal of one that was not yet.
        self._asked, self._sampled = False, None
        self._schedule = PlainSchedule()
        self._inserted = 0, 0.0  # tokens and seconds in this round
        self._digests: dict[int, tuple[str, np.ndarray]] = {}  # of prompts, by the identity of their arrays
        self._waiting = WaitingSamples()
        # Complete samples that have not been shared with the other replicas yet.
        self._unshared: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._unshared_lengths: list[tuple[str, int]] = []

    def report(self) -> SpeculationReport:
        """The report of the rollout batch so far."""
        report = self.speculator.current_report()
        report.saved_seconds = None if self._clock is None else self._clock.saved
        report.drafter_tokens += self._waiting.tokens
        return report

    def started(self, params: SamplingParams) -> None:
        self._evaluates = params.domain is Domain.EVALUATION
        self._phase = self.speculator.unlearned() if self._evaluates else self.speculator
        self._begins, self._schedule = True, PlainSchedule()

    def ended(self) -> None:
        if self._clock is not None:
            self._clock.end_phase(self._schedule)
            if not self._clock.is_on and self._slots:
                self._drop_trees()
        self._end_paths()
        if self._is_shared and not self._evaluates:
            self._share()

    def submitted(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._paths[request] = None if request.parent is None else self._path(request)

    def _path(self, request: Request) -> _Path:
        if (path := self._paths.get(request)) is not None:
            return path
        generation, parent = request.generation, request.parent
        above = self._path(parent) if parent in self._paths else None
        if above is not None and request.common_with_parent >= parent.num_tokens:
            above.is_continued = True
        length = generation.prompt_length
        if length is None and above is not None:
            problem, is_branch = above.problem, True
        else:
            is_branch = length is not None and length < len(generation.token_ids)
            problem = self._problem(generation.token_ids, length)
        path = self._paths[request] = _Path(
            above and above.seconds, problem, is_branch, generation.sampled_before, above
        )
        return path

    def _problem(self, token_ids: np.ndarray, length: int | None) -> str:
        """Digest of the prompt; the samples of a group have the same array."""
        if length is not None and length < len(token_ids):
            return _digest(token_ids[:length])
        if id(token_ids) not in self._digests:
            self._digests[id(token_ids)] = _digest(token_ids), token_ids
        return self._digests[id(token_ids)][0]

    @property
    def asks_next(self) -> bool:
        return self._clock is None or self._clock.asks

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._begins and self._clock is not None and not self._clock.goes_on(self._insert_seconds()):
            self._drop_trees()
            return np.zeros((len(rows), 0), np.int32), np.zeros(len(rows), np.int64)
        self._begins = False
        if self._opened[0] != rows:
            self._opened = list(rows), self._open(rows)
        self._proposal = proposal = self._phase.propose(self._opened[1], most)
        return proposal.tokens, proposal.lengths

    def sampled(self, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self._phase.append_sampled(self._proposal, tokens, offsets)
        self._sampled, self._proposal = self._proposal, None

    def verified(self, done: Round) -> None:
        self._last = done
        proposal, is_appended, self._sampled = self._sampled, self._sampled is not None, None
        if not is_appended:
            proposal, self._proposal = self._proposal, None
        self._asked = proposal is not None
        is_counted = self._asked or not self._schedule.is_plain
        self._rows = [self._path(request) for request in done.rows] if is_counted else []
        counts = np.fromiter(map(len, done.appended), np.int64)
        if done.drafted is not None:
            proposal.lengths[:] = done.drafted
            # The last token of each row was sampled, not drafted, even if a longer draft contained it.
            accepted, offsets = np.minimum(counts - 1, done.drafted), np.concatenate([[0], np.cumsum(counts)])
            tokens = np.concatenate(done.appended, dtype=np.int32)
            self._phase.record(proposal, accepted, tokens, offsets, done.seconds, is_appended)
        elif self._clock is None or self._slots:
            self._phase.record_burst(self._open(done.rows, counts.tolist()), done.appended, done.seconds)
        else:
            self._phase.report.add_burst(counts, done.seconds)

    def ran(self, seconds: float) -> None:
        done, self._last = self._last, None
        if done is None:
            return
        (inserted, spent), self._inserted = self._inserted, (0, 0.0)
        if self._clock is not None:
            self._clock.spend(spent, inserted * _INSERT_SECONDS)
            self._tell(self._clock, done, seconds - spent)
            if not self._clock.is_on and self._slots and self._proposal is None:
                self._drop_trees()

    def _tell(self, clock: DraftingClock, done: Round, seconds: float) -> None:
        """Tell the clock of a round, and begin a trial that is due."""
        passes, live, asked = done.decoding_passes, len(done.rows), self._asked
        if passes and (asked or not done.captured):
            if not asked and self._schedule.is_plain:
                self._schedule.skip(seconds)
            else:
                counts = [len(tokens) for tokens in done.appended]
                plain = clock.rate(False, live) if asked else None
                self._schedule.advance(self._rows, counts, plain or seconds / max(counts), seconds)
            if asked and done.captured:
                self._schedule.captured += seconds
                clock.captured(seconds)
        if passes and not done.captured:
            clock.took(live, passes if done.drafted is None else self._phase.progress, seconds, asked)
        if clock.is_due:
            clock.begin(self._insert_seconds())
            self._begins = False

    def _insert_seconds(self) -> float:
        """About how long it takes to insert what the running requests need; learns what waits."""
        self._learn_waiting()
        running = [request for request in self._paths if request.is_running and request not in self._slots]
        tokens = sum(map(self._phase.drafter.missing_tokens, {self._path(request).problem for request in running}))
        return _INSERT_SECONDS * (tokens + sum(len(request.response) for request in running))

    def _drop_trees(self) -> None:
        self._opened = [], np.zeros(0, np.int64)
        self._slots.clear()
        self._phase.drop_trees()

    def _learn_waiting(self) -> None:
        if len(self._waiting) and self._phase is self.speculator:  # evaluations have another one
            began, count = time.perf_counter(), len(self._waiting)
            self._waiting.learn(self.speculator, lambda prompt: self._problem(prompt, None))
            self._inserted = self._inserted[0] + count, self._inserted[1] + time.perf_counter() - began

    @property
    def _is_plain(self) -> bool:
        """Whether nothing of a whole response must be known when it ends."""
        return self._clock is not None and self._schedule.is_plain and not (self._evaluates or self._is_shared)

    def _is_whole(self, request: Request) -> bool:
        """Whether the request is a response of its own, of which the speculator knows nothing yet."""
        generation = request.generation
        is_whole = request.parent is None and not generation.hold and generation.prompt_length is None
        return is_whole and self._paths[request] is None and request not in self._slots

    def finished(self, requests: Sequence[Request]) -> None:
        whole = dict.fromkeys(filter(self._is_whole, requests) if self._is_plain else ())
        if whole:
            responses = [request.response for request in whole]
            self._waiting.add(self._policy_version or 0, [request.generation.token_ids for request in whole], responses)
            lengths, nothing = list(map(len, responses)), [0] * len(whole)
            self._phase.report.add_samples(lengths, lengths, nothing, nothing)
            for request in whole:
                del self._paths[request]
        if others := [request for request in requests if request not in whole]:
            self._learn_waiting()
        for request in others:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        path, response, slot = self._path(request), request.response, self._slots.pop(request, None)
        path.length = path.before + len(response)
        self._schedule.ended.append(path)
        # The trees need only the end of a branch's context.
        first = request.context_length - self._phase.drafter.params.depth if path.is_branch else 0
        context = request.tokens[max(0, first) : request.context_length]
        if slot is not None:
            self._phase.end_request(slot)
        else:
            self._phase.learn(path.problem, context, response)
            length = [len(response)]
            self._phase.report.add_samples(length, length, [0], [0])
        if self._is_shared and self._phase is self.speculator:
            self._unshared.append((path.problem, context.copy(), response.copy()))
        if not request.generation.hold:
            self._end_path(self._paths.pop(request))

    def _end_path(self, path: _Path) -> None:
        """Record the length of a response that ends with this request, once."""
        if path.length is not None and not path.is_continued:
            self._phase.learn_length(path.problem, path.length)
            if self._is_shared and self._phase is self.speculator:
                self._unshared_lengths.append((path.problem, path.length))
        path.length = None

    def _end_paths(self) -> None:
        for path in filter(None, self._paths.values()):
            self._end_path(path)
        self._phase = self.speculator
        self._digests.clear()

    def abandoned(self) -> None:
        self._drop_trees()
        self._paths.clear()
        self._proposal = self._sampled = None

    def released(self, request: Request) -> None:
        if (path := self._paths.pop(request, None)) is not None:
            self._end_path(path)

    def weights_changed(self, policy_version: int) -> None:
        if policy_version == self._policy_version:  # another round of the same rollout batch
            return
        self._policy_version, self._is_shared = policy_version, current_mesh().data_size > 1
        if self._clock is not None:
            # The ranks of a replica must make the same drafts.
            if (mesh := current_mesh()).tensor_size * mesh.pipeline_size > 1:
                self._clock.share(mesh.gather_over_replica(self._clock.rates())[0])
            self._clock.begin_batch()
        # The rollouts so far used the previous weights.
        self._end_paths()
        self.speculator.end_step(policy_version - 1)
        params = self.speculator.drafter.params
        self._waiting.drop(policy_version - 1 - params.window, params.max_tokens)
        if self._clock is None:
            self.speculator.drafter.insert_all()

    def _share(self) -> None:
        """Add what the other replicas have sampled in this phase. Collective over all ranks."""
        speculator, mesh = self.speculator, current_mesh()
        unshared = self._unshared, self._unshared_lengths
        self._unshared, self._unshared_lengths = [], []
        for replica, (samples, lengths) in enumerate(mesh.gather_over_data(unshared)):
            if replica != mesh.data_rank:
                for problem, context, response in samples:
                    speculator.learn(problem, context, response)
                for problem, length in lengths:
                    speculator.learn_length(problem, length)

    def state_dict(self) -> dict[str, Any]:
        self._learn_waiting()
        arrays = self.speculator.state_dict()
        state = {key: x.tolist() if x.dtype.kind == "U" else torch.tensor(x) for key, x in arrays.items()}
        # The replicas differ in acceptance estimates and insertion order, so all ranks keep the first one's state.
        return {_STATE: current_mesh().from_first(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        arrays = {key: np.array(value) for key, value in state.get(_STATE, {}).items()}
        if arrays:
            self.speculator.load_state_dict(arrays)

    def timing(self) -> dict[str, float]:
        return self.report().metrics()

    def _open(self, rows: Sequence[Request], new: Sequence[int] | None = None) -> np.ndarray:
        """The slots of ``rows``, int64 [n]. Those without one get it, with their tokens but the ``new`` last ones."""
        began, count = time.perf_counter(), 0
        for i, request in enumerate(rows):
            if request not in self._slots:
                path, context = self._path(request), request.tokens[: request.context_length]
                known = request.response[: len(request.response) - (new[i] if new else 0)]
                count += self._phase.drafter.missing_tokens(path.problem) + len(known) + 1
                self._slots[request] = self._phase.open(path.problem, context, path.is_branch, path.before, known)
                path.above = None
        seconds = time.perf_counter() - began if count else 0.0
        self._phase.report.draft_seconds += seconds
        self._inserted = self._inserted[0] + count, self._inserted[1] + seconds
        return np.array([self._slots[request] for request in rows], np.int64)


def _digest(tokens: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).hexdigest()
