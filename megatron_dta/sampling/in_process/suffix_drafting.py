"""Proposes drafts from suffix trees of recent samples (``megatron_dta.sampling.speculation``).

The prompt identifies the problem of a request, so the branches of a tree and the turns of an episode share their
drafts. The length of a response is the length of its whole path; it is known when a request ends that no other request
continues. Evaluations have separate trees.

A clock decides which rounds ask for drafts (``speculation.clock``). What only changes the trees is put off until the
rollouts are scored, and then done by another thread in the order of the calls, while the device trains. (During
sampling it would slow down the scheduler and the rewards: threads share one interpreter.) Before a trial, and every
``_MOST_ROUNDS`` rounds, that thread works beside the device, until it is at most ``_FEW_ROUNDS`` behind.

A checkpoint holds the trees. They contain the samples of all replicas (``_share``), so those of the first replica serve
any number of replicas. The samples do not depend on them: a run resumed without the trees draws the same samples, in
more passes until the trees have grown again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.sampling.in_process.drafting import NO_DRAFT, Drafting, Round
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.clock import DraftingClock
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Proposal, Speculator

_STATE = "speculation"
_MOST_ROUNDS, _FEW_ROUNDS = 128, 2

_MEASURED = 512
"""Number of recent passes from which the cost of a pass is measured."""


@dataclass
class _Path:
    """The position of a request on the path of its response.

    Attributes:
        problem: digest of the prompt.
        is_branch: the problem's tree contains the prompt already.
        before: tokens of the response that were sampled before this request.
        above: the request that this one continues.
        length: sampled tokens of the response at the request's end; None while it runs and once it was counted.
        end: the forward in which the request would have ended without drafts.
        is_continued: another request continues this one from its end.
    """

    problem: str
    is_branch: bool
    before: int
    above: _Path | None
    length: int | None = None
    end: int = 0
    is_continued: bool = False


class SuffixDrafting(Drafting):
    """Drafts from a ``Speculator``, whose cost model is fitted to the passes that ran.

    follows_clock: if False, gate and costs of ``speculator`` decide, so that repeated runs make the same drafts.
    """

    def __init__(self, speculator: Speculator, follows_clock: bool = True) -> None:
        self._training, self.follows_clock = speculator, follows_clock
        self._speculator = speculator  # of the present phase
        self._policy_version: int | None = None
        speculator.gate.is_measured = False  # until the ranks of the replica go by the same costs
        speculator.gate.decides = not follows_clock
        self._clock = DraftingClock() if follows_clock else None
        # Calls that are put off, with the rounds among them, and those that the other thread has got.
        self._thread = ThreadPoolExecutor(1, "suffix-trees")
        self._deferred: list[tuple[Callable, tuple]] = []
        self._rounds = 0
        self._work: Future | None = None
        self._is_shared = self._evaluates = False
        self._slots: dict[Request, int] = {}
        self._paths: dict[Request, _Path] = {}  # running and held requests
        self._proposal: Proposal | None = None
        # Passes as (tokens, seconds, has drafts).
        self._measured: list[tuple[int, float, bool]] = []
        self._last: list[tuple[int, bool]] = []
        self._last_round = (0, 0, False)  # rows, tokens, whether it could have drafts
        # Complete samples that have not been shared with the other replicas yet.
        self._unshared: list[tuple[str, bool, np.ndarray, np.ndarray]] = []
        self._unshared_lengths: list[tuple[str, int]] = []

    @property
    def speculator(self) -> Speculator:
        """The speculator of training, with all deferred work done."""
        self._wait()
        return self._training

    def report(self) -> SpeculationReport:
        """The report of the rollout batch so far."""
        report = self.speculator.current_report()
        report.saved_seconds = None if self._clock is None else self._clock.saved
        return report

    def started(self, params: SamplingParams) -> None:
        self._evaluates = params.domain is Domain.EVALUATION
        self._defer(self._start, self._evaluates)

    def _start(self, evaluates: bool) -> None:
        self._speculator = self._training.unlearned() if evaluates else self._training
        self._speculator.begin_phase()

    def ended(self) -> None:
        self._defer(self._end_paths)
        if self._is_shared and not self._evaluates:
            self._share()

    def rest(self) -> None:
        self._hand_over()

    def _defer(self, call: Callable, *arguments: object) -> None:
        self._deferred.append((call, arguments))

    def _hand_over(self) -> None:
        """Let the other thread make the deferred calls, after those that it has got."""
        if self._work is not None and self._work.done():
            self._work.result()
        calls, self._deferred, self._rounds = self._deferred, [], 0
        self._work = self._thread.submit(lambda: [call(*arguments) for call, arguments in calls])

    def _wait(self) -> None:
        if self._deferred:
            self._hand_over()
        if self._work is not None:
            self._work.result()

    def _is_ready(self, clock: DraftingClock) -> bool:
        """Whether the next round may have drafts: if the trees are nearly complete."""
        if not clock.is_on or not clock.is_local:  # other ranks must decide alike
            return clock.is_on
        is_idle = self._work is None or self._work.done()
        if is_idle and self._rounds > _FEW_ROUNDS:
            self._hand_over()
            return False
        return is_idle

    def submitted(self, request: Request) -> None:
        generation, parent = request.generation, request.parent
        above = None if parent is None else self._paths.get(parent)
        if above is not None and request.common_with_parent >= parent.num_tokens:
            above.is_continued = True
        length = generation.prompt_length
        if length is None and above is not None:
            problem, is_branch = above.problem, True
        else:
            prompt = np.ascontiguousarray(generation.token_ids[:length], np.int32)
            problem = hashlib.blake2b(prompt.tobytes(), digest_size=16).hexdigest()
            is_branch = len(prompt) < len(generation.token_ids)
        self._paths[request] = _Path(problem, is_branch, generation.sampled_before, above)

    def wants(self, live: int) -> bool:
        if self._clock is not None:
            return self._is_ready(self._clock)
        self._wait()
        return self._speculator.wants(live)

    @property
    def asks_next(self) -> bool:
        if self._clock is not None:
            return self._is_ready(self._clock)
        self._wait()
        return self._speculator.gate.asks_next

    @property
    def is_hopeful(self) -> bool:
        return self.asks_next and (self._clock is not None or self._speculator.gate.is_hopeful)

    def propose(self, rows: Sequence[Request], most: np.ndarray) -> list[np.ndarray]:
        self._wait()
        slots = np.array([self._slot(request) for request in rows], np.int64)
        self._proposal = self._speculator.propose(slots, most)
        proposal = self._proposal
        if not proposal.lengths.any():
            return [NO_DRAFT] * len(rows)
        return [row[:length] for row, length in zip(proposal.tokens, proposal.lengths.tolist(), strict=True)]

    def verified(self, done: Round) -> None:
        proposal, self._proposal = self._proposal, None
        self._last = [] if done.captured else done.decoding_passes
        self._rounds += 1
        if self._rounds > _MOST_ROUNDS:
            self._hand_over()
        self._last_round = len(done.rows), sum(map(len, done.appended)), proposal is not None
        if done.drafted is None:
            self._defer(self._record_burst, done, proposal is not None)
        else:
            self._defer(self._record, proposal, done)

    def _record(self, proposal: Proposal, done: Round) -> None:
        proposal.lengths[:] = done.drafted
        counts = np.array([len(tokens) for tokens in done.appended], np.int64)
        # The last token of each row was sampled, not drafted, even if a longer draft contained it.
        accepted = np.minimum(counts - 1, done.drafted)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        tokens = np.concatenate(done.appended).astype(np.int32)
        self._speculator.record(proposal, accepted, tokens, offsets, done.seconds)

    def _record_burst(self, done: Round, was_asked: bool) -> None:
        slots = np.array([self._slot(request) for request in done.rows], np.int64)
        self._speculator.record_burst(slots, done.appended, done.seconds, was_asked)

    def ran(self, seconds: float) -> None:
        last, self._last = self._last, []
        if last:
            self._defer(self._record_time, last, seconds)
            if self._clock is not None:
                live, tokens, asked = self._last_round
                self._clock.took(live, len(last), tokens, seconds, asked)

    def _record_time(self, last: list[tuple[int, bool]], seconds: float) -> None:
        self._speculator.took(seconds)
        if self._speculator is self._training:
            self._measured += [(tokens, seconds / len(last), is_drafted) for tokens, is_drafted in last]
            del self._measured[:-_MEASURED]

    def finished(self, request: Request) -> None:
        self._defer(self._finish, request)

    def _finish(self, request: Request) -> None:
        path = self._paths[request]
        path.end = self._speculator.end_request(self._slots.pop(request))
        path.length = path.before + len(request.response)
        if self._is_shared and self._speculator is self._training:
            # The trees need only the end of a branch's context.
            context = request.tokens[: request.context_length]
            context = context[-self._speculator.drafter.params.depth :] if path.is_branch else context
            self._unshared.append((path.problem, path.is_branch, context.copy(), request.response.copy()))
        if not request.generation.hold:
            self._end_path(self._paths.pop(request))

    def _end_path(self, path: _Path) -> None:
        """Record the length of a response that ends with this request, once."""
        if path.length is not None and not path.is_continued:
            self._speculator.end_response(path.problem, path.length, path.end)
            if self._is_shared and self._speculator is self._training:
                self._unshared_lengths.append((path.problem, path.length))
        path.length = None

    def _end_paths(self) -> None:
        for path in list(self._paths.values()):
            self._end_path(path)
        self._speculator = self._training

    def abandoned(self) -> None:
        self._wait()
        for slot in self._slots.values():
            self._speculator.discard(slot)
        self._slots.clear()
        self._paths.clear()
        self._proposal = None

    def released(self, request: Request) -> None:
        self._defer(self._release, request)

    def _release(self, request: Request) -> None:
        path = self._paths.pop(request, None)
        if path is not None:
            self._end_path(path)

    def weights_changed(self, policy_version: int) -> None:
        if policy_version == self._policy_version:  # another round of the same rollout batch
            return
        self._policy_version, self._is_shared = policy_version, current_mesh().data_size > 1
        if self._clock is not None:
            self._share_costs(self._clock)
        # The rollouts so far used the previous weights.
        self._defer(self._end_paths)
        self._defer(self._training.end_step, policy_version - 1)

    def _share_costs(self, clock: DraftingClock) -> None:
        """Let the ranks of a replica, which must make the same drafts, use the first rank's measurements."""
        mesh, gate = current_mesh(), self.speculator.gate
        clock.begin_batch()
        costs = self.measured_cost(), self.measured_cost(False), self.measured_cost(True)
        (both, plain, drafted), rates = mesh.gather_over_replica((costs, clock.rates()))[0]
        gate.is_measured = mesh.tensor_size * mesh.pipeline_size == 1
        if not gate.is_measured:
            clock.share(rates)
        if both is not None or (plain is not None and drafted is not None):
            gate.calibrate(plain or both, drafted or both)

    def _share(self) -> None:
        """Add what the other replicas have sampled in this phase. Collective over all ranks."""
        speculator, mesh = self.speculator, current_mesh()
        unshared = self._unshared, self._unshared_lengths
        self._unshared, self._unshared_lengths = [], []
        for replica, (samples, lengths) in enumerate(mesh.gather_over_data(unshared)):
            if replica != mesh.data_rank:
                for problem, is_branch, context, response in samples:
                    self._defer(speculator.learn, problem, context, response, is_branch)
                for problem, length in lengths:
                    self._defer(speculator.learn_length, problem, length)

    def state_dict(self) -> dict[str, Any]:
        arrays = self.speculator.state_dict()
        state = {
            name: value.tolist() if value.dtype.kind == "U" else torch.from_numpy(np.array(value))
            for name, value in arrays.items()
        }
        # The replicas differ in acceptance estimates and insertion order, so all ranks keep the first one's state.
        return {_STATE: current_mesh().from_first(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        arrays = {
            name: value.numpy() if isinstance(value, torch.Tensor) else np.array(value, dtype=np.str_)
            for name, value in state.get(_STATE, {}).items()
        }
        if arrays:
            self.speculator.load_state_dict(arrays)

    def timing(self) -> dict[str, float]:
        return self.report().metrics()

    def measured_cost(self, drafted: bool | None = None) -> ForwardCost | None:
        """The cost of a pass, fitted to the median seconds of each number of tokens; None if too few passes have run.

        drafted: use only passes with drafts (True) or only those without (False).
        """
        self._wait()
        tokens, seconds, kinds = np.array(self._measured, np.float64).reshape(-1, 3).T
        if drafted is not None:
            tokens, seconds = tokens[kinds == drafted], seconds[kinds == drafted]
        counts = [count for count in np.unique(tokens) if (tokens == count).sum() >= 3]
        try:
            medians = [np.median(seconds[tokens == count]) for count in counts]
            return ForwardCost.fit(np.array(counts), np.array(medians), draft=self._speculator.gate.drafted_cost.draft)
        except InputError:
            return None

    def _slot(self, request: Request) -> int:
        slot = self._slots.get(request)
        if slot is None:
            context, path = request.tokens[: request.context_length], self._paths[request]
            begin = None if path.above is None else path.above.end
            slot = self._speculator.open(path.problem, context, path.is_branch, path.before, begin)
            self._slots[request], path.above = slot, None
        return slot
