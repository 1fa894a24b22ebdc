"""Speculation in the in-process engine: who proposes drafts, and what the engine does with them.

A draft is a guess at a sequence's next tokens. The engine runs them behind the sequence's last known token in the same
pass, samples at every position as it would have without them (the noise is keyed by the position) and keeps sampling
while the draft was right. So drafts decide how many passes a sample takes and never which tokens it has, provided that
a draft does not depend on the noise of the tokens it guesses: ``Drafting`` sees finished tokens only.

What a rejected draft left behind is never seen: a sequence has K and V up to its ``computed`` positions, whatever
stands behind them in its pages is written again before it is read, pages are registered for others only as far as they
are computed, and those taken for the draft alone are given back.

``SuffixDrafting`` proposes from suffix trees of recent samples (``megatron_dta.speculation``). A request's problem is
its prompt's, so the branches of a tree and the turns of an episode share their drafts. The length of a response is that
of its whole path, known when a request ends that no other one continues. An evaluation has trees of its own: what is
kept for training is of training alone. What passes without drafts have
sampled is put into the trees while the device runs the next ones (``catch_up``), so that where drafts are not worth it
they take next to no time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.model import current_mesh
from megatron_dta.sampling.engines.in_process.scheduler import Pass, Request, Scheduler
from megatron_dta.sampling.keyed_random import Domain
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.plain_forwards import Before
from megatron_dta.speculation.proposal import Proposal
from megatron_dta.speculation.speculator import Speculator

NO_DRAFT = np.zeros(0, np.int32)

_MOST_BURSTS = 4
"""Bursts that are put off."""

_MEASURED = 512
"""Passes whose seconds are kept for measuring what a pass costs."""


class Drafting(ABC):
    """Proposes drafts; the ranks of a replica must propose the same ones."""

    def started(self, params: SamplingParams) -> None:  # noqa: B027 - most draft alike in every phase
        """A phase begins: the requests until ``ended`` are sampled so, with the weights as they are."""

    def ended(self) -> None:  # noqa: B027
        """The phase is over, and all of its requests are complete."""

    @abstractmethod
    def submitted(self, sequence: Request) -> None:
        """A sequence will run."""

    def wants(self, live: int) -> bool:
        """Whether drafts are to be looked for in this round, a pass or burst of which ``live`` rows get tokens. If not,
        ``verified_burst`` comes without ``propose``."""
        return True

    @property
    def is_hopeful(self) -> bool:
        """Whether a draft is likely soon where none is worth it now: bursts are short then."""
        return True

    def catch_up(self) -> None:  # noqa: B027 - most put nothing off
        """Do what was put off: the host has nothing to do, since the device runs passes without drafts."""

    def ran(self, seconds: float) -> None:  # noqa: B027 - most need no clock
        """The round whose tokens were handed over last took so long, everything included."""

    @abstractmethod
    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        """A draft of at most ``most[i]`` tokens (int32, may be empty) for each of the sequences of a pass."""

    @abstractmethod
    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None:
        """The pass of ``tokens`` tokens is over: of row i's draft ``drafted[i]`` tokens were run, of some more than
        none, and it went on with ``appended[i]``."""

    def verified_burst(
        self, rows: Sequence[Request], appended: Sequence[np.ndarray], seconds: float, tokens: int
    ) -> None:
        """Passes of ``tokens`` tokens, none of them drafted, that ran one after the other are over: row i got a token
        in each of the first ``len(appended[i])``. It was asked for drafts before the first and gave none that was
        run, or was not asked."""
        passes = max(map(len, appended))
        for i in range(passes):
            alive = [row for row, own in zip(rows, appended, strict=True) if len(own) > i]
            none = np.zeros(len(alive), np.int64)
            if i:
                self.propose(alive, none)
            new = [own[i : i + 1] for own in appended if len(own) > i]
            self.verified(none, new, seconds / passes, tokens)

    @abstractmethod
    def finished(self, sequence: Request) -> None:
        """A sequence is complete."""

    @abstractmethod
    def released(self, sequence: Request) -> None:
        """A complete sequence that was held will be nobody's parent any more."""

    @abstractmethod
    def abandoned(self) -> None:
        """All sequences that are not complete were given up."""

    @abstractmethod
    def weights_changed(self, policy_version: int) -> None:
        """Nothing runs, and the weights are others now."""


def drafts_of(plan: Pass, drafting: Drafting | None, scheduler: Scheduler, most_tokens: int) -> list[np.ndarray]:
    """Tokens to verify behind each row's own, int32, which have pages now; none behind rows that get no token in this
    pass, and no more than ``most_tokens`` with all others of the pass."""
    drafts = [NO_DRAFT] * len(plan.rows)
    if drafting is None:
        return drafts
    ready = [i for i, row in enumerate(plan.rows) if row.num_computed_tokens + plan.counts[i] == row.num_tokens]
    if not ready or not drafting.wants(len(ready)):
        return drafts
    rows = [plan.rows[i] for i in ready]
    # The last token is sampled behind the draft, and no token may lie beyond the request.
    most = np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
    budget = most_tokens - sum(plan.counts)
    for i, row, draft in zip(ready, rows, drafting.propose(rows, most), strict=True):
        length = min(len(draft), budget)
        if length:
            length = scheduler.reserve_pages(row, row.num_tokens + length) - row.num_tokens
            drafts[i] = draft[:length]
            budget -= length
    return drafts


@dataclass
class _Path:
    """Where a request stands on the path of its response.

    Attributes:
        is_branch: the prompt is in the problem's tree already.
        before: tokens that were sampled for the response before the request; above: the request that it goes on from.
        length: sampled tokens of the response at the request's end, end: in which forward that would have been;
            None while it runs, and once they were counted.
        is_continued: another request goes on where this one ended.
    """

    problem: str
    is_branch: bool
    before: int
    above: _Path | None
    length: int | None = None
    end: int = 0
    is_continued: bool = False


class SuffixDrafting(Drafting):
    """Drafts of a ``Speculator``, whose model of a pass's cost is fitted to the passes that ran.

    follows_clock: without it the cost is the one that ``speculator`` has, so that the same run drafts the same.
    """

    def __init__(self, speculator: Speculator, follows_clock: bool = True) -> None:
        self._training, self.follows_clock = speculator, follows_clock
        self._speculator = speculator  # of the present phase
        self._policy_version: int | None = None
        if speculator.pass_gate is not None:
            speculator.pass_gate.is_measured = follows_clock
        # What is to be done before anything is asked of the speculator, in this order.
        self._put_off: deque[Callable[[], None]] = deque()
        self._bursts = 0
        self._slots: dict[Request, int] = {}
        self._paths: dict[Request, _Path] = {}  # of requests that run or are held
        self._proposal: Proposal | None = None
        # Tokens, seconds, and whether there were drafts.
        self._measured: list[tuple[int, float, bool]] = []
        self._last: list[tuple[int, bool]] = []
        # Complete samples that the other replicas do not know of, where there are others.
        self._unshared: list[tuple[str, bool, np.ndarray, np.ndarray]] = []
        self._unshared_lengths: list[tuple[str, int]] = []

    @property
    def speculator(self) -> Speculator:
        """Training's, with all that has been sampled."""
        self._do_all()
        return self._training

    def started(self, params: SamplingParams) -> None:
        self._do_all()
        self._speculator = self._training.unlearned() if params.domain is Domain.EVALUATION else self._training
        self._speculator.begin_phase()

    def ended(self) -> None:
        self._end_paths()
        self._speculator = self._training

    def catch_up(self) -> None:
        # Not more often than needed: walking through the trees leaves nothing else in the host's caches.
        gate = self._speculator.pass_gate
        if gate is None or gate.drafts_next or self._bursts >= _MOST_BURSTS:
            self._do_all()

    def _do_all(self) -> None:
        self._bursts = 0
        while self._put_off:
            self._put_off.popleft()()

    def _in_order(self, call: Callable[[], None]) -> None:
        """Behind what is put off, where something is."""
        if self._put_off:
            self._put_off.append(call)
        else:
            call()

    def submitted(self, sequence: Request) -> None:
        request, parent = sequence.generation, sequence.parent
        above = None if parent is None else self._paths.get(parent)
        if above is not None and sequence.common_with_parent >= parent.num_tokens:
            above.is_continued = True
        length = request.prompt_length
        if length is None and above is not None:
            problem, is_branch = above.problem, True
        else:
            prompt = np.ascontiguousarray(request.token_ids[:length], np.int32)
            problem = hashlib.blake2b(prompt.tobytes(), digest_size=16).hexdigest()
            is_branch = len(prompt) < len(request.token_ids)
        self._paths[sequence] = _Path(problem, is_branch, request.sampled_before, above)

    def wants(self, live: int) -> bool:
        return self._speculator.wants(live)

    @property
    def is_hopeful(self) -> bool:
        return self._speculator.pass_gate is None or self._speculator.pass_gate.is_hopeful

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        self._do_all()
        slots = np.array([self._slot(sequence) for sequence in rows], np.int64)
        self._proposal = self._speculator.propose(slots, most)
        proposal = self._proposal
        if not proposal.lengths.any():
            return [NO_DRAFT] * len(rows)
        return [row[:length] for row, length in zip(proposal.tokens, proposal.lengths.tolist(), strict=True)]

    def verified(self, drafted: np.ndarray, appended: list[np.ndarray], seconds: float, tokens: int) -> None:
        proposal, self._proposal = self._proposal, None
        proposal.lengths[:] = drafted
        counts = np.array([len(tokens) for tokens in appended], np.int64)
        # Of each row's tokens one was not drafted: the last, also where it happens to be what a longer draft had.
        accepted = np.minimum(counts - 1, drafted)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        self._do_all()
        self._speculator.record(proposal, accepted, np.concatenate(appended).astype(np.int32), offsets, seconds)
        # A pass that computes prompts too says nothing of drafts.
        is_pure = tokens == len(drafted) + int(drafted.sum())
        self._last = [(tokens, tokens > len(drafted))] if is_pure else []

    def verified_burst(
        self, rows: Sequence[Request], appended: Sequence[np.ndarray], seconds: float, tokens: int
    ) -> None:
        proposal, self._proposal = self._proposal, None
        self._bursts += 1
        self._put_off.append(partial(self._record_burst, rows, appended, seconds, proposal is not None))
        self._last = [(tokens, False)] * max(map(len, appended)) if tokens == len(rows) else []

    def _record_burst(
        self, rows: Sequence[Request], appended: Sequence[np.ndarray], seconds: float, was_asked: bool
    ) -> None:
        slots = np.array([self._slot(sequence) for sequence in rows], np.int64)
        self._speculator.record_burst(slots, appended, seconds, was_asked)

    def ran(self, seconds: float) -> None:
        last, self._last = self._last, []
        if last:
            self._in_order(partial(self._took, last, seconds))

    def _took(self, last: list[tuple[int, bool]], seconds: float) -> None:
        self._speculator.took(seconds)
        if self._speculator is not self._training:
            return
        self._measured += [(tokens, seconds / len(last), is_drafted) for tokens, is_drafted in last]
        del self._measured[:-_MEASURED]

    def finished(self, sequence: Request) -> None:
        self._in_order(partial(self._finish, sequence))

    def _finish(self, sequence: Request) -> None:
        path = self._paths[sequence]
        path.end = self._speculator.end_request(self._slots.pop(sequence))
        path.length = path.before + len(sequence.response)
        if self._is_shared:
            # Of a branch's context the trees take the end.
            context = sequence.tokens[: sequence.context_length]
            context = context[-self._speculator.drafter.params.depth :] if path.is_branch else context
            self._unshared.append((path.problem, path.is_branch, context.copy(), sequence.response.copy()))
        if not sequence.generation.hold:
            self._end_path(self._paths.pop(sequence))

    @property
    def _is_shared(self) -> bool:
        return self._speculator is self._training and current_mesh().data_size > 1

    def _end_path(self, path: _Path) -> None:
        """Count the length of a response that ends with this request, once."""
        if path.length is not None and not path.is_continued:
            self._speculator.end_response(path.problem, path.length, path.end)
            if self._is_shared:
                self._unshared_lengths.append((path.problem, path.length))
        path.length = None

    def _end_paths(self) -> None:
        self._do_all()
        for path in self._paths.values():
            self._end_path(path)

    def abandoned(self) -> None:
        self._do_all()
        for slot in self._slots.values():
            self._speculator.discard(slot)
        self._slots.clear()
        self._paths.clear()
        self._proposal = None

    def released(self, sequence: Request) -> None:
        self._in_order(partial(self._release, sequence))

    def _release(self, sequence: Request) -> None:
        path = self._paths.pop(sequence, None)
        if path is not None:
            self._end_path(path)

    def learn_costs(self, passes: Sequence[tuple[int, float, bool]]) -> None:
        """Take in (tokens, seconds, whether some were drafted) of passes that another drafting has seen."""
        self._measured += passes
        del self._measured[:-_MEASURED]

    def weights_changed(self, policy_version: int) -> None:
        if policy_version == self._policy_version:  # a collection of several rounds
            return
        self._policy_version = policy_version
        self._end_paths()
        speculator = self.speculator
        # The rollouts so far are of the weights before.
        speculator.end_step(policy_version - 1)
        if not self.follows_clock:
            return
        # The ranks of a replica draft alike, so they go by what the first one has measured.
        mesh, gate = current_mesh(), speculator.pass_gate
        costs = mesh.gather_over_replica((self.measured_cost(), self.measured_cost(False), self.measured_cost(True)))[0]
        if costs[0] is not None:
            speculator.cost = costs[0]
        if gate is not None:
            gate.is_measured = mesh.tensor_size * mesh.pipeline_size == 1
            plain, drafted = (own or costs[0] for own in costs[1:])
            if plain is not None and drafted is not None:
                gate.calibrate(plain, drafted)

    def share(self) -> None:
        """Take in what the other replicas have sampled since the last call; all ranks call this together."""
        self._end_paths()
        speculator, mesh = self.speculator, current_mesh()
        own = self._unshared, self._unshared_lengths
        self._unshared, self._unshared_lengths = [], []
        for replica, (samples, lengths) in enumerate(mesh.gather_over_data(own)):
            if replica != mesh.data_rank:
                for problem, is_branch, context, response in samples:
                    speculator.learn(problem, context, response, is_branch)
                for problem, length in lengths:
                    speculator.learn_length(problem, length)

    def measured_cost(self, drafted: bool | None = None) -> ForwardCost | None:
        """The cost of a pass as measured, the median of each number of tokens; None where too little has run.

        drafted: only of passes with drafts, or only of those without.
        """
        self._do_all()
        tokens, seconds, kinds = np.array(self._measured, np.float64).reshape(-1, 3).T
        if drafted is not None:
            tokens, seconds = tokens[kinds == drafted], seconds[kinds == drafted]
        counts = [count for count in np.unique(tokens) if (tokens == count).sum() >= 3]
        try:
            medians = [np.median(seconds[tokens == count]) for count in counts]
            return ForwardCost.fit(np.array(counts), np.array(medians), draft=self._speculator.cost.draft)
        except InputError:
            return None

    def _slot(self, sequence: Request) -> int:
        slot = self._slots.get(sequence)
        if slot is None:
            context, path = sequence.tokens[: sequence.context_length], self._paths[sequence]
            before = Before(path.before, None if path.above is None else path.above.end)
            slot = self._speculator.open(path.problem, context, sequence.generation.key, path.is_branch, before)
            self._slots[sequence], path.above = slot, None
        return slot
