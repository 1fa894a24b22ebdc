"""Proposes drafts for a batch of running samples and records what became of them.

Engines and the replay of stored samples both use a ``Speculator``. The caller runs the forwards:

    slots = [speculator.open(problem, prompt, key) ...]
    while samples run:
        proposal = speculator.propose(slots, most)        # tokens to verify in one forward, per sample
        ... run each sample's next token and its draft in one forward; sample at every position ...
        speculator.record(proposal, accepted, tokens, offsets, seconds)
        speculator.finish(slot)                           # for each sample that ended
    speculator.end_step(step)

The proposals depend on the samples, their number and the gate's costs, not on a random state. With costs that all ranks
of a group share they propose the same drafts. After a rejected draft a sample pauses; the pause doubles up to a bound
that keeps the CPU time below about ``_QUERY_SHARE`` of a forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.sampling.speculation.calibration import AcceptanceTable
from megatron_dta.sampling.speculation.drafter import Drafter, DrafterParams
from megatron_dta.sampling.speculation.gate import SpeculationGate, gate_thresholds, token_gate
from megatron_dta.sampling.speculation.lengths import CANDIDATES, LengthClass, LengthHistory, completion_probability
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.suffix_forest import Drafts

NOTHING = np.zeros(0, np.int32)
_QUERY_SHARE = 0.005
_USUAL_GAIN = 0.1
"""Gain of a good draft as a share of the maximum gain. No draft is made if this gain is below the cost of making it."""
_MAX_PAUSE = 64
_FIRST_DRAFTS = 64
"""Maximum drafts in a forward while the acceptance table is empty; the limit grows by 2 for each verified draft."""
_REPLAN_FORWARDS = 16
_MOST_SHARERS = 4
"""Cap on the sharing factor for samples that are unlikely to finish last, as a multiple of the live batch."""
_CLASS_CAPS = np.array([0, 6, 255])
"""Maximum drafted tokens per forward of short, medium and long samples with the budget "class"."""

_SAMPLE = np.dtype(
    [
        *((name, np.int64) for name in ("text", "first_class", "generated", "steps", "drafted", "accepted")),
        ("pause", np.int64),  # forwards until a draft is made again
        ("next_pause", np.int64),
        ("cap", np.int64),  # maximum tokens of a draft
        ("sampled_before", np.int64),  # earlier tokens of the response
        ("candidates", np.float64, CANDIDATES),  # its possible lengths
        ("last", np.float64),  # probability that it is the last one to end
    ]
)


@dataclass(frozen=True)
class Proposal:
    """Drafts to verify in one forward: the first ``lengths[i]`` tokens of row i of ``drafts``, often none.

    Attributes:
        slots: int64 [n]. lengths: int64 [n].
        asked: int64 [q], rows for which a draft was requested.
        drafts: the drafts of all rows, before the gate.
    """

    slots: np.ndarray
    lengths: np.ndarray
    asked: np.ndarray
    drafts: Drafts

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n, width]."""
        return self.drafts.tokens


@dataclass(frozen=True)
class _Prepared:
    """What drafts of the samples ``slots`` depend on besides their last tokens: numbers of their texts, most tokens of
    each draft (0: not asked), samples that share each one's forwards, what tokens must be worth, and how many cost
    nothing."""

    slots: np.ndarray
    texts: np.ndarray
    caps: np.ndarray
    sharers: np.ndarray
    thresholds: np.ndarray
    free: int


class Speculator:
    """Drafter, gate and report of one engine. ``budget`` is one of ``BUDGETS``; ``progress``: tokens that the likely
    last samples got in the last recorded forward with drafts; ``step``: the policy step that samples."""

    def __init__(self, drafter: DrafterParams, gate: SpeculationGate, budget: str = "straggler") -> None:
        self.drafter, self.gate, self.budget = Drafter(drafter), gate, budget
        self.table, self.history = AcceptanceTable(), LengthHistory()
        self.report, self.progress = SpeculationReport(), 1.0
        self.step = self._forwards = 0
        self._next_plan = 0
        self._prepared: _Prepared | None = None
        self._free: list[int] = []
        self._problems: list[str] = []
        self._samples = np.zeros(0, _SAMPLE)  # by slot

    def unlearned(self) -> Speculator:
        """A speculator with the same settings and costs, but with no samples and no learned estimates."""
        return Speculator(self.drafter.params, replace(self.gate), self.budget)

    def open(
        self,
        problem: str,
        prompt: np.ndarray,
        is_branch: bool = False,
        sampled_before: int = 0,
        generated: np.ndarray = NOTHING,
    ) -> int:
        """Begin a sample of ``problem`` after ``prompt``. Returns its slot.

        Args:
            is_branch: the prompt continues another sample of the problem, so the tree contains it already.
            sampled_before: generated tokens of the response before this sample.
            generated: tokens that the sample already has, int32.
        """
        if not self._free:
            more = max(64, size := len(self._samples))
            self._samples = np.concatenate([self._samples, np.zeros(more, _SAMPLE)])
            self._problems += [""] * more
            self._free = list(range(size + more - 1, size - 1, -1))
        slot = self._free.pop()
        text = self.drafter.open(problem, prompt, is_branch)
        (first, candidates), width = self.history.expected(problem), self.drafter.params.draft.width
        count = len(generated)
        self._samples[slot] = text, first, count, count, 0, 0, 0, 1, width, sampled_before, candidates, 0.0
        if count:
            self.append(slot, generated)
        self._problems[slot] = problem
        self._next_plan = 0
        return slot

    def propose(self, slots: np.ndarray, most: np.ndarray) -> Proposal:
        """Drafts for the samples of a forward (int64 [n]), of at most ``most`` (int64 [n]) tokens each."""
        begin = time.perf_counter()
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.slots is not slots:
            prepared = self._prepare(slots)
        caps = np.minimum(most, prepared.caps)
        drafts = self.drafter.draft(prepared.texts, caps)
        lengths = self._lengths(drafts, prepared)
        proposal = Proposal(slots, lengths, caps.nonzero()[0], drafts)
        if not lengths.any():
            self._pause(proposal)
        self.report.queries += len(proposal.asked)
        self.report.draft_seconds += time.perf_counter() - begin
        return proposal

    def _prepare(self, slots: np.ndarray) -> _Prepared:
        if self._forwards >= self._next_plan:
            self._plan(slots)
            self._next_plan = self._forwards + _REPLAN_FORWARDS
        samples, cost, sharers = self._samples[slots], self.gate.cost(len(slots)), self._sharers(slots, len(slots))
        # A good draft must gain more than it costs to make.
        can_pay = _USUAL_GAIN * self.drafter.params.draft.width * cost.base / sharers >= cost.draft
        caps = np.where((samples["pause"] <= 0) & can_pay, samples["cap"], 0)
        free = max(0, int(cost.knee) - len(slots))
        return _Prepared(slots, samples["text"].astype(np.uint32), caps, sharers, gate_thresholds(cost, sharers), free)

    def append_sampled(self, proposal: Proposal, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append the new tokens of a forward before ``record`` (``is_appended``), for the drafts of the next one."""
        self.drafter.extend(self._samples["text"][proposal.slots], tokens, offsets, inserts=False)

    def record(
        self,
        proposal: Proposal,
        accepted: np.ndarray,
        tokens: np.ndarray,
        offsets: np.ndarray,
        seconds: float,
        is_appended: bool = False,
    ) -> None:
        """Record a forward: row i accepted the first ``accepted[i]`` tokens of its draft. Its new tokens are
        ``tokens[offsets[i] : offsets[i + 1]]`` (int32), the accepted ones and the one sampled after them."""
        begin = time.perf_counter()
        drafts, slots, drafted = proposal.drafts, proposal.slots, proposal.lengths
        self.table.update(drafts, drafted, accepted)
        samples = self._samples[slots]
        samples["generated"] += np.diff(offsets)
        samples["steps"] += 1
        samples["pause"] -= 1
        samples["drafted"] += drafted
        samples["accepted"] += accepted
        self._samples[slots] = samples
        self._pause(proposal)
        self._forwards += 1
        # The trees get the tokens that are appended already.
        self.drafter.extend(samples["text"], tokens, 0 * offsets if is_appended else offsets)
        live, count = len(drafted), len(drafted) + int(drafted.sum())
        if count > live:
            self.progress = float(np.average(1 + accepted, weights=1 / self._sharers(slots, live)))
            self.gate.record_progress(self.progress)
        self.report.add_forward(live, count, seconds)
        if is_appended:
            self._prepared = self._prepare(slots)
        self.report.draft_seconds += time.perf_counter() - begin

    def record_burst(self, slots: np.ndarray, appended: Sequence[np.ndarray], seconds: float) -> None:
        """Record a burst of forwards without drafts, which took ``seconds``: row i got the tokens ``appended[i]``
        (int32), one in each of the first forwards."""
        begin = time.perf_counter()
        counts = np.array([len(tokens) for tokens in appended], np.int64)
        passes = int(counts.max())
        self._samples["generated"][slots] += counts
        self._samples["steps"][slots] += counts
        self._samples["pause"][slots] -= counts
        self._forwards += passes
        offsets = np.concatenate([[0], np.cumsum(counts)])
        self.drafter.extend(self._samples["text"][slots], np.concatenate(appended).astype(np.int32), offsets)
        self.report.draft_seconds += time.perf_counter() - begin
        self.report.add_burst(counts, seconds)

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Append tokens that the sample did not generate, such as a tool's answer."""
        ends = np.array([0, len(tokens)], np.int64)
        self.drafter.extend(self._samples["text"][slot : slot + 1], np.ascontiguousarray(tokens, np.int32), ends)

    def finish(self, slot: int, length: int | None = None) -> None:
        """End a sample and its response. The sample stays in the trees, and its slot is free. ``length`` is the number
        of generated tokens if they were all given to ``append``."""
        if length is not None:
            self._samples["generated"][slot] = length
        self.learn_length(self._problems[slot], int(_response_lengths(self._samples[slot])))
        self.end_request(slot)

    def end_request(self, slot: int) -> None:
        """End a sample whose response may continue."""
        text, _, *counts = self._samples[slot].item()[:6]
        self.drafter.finish(text, self.step)
        self.report.add_samples(*([count] for count in counts))
        self._free.append(slot)

    def learn(self, problem: str, context: np.ndarray, generated: np.ndarray, step: int | None = None) -> None:
        """Keep a complete sample of this step, or of ``step``, without inserting it. The report does not count it."""
        self.drafter.learn(problem, context, generated, self.step if step is None else step)

    def drop_trees(self) -> None:
        """Free the trees and all slots. What is complete is inserted again when samples of its problem are opened."""
        self.drafter.clear()
        self._samples, self._free, self._problems = self._samples[:0], [], []

    def learn_length(self, problem: str, length: int) -> None:
        """Add the length of a response, in generated tokens of all its segments and turns."""
        self.history.add(problem, length)

    def end_step(self, step: int) -> SpeculationReport:
        """End policy step ``step``: evict old samples, decay the estimates, and return the report of the step."""
        report = self.current_report()
        self.report = SpeculationReport()
        self.history.end_step()
        self.table.end_step()
        self.drafter.end_step(step)
        self.step, self._forwards, self._next_plan = step + 1, 0, 0
        return report

    def current_report(self) -> SpeculationReport:
        """The report since the last ``end_step``."""
        self.report.drafter_bytes, self.report.drafter_tokens = self.drafter.num_bytes, self.drafter.stored_tokens
        return self.report

    def state_dict(self) -> dict[str, np.ndarray]:
        """The state as plain arrays, without the running samples."""
        parts = {"drafter": self.drafter, "table": self.table, "history": self.history}
        state = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()}
        progress = np.array([self.progress, self.gate.last_tokens])
        return {**state, "step": np.array(self.step, np.int64), "progress": progress}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        for name, part in (("drafter", self.drafter), ("table", self.table), ("history", self.history)):
            part.load_state_dict({k[len(name) + 1 :]: v for k, v in state.items() if k.startswith(f"{name}.")})
        self.step = int(state["step"])
        self.progress, self.gate.last_tokens = state["progress"].tolist()
        self._samples, self._free, self._problems = self._samples[:0], [], []

    def _lengths(self, drafts: Drafts, prepared: _Prepared) -> np.ndarray:
        """Lengths by the token gate if the whole pass pays, else 0."""
        (live,), width, sharers = drafts.lengths.shape, int(drafts.lengths.max(initial=0)), prepared.sharers
        if not width:
            return np.zeros(live, np.int64)
        if not self.gate.decides and drafts.lengths.sum() <= prepared.free:
            return drafts.lengths.astype(np.int64)
        accept = self.table.probabilities(drafts, width)
        lengths = token_gate(accept, drafts.lengths, prepared.thresholds, prepared.free)
        if live > (most := _FIRST_DRAFTS + 2 * self.table.verified):
            lengths[np.cumsum(lengths > 0) > most] = 0
        if not self.gate.decides:
            return lengths
        expected = np.where(np.arange(width) < lengths[:, None], accept, 0.0).sum(1)
        pays = self.gate.pays(self.gate.gain(expected, sharers, live), live, live + int(lengths.sum()))
        return lengths if pays else np.zeros(live, np.int64)

    def _sharers(self, slots: np.ndarray, live: int) -> np.ndarray:
        """Number of samples that share each sample's forwards, float64 [n]."""
        if self.budget == "straggler":
            with np.errstate(divide="ignore"):
                return np.minimum(1 / self._samples["last"][slots], _MOST_SHARERS * live)
        samples = self._samples[slots]
        is_long = self.history.classes(samples["first_class"], _response_lengths(samples)) == LengthClass.LONG
        # Assume the same share of long samples among the rows that were not asked.
        return np.where(is_long, max(1.0, float(is_long.mean()) * live), float(live))

    def _pause(self, proposal: Proposal) -> None:
        """Pause the samples that were asked and have no useful draft, but no longer than ``_QUERY_SHARE`` requires."""
        live, slots = len(proposal.slots), proposal.slots[proposal.asked]
        cost, pause = self.gate.cost(live), self._samples["next_pause"][slots]
        share = cost.draft * live / (_QUERY_SHARE * float(cost.seconds(live)))
        longest, useful = min(max(math.ceil(share), 1), _MAX_PAUSE), proposal.lengths[proposal.asked] > 0
        self._samples["pause"][slots] = np.where(useful, 0, np.minimum(pause, longest))
        self._samples["next_pause"][slots] = np.where(useful, 1, np.minimum(pause * 2, longest))

    def _plan(self, slots: np.ndarray) -> None:
        """Update what depends on lengths: the probability of being the last one, or the caps of length classes."""
        samples, width = self._samples[slots], self.drafter.params.draft.width
        so_far = _response_lengths(samples)
        if self.budget == "straggler":
            speed = (samples["generated"] + 8.0) / (samples["steps"] + 8.0)
            self._samples["last"][slots] = completion_probability(samples["candidates"], so_far, speed)
        else:
            classes = self.history.classes(samples["first_class"], so_far)
            self._samples["cap"][slots] = np.minimum(_CLASS_CAPS[classes], width)


def _response_lengths(samples: np.ndarray) -> np.ndarray:
    """Generated tokens of each response so far, including those before the running sample."""
    return samples["generated"] + samples["sampled_before"]
