"""Proposes drafts for a batch of running samples and records what became of them.

Engines and the replay of stored samples both use a ``Speculator``. The caller runs the forwards:

    slots = [speculator.open(problem, prompt, key) ...]
    while samples run:
        proposal = speculator.propose(slots, most)        # tokens to verify in one forward, per sample
        ... run each sample's next token and its draft in one forward; sample at every position ...
        speculator.record(proposal, accepted, tokens, offsets, seconds)
        speculator.finish(slot)                           # for each sample that ended
    speculator.end_step(step)

The proposals depend only on the samples, their keys and the number of live sequences, not on a clock or a random
state, so all ranks of a group propose the same drafts. After a rejected draft a sample pauses; the pause doubles up to
a bound that keeps the CPU time below about ``_QUERY_SHARE`` of a forward. Rare short drafts against the gate's decision
update the acceptance estimates (``exploration.py``).

An engine passes a ``pass_gate`` (``gate.py``), which decides about whole passes, may use measured costs, and replaces
the rare drafts by probes within its overhead budget.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from megatron_dta.speculation.budgets import (
    ASSUMED_ACCEPTANCE,
    BudgetParams,
    LengthClass,
    LengthHistory,
    fit_acceptance,
    gate,
    optimal_budget,
)
from megatron_dta.speculation.calibration import AcceptanceTable
from megatron_dta.speculation.completion_probability import CANDIDATES, completion_probability
from megatron_dta.speculation.drafter import Drafter, DrafterParams
from megatron_dta.speculation.exploration import EXPLORED_TOKENS, LONELY, exploring_share, keyed_share
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.gate import SpeculationGate
from megatron_dta.speculation.plain_forwards import NOTHING_BEFORE, Before, PlainForwards
from megatron_dta.speculation.proposal import Proposal
from megatron_dta.speculation.report import SpeculationReport
from megatron_dta.speculation.suffix_forest import Drafts

_QUERY_SHARE = 0.005
_USUAL_GAIN = 0.1
"""Gain of a good draft as a share of the maximum gain. No draft is made if this gain is below the cost of making it."""
_MAX_PAUSE = 64
_FIRST_DRAFTS = 64
"""Maximum drafts in a forward while the acceptance table is empty; the limit grows by 2 for each verified draft."""
_REPLAN_FORWARDS = 16
_PROBES = 24
"""Maximum drafts in a probe, the most probable ones."""
_MOST_SHARERS = 4
"""Cap on the sharing factor for samples that are unlikely to finish last, as a multiple of the live batch."""
_CLASS_CAPS = np.array([0, 6, 255])
"""Maximum drafted tokens per forward of short, medium and long samples with the budget "class"."""


class Speculator:
    """Drafter, budgets and report of one engine."""

    def __init__(
        self, drafter: DrafterParams, budget: BudgetParams, cost: ForwardCost, pass_gate: SpeculationGate | None = None
    ) -> None:
        self.drafter, self.budget, self.cost = Drafter(drafter), budget, cost
        self.pass_gate = None if budget.budget == "always" else pass_gate
        self.table, self.history = AcceptanceTable(), LengthHistory()
        self.report = SpeculationReport()
        self._step, self._forwards, self._acceptance = 0, 0, ASSUMED_ACCEPTANCE
        self._next_plan, self._last_round = 0, (0, 0, 0, 0.0)
        self._lonely, self._proposing = 0, 0.0
        self._free: list[int] = []
        self._problems: list[str] = []
        # Columns by slot: text, key, first class, generated tokens, steps, drafted, accepted, remaining pause, next
        # pause, cap, earlier tokens of the response, and the forward in which it would have begun without drafts.
        self._rows = np.zeros((0, 12), np.int64)
        self._plain = PlainForwards()
        self._candidates, self._last = np.zeros((0, CANDIDATES)), np.zeros(0)

    def unlearned(self) -> Speculator:
        """A speculator with the same settings and costs, but with no samples and no learned estimates."""
        pass_gate = None if self.pass_gate is None else self.pass_gate.unlearned()
        return Speculator(self.drafter.params, self.budget, self.cost, pass_gate)

    def begin_phase(self) -> None:
        """Begin a phase: all earlier samples are complete, and the next ones begin together."""
        self._plain.begin_phase()

    def open(
        self, problem: str, prompt: np.ndarray, key: int, is_branch: bool = False, before: Before = NOTHING_BEFORE
    ) -> int:
        """Begin a sample of ``problem`` after ``prompt``; ``key`` in [0, 2^63) identifies it. Returns its slot.

        is_branch: the prompt continues another sample of the problem, so the tree contains it already.
        """
        if not self._free:
            self._grow()
        slot = self._free.pop()
        text = self.drafter.open(problem, prompt, is_branch)
        (first, candidates), width = self.history.expected(problem), self.drafter.params.draft.width
        start = self._plain.start() if before.end is None else before.end
        self._rows[slot] = text, key, first, 0, 0, 0, 0, 0, 1, width, before.tokens, start
        self._candidates[slot], self._last[slot] = candidates, 0.0
        self._problems[slot] = problem
        self._next_plan = 0
        return slot

    def wants(self, live: int) -> bool:
        """Whether to propose drafts for the next forward or burst of ``live`` samples; call it once for each."""
        return self.pass_gate is None or self.pass_gate.wants(live)

    def propose(self, slots: np.ndarray, most: np.ndarray) -> Proposal:
        """Drafts for the samples of a forward (int64 [n]), of at most ``most`` (int64 [n]) tokens each."""
        begin = time.perf_counter()
        rows, live = self._rows[slots], len(slots)
        width = self.drafter.params.draft.width
        if self.pass_gate is not None:
            self.cost = self.pass_gate.cost(live)
        if self._forwards >= self._next_plan:
            self._plan(slots)
            self._next_plan = self._forwards + _REPLAN_FORWARDS
            rows = self._rows[slots]
        self._forwards += 1
        self._rows[slots, 7] -= 1
        caps = np.minimum(np.minimum(most, width), rows[:, 9])
        self._lonely += 1
        is_lonely_turn = self._lonely % LONELY == 0
        explore = self._explored(rows, live, is_lonely_turn)
        worthwhile = (rows[:, 7] <= 0) & self._can_pay(self._sharers(slots, live))
        asked = np.flatnonzero((worthwhile | explore) & (caps > 0))
        tokens, lengths = np.zeros((live, width), np.int32), np.zeros(live, np.int64)
        if not len(asked):
            drafts = Drafts.empty(0, width)
        else:
            drafts = self.drafter.draft(rows[asked, 0], caps[asked])
            tokens[asked] = drafts.tokens
            if self.pass_gate is None:
                lengths[asked] = self._lengths(drafts, slots[asked], explore[asked], live, is_lonely_turn)
            else:
                lengths[asked] = self._lengths_of_pass(drafts, slots[asked], live)
            self._pause(slots[asked], lengths[asked] > 0, live)
        if self.pass_gate is not None and not lengths.any():
            self.pass_gate.record_rejected(live)
        self.report.queries += len(asked)
        self._proposing = time.perf_counter() - begin
        self.report.draft_seconds += self._proposing
        return Proposal(slots, tokens, lengths, asked, drafts)

    def record(
        self, proposal: Proposal, accepted: np.ndarray, tokens: np.ndarray, offsets: np.ndarray, seconds: float
    ) -> None:
        """Record a forward: row i accepted the first ``accepted[i]`` tokens of its draft. Its new tokens are
        ``tokens[offsets[i] : offsets[i + 1]]`` (int32), the accepted ones and the one sampled after them."""
        begin = time.perf_counter()
        asked, drafted = proposal.asked, proposal.lengths
        self.table.update(
            proposal.drafts.matches,
            proposal.drafts.supports,
            proposal.drafts.probabilities,
            drafted[asked],
            accepted[asked],
        )
        self._rows[proposal.slots, 3] += np.diff(offsets)
        self._rows[proposal.slots, 4] += 1
        self._rows[proposal.slots, 5] += drafted
        self._rows[proposal.slots, 6] += accepted
        self.drafter.extend(self._rows[proposal.slots, 0], tokens, offsets)
        live, count = len(drafted), len(drafted) + int(drafted.sum())
        gain = 0.0
        if self.pass_gate is not None and count > live:
            sharers = self._sharers(proposal.slots, live)
            gain = self.pass_gate.saved(accepted, sharers, live)
            self.pass_gate.record_progress(float(np.average(1 + accepted, weights=1 / sharers)))
        self._last_round = live, count, 1, gain
        self._plain.forwards += 1
        self.report.add_forward(live, count, seconds)
        own = time.perf_counter() - begin
        self.report.draft_seconds += own
        self.report.outside_seconds += own if count > live else own + self._proposing

    def took(self, seconds: float) -> None:
        """Record the wall seconds of the last recorded forward or burst, including the host's part."""
        (live, tokens, passes, gain), self._last_round = self._last_round, (0, 0, 0, 0.0)
        if self.pass_gate is None or not live:
            return
        if tokens > live:
            self.pass_gate.record_drafted(live, tokens, gain, seconds)
        else:
            self.pass_gate.record_plain(live, passes, seconds)

    def record_burst(
        self, slots: np.ndarray, appended: Sequence[np.ndarray], seconds: float, was_asked: bool = True
    ) -> None:
        """Record a burst of forwards without drafts, which took ``seconds``: row i got the tokens ``appended[i]``
        (int32), one in each of the first forwards. ``was_asked``: ``propose`` was called before the first forward.
        Call this while the device runs the next burst."""
        begin = time.perf_counter()
        counts = np.array([len(tokens) for tokens in appended], np.int64)
        passes = int(counts.max())
        self._rows[slots, 3] += counts
        self._rows[slots, 4] += counts
        self._rows[slots, 7] -= counts - was_asked
        self._forwards += passes - was_asked
        self._plain.forwards += passes
        self._last_round = len(slots), len(slots), passes, 0.0
        offsets = np.concatenate([[0], np.cumsum(counts)])
        self.drafter.extend(self._rows[slots, 0], np.concatenate(appended).astype(np.int32), offsets)
        for live in (len(slots) - np.searchsorted(np.sort(counts), np.arange(passes), side="right")).tolist():
            self.report.add_forward(live, live, seconds / passes)
        self.report.outside_seconds += self._proposing if was_asked else 0.0
        self.report.hidden_seconds += time.perf_counter() - begin

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Append tokens that the sample did not generate, such as a tool's answer."""
        ends = np.array([0, len(tokens)], np.int64)
        self.drafter.extend(self._rows[slot : slot + 1, 0], np.ascontiguousarray(tokens, np.int32), ends)

    def finish(self, slot: int, length: int | None = None) -> None:
        """End a sample and its response. The sample stays in the trees, and its slot is free. ``length`` is the number
        of generated tokens if they were all given to ``append``."""
        if length is not None:
            self._rows[slot, 3] = length
        problem, response = self._problems[slot], int(self._rows[slot, 3] + self._rows[slot, 10])
        self.end_response(problem, response, self.end_request(slot))

    def end_request(self, slot: int) -> int:
        """End a sample whose response may continue (``end_response`` ends that). Returns the forward of this phase that
        would have been its last without drafts."""
        text, _, first, generated, steps, drafted, accepted = self._rows[slot, :7].tolist()
        self.drafter.finish(text, self._step)
        self.report.add_sample(generated, steps, drafted, accepted, first)
        self._free.append(slot)
        return int(self._rows[slot, 11]) + generated

    def end_response(self, problem: str, length: int, end: int) -> None:
        """End a response of ``length`` generated tokens; ``end``: what ``end_request`` returned for its last part."""
        self._plain.end(end)
        self.learn_length(problem, length)

    def learn(self, problem: str, prompt: np.ndarray, generated: np.ndarray, is_branch: bool = False) -> None:
        """Add a sample that another engine generated in this step. The report does not count it."""
        slot = self.open(problem, prompt, 0, is_branch, Before(0, 0))
        self.append(slot, generated)
        self.drafter.finish(int(self._rows[slot, 0]), self._step)
        self._free.append(slot)

    def learn_length(self, problem: str, length: int) -> None:
        """Add the length of a response, in generated tokens of all its segments and turns."""
        self.history.add(problem, int(self.history.expected(problem)[0]), length)

    def discard(self, slot: int) -> None:
        """Abort a sample and remove it from the trees."""
        self.drafter.discard(int(self._rows[slot, 0]))
        self._free.append(slot)

    def end_step(self, step: int) -> SpeculationReport:
        """End policy step ``step``: evict old samples, decay the estimates, and return the report of the step."""
        report, self.report = self.current_report(), SpeculationReport()
        self._acceptance = self._fitted_acceptance(report, self._rows[:0])
        self.history.end_step()
        self.table.end_step()
        self.drafter.end_step(step)
        self._step, self._forwards, self._lonely, self._next_plan = step + 1, 0, 0, 0
        self._plain = PlainForwards()
        if self.pass_gate is not None:
            self.pass_gate.end_step()
        return report

    def current_report(self) -> SpeculationReport:
        """The report since the last ``end_step``."""
        self.report.drafter_bytes, self.report.drafter_tokens = self.drafter.num_bytes, self.drafter.stored_tokens
        self.report.plain_forwards = self._plain.total
        return self.report

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state as plain arrays, without the running samples."""
        parts = {"drafter": self.drafter, "table": self.table, "history": self.history}
        state = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
        return {**state, "step": np.array(self._step, np.int64), "acceptance": np.array(self._acceptance)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name, part in (("drafter", self.drafter), ("table", self.table), ("history", self.history)):
            prefix = f"{name}."
            part.load_state_dict({k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)})
        self._step, self._acceptance = int(state["step"]), tuple(np.asarray(state["acceptance"]).tolist())
        self._rows, self._free, self._problems, self._plain = self._rows[:0], [], [], PlainForwards()
        self._candidates, self._last = self._candidates[:0], self._last[:0]

    def _grow(self) -> None:
        size = len(self._rows)
        more = max(64, size)
        self._rows = np.concatenate([self._rows, np.zeros((more, self._rows.shape[1]), np.int64)])
        self._candidates = np.concatenate([self._candidates, np.zeros((more, CANDIDATES))])
        self._last = np.concatenate([self._last, np.zeros(more)])
        self._problems += [""] * more
        self._free = list(range(size + more - 1, size - 1, -1))

    def _lengths(
        self, drafts: Drafts, slots: np.ndarray, explore: np.ndarray, live: int, is_lonely_turn: bool
    ) -> np.ndarray:
        if self.budget.budget == "always":
            return drafts.lengths.astype(np.int64)
        accept = self.table.probabilities(drafts.matches, drafts.supports, drafts.probabilities)
        lengths = gate(accept, drafts.lengths, self.cost, live, self._sharers(slots, live))
        lengths[np.cumsum(lengths > 0) > _FIRST_DRAFTS + 2 * self.table.verified] = 0
        if not lengths.any() and not is_lonely_turn:
            return lengths
        return np.where(explore, np.maximum(lengths, np.minimum(drafts.lengths, EXPLORED_TOKENS)), lengths)

    def _lengths_of_pass(self, drafts: Drafts, slots: np.ndarray, live: int) -> np.ndarray:
        """Lengths by the token gate if the whole pass pays; else those of a probe if the budget allows it, or 0."""
        sharers, width = self._sharers(slots, live), drafts.tokens.shape[1]
        accept = self.table.probabilities(drafts.matches, drafts.supports, drafts.probabilities)
        lengths = gate(accept, drafts.lengths, self.cost, live, sharers)
        lengths[np.cumsum(lengths > 0) > _FIRST_DRAFTS + 2 * self.table.verified] = 0

        def gain() -> float:
            expected = np.where(np.arange(width) < lengths[:, None], accept, 0.0).sum(1)
            return self.pass_gate.gain(expected, sharers, live)

        if self.pass_gate.pays(gain(), live, live + int(lengths.sum())):
            return lengths
        probes = np.minimum(drafts.lengths, EXPLORED_TOKENS).astype(np.int64)
        likeliest = np.argsort(np.where(probes > 0, -accept[:, 0], 1.0), kind="stable")
        probes[likeliest[_PROBES:]] = 0
        lengths = probes if not lengths.any() else lengths
        tokens = live + int(lengths.sum())
        if self.budget.exploration and tokens > live and self.pass_gate.may_probe(gain(), live, tokens):
            return lengths
        return np.zeros(len(slots), np.int64)

    def _sharers(self, slots: np.ndarray, live: int) -> np.ndarray:
        """Number of samples that share each sample's forwards, float64 [n]."""
        rows = self._rows[slots]
        sharers = np.full(len(rows), float(live))
        if self.budget.budget == "straggler":
            with np.errstate(divide="ignore"):
                sharers = np.minimum(1 / self._last[slots], _MOST_SHARERS * live)
        elif self.budget.budget == "class":
            is_long = self.history.classes(rows[:, 2], _response_lengths(rows)) == LengthClass.LONG
            # Assume the same share of long samples among the rows that were not asked.
            sharers[is_long] = max(1.0, float(is_long.mean()) * live)
        return sharers

    def _can_pay(self, sharers: np.ndarray) -> np.ndarray:
        """Whether a good draft would gain more than it costs to make, bool [n]."""
        if self.budget.budget == "always":
            return np.ones(len(sharers), bool)
        return _USUAL_GAIN * self.drafter.params.draft.width * self.cost.base / sharers >= self.cost.draft

    def _pause(self, slots: np.ndarray, useful: np.ndarray, live: int) -> None:
        """Pause the samples without a useful draft, but no longer than ``_QUERY_SHARE`` requires."""
        share = self.cost.draft * live / (_QUERY_SHARE * float(self.cost.seconds(live)))
        longest = int(np.clip(np.ceil(share), 1, _MAX_PAUSE))
        pause = np.where(useful, 1, np.minimum(self._rows[slots, 8] * 2, longest))
        self._rows[slots, 7] = np.where(useful, 0, np.minimum(self._rows[slots, 8], longest))
        self._rows[slots, 8] = pause

    def _explored(self, rows: np.ndarray, live: int, is_lonely_turn: bool) -> np.ndarray:
        """Which samples may draft against the gate's decision, bool [n]."""
        if self.budget.budget == "always" or not self.budget.exploration or self.pass_gate is not None:
            return np.zeros(len(rows), bool)
        share = exploring_share(self.budget.exploration, self.cost, live, is_lonely_turn)
        return keyed_share(self.budget.seed, rows[:, 1], rows[:, 3]) < share

    def _plan(self, slots: np.ndarray) -> None:
        """Update what depends on lengths: the probability of being the last sample, and the caps of some budgets."""
        rows, width, budget = self._rows[slots], self.drafter.params.draft.width, self.budget.budget
        so_far = _response_lengths(rows)
        if budget == "straggler":
            speed = (rows[:, 3] + 8.0) / (rows[:, 4] + 8.0)
            self._last[slots] = completion_probability(self._candidates[slots], so_far, speed)
        elif budget == "class":
            classes = self.history.classes(rows[:, 2], so_far)
            self._rows[slots, 9] = np.minimum(_CLASS_CAPS[classes], width)
        elif budget == "optimal":
            expected = self._candidates[slots].mean(1)
            left = np.maximum(expected, 1.25 * so_far + 16) - so_far
            # Include this step's running samples: in a run's first step there are no others.
            fitted = self._fitted_acceptance(self.report, rows)
            k, alpha = (np.full(len(slots), value) for value in fitted)
            forwards, tokens = optimal_budget(left, k, alpha, self.cost.base, self.cost.per_token)
            self._rows[slots, 9] = np.where(expected > 0, np.clip(np.ceil(tokens / forwards), 0, width), width)

    def _fitted_acceptance(self, report: SpeculationReport, running: np.ndarray) -> tuple[float, float]:
        """(k, alpha) fitted to finished and running samples; the last fit if none had drafts."""
        finished = np.array([report.lengths, report.drafted, report.accepted], np.float64)
        return fit_acceptance(*np.concatenate([finished, running[:, [3, 5, 6]].T], axis=1), self._acceptance)


def _response_lengths(rows: np.ndarray) -> np.ndarray:
    """Generated tokens of each response so far, including those before the running sample."""
    return rows[:, 3] + rows[:, 10]
