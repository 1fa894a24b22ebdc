"""Bursts of passes without drafts, accounted for at once, leave what passes one by one leave; where nothing is worth a
draft, few passes have some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.model import initialize_parallel
from megatron_dta.sampling.engines.in_process.drafting import NO_DRAFT, Drafting, SuffixDrafting
from megatron_dta.sampling.engines.in_process.scheduler import Request
from megatron_dta.sampling.engines.interface import GenerationRequest
from megatron_dta.speculation import drafter
from megatron_dta.speculation.budgets import BudgetParams
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.exploration import LONELY
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.gate import SpeculationGate
from megatron_dta.speculation.speculator import Speculator
from megatron_dta.speculation.suffix_forest import PythonSuffixForest

DEAR = ForwardCost(base=1e-3, per_token=1.0)


class OneByOne(SuffixDrafting):
    """The slow twin: every pass of a burst is proposed for and verified."""

    verified_burst = Drafting.verified_burst


@dataclass
class Pair:
    """Two draftings that are told the same."""

    fast: SuffixDrafting
    slow: SuffixDrafting

    @classmethod
    def of(cls, cost: ForwardCost, **budget: float) -> Pair:
        made = [Speculator(DrafterParams(depth=12), BudgetParams(**budget), cost) for _ in range(2)]
        return cls(SuffixDrafting(made[0]), OneByOne(made[1]))

    def both(self) -> tuple[SuffixDrafting, SuffixDrafting]:
        return self.fast, self.slow


def running(rng: np.random.Generator, count: int, length: int) -> list[Request]:
    prompts = rng.integers(0, 5, (count // 2 + 1, 6)).astype(np.int32)
    return [Request(GenerationRequest(i, prompts[i // 2], length, key=i), i, 16, None) for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_a_burst_is_its_passes(seed: int):
    rng = seed_all(seed)
    initialize_parallel(seed)
    pair = Pair.of(DEAR, exploration=0.0)
    rows = running(rng, 9, 80)
    for drafting in pair.both():
        for row in rows:
            drafting.submitted(row)
    ended: list[Request] = []
    while rows:
        most = np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
        drafts = [drafting.propose(rows, most) for drafting in pair.both()]
        assert all(len(draft) == 0 for both in drafts for draft in both)
        lengths = np.minimum(rng.integers(1, 9, len(rows)), [len(row.tokens) - row.num_tokens for row in rows])
        appended = [rng.integers(0, 5, length).astype(np.int32) for length in lengths]
        for row, tokens in zip(rows, appended, strict=True):
            row.extend(tokens, np.zeros(len(tokens)))
        for drafting in pair.both():
            drafting.verified_burst(rows, appended, 0.5, len(rows))
        ended += [row for row in rows if row.num_tokens == len(row.tokens)]
        for drafting in pair.both():
            for row in rows:
                if row.num_tokens == len(row.tokens):
                    drafting.finished(row)
        rows = [row for row in rows if row.num_tokens < len(row.tokens)]
        fast, slow = (drafting.speculator for drafting in pair.both())
        # Tokens, steps, drafts and pauses of the samples.
        assert np.array_equal(fast._rows[:, 3:8], slow._rows[:, 3:8])
    assert len(ended) == 9
    states = [drafting.speculator.drafter.state_dict() for drafting in pair.both()]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    reports = [drafting.speculator.report for drafting in pair.both()]
    for name in ("live", "tokens", "lengths", "steps", "drafted", "accepted", "classes"):
        assert getattr(reports[0], name) == getattr(reports[1], name), name
    assert reports[0].seconds == pytest.approx(reports[1].seconds)
    assert np.allclose(pair.fast._measured, pair.slow._measured, rtol=1e-12, atol=0)


def test_a_new_plan_is_not_forgotten_in_a_burst(monkeypatch: pytest.MonkeyPatch):
    """Plans are made after as many passes, or with the first proposal behind the burst in which they fall."""
    rng = seed_all(7)
    drafting = SuffixDrafting(Speculator(DrafterParams(), BudgetParams(exploration=0.0), DEAR))
    rows = running(rng, 3, 400)
    for row in rows:
        drafting.submitted(row)
    plans: list[int] = []
    passes = 0
    plan = drafting.speculator._plan
    monkeypatch.setattr(drafting.speculator, "_plan", lambda slots: (plans.append(passes), plan(slots)))
    for length in rng.integers(1, 12, 40).tolist():
        drafting.propose(rows, np.full(3, 50))
        drafting.verified_burst(rows, [np.ones(length, np.int32)] * 3, 1.0, 3)
        passes += length
    # Sixteen passes at least, and less than a burst more.
    assert plans[0] == 0
    assert all(16 <= gap < 16 + 12 for gap in np.diff(plans).tolist())


@pytest.mark.parametrize("live", [20, 400])
def test_where_nothing_pays_few_passes_have_drafts(live: int):
    rng = seed_all(live)
    # A drafted token costs as much as a thousandth of a pass, and nothing that is drafted is ever right.
    cost = ForwardCost(base=5e-3, per_token=5e-6, knee=0, draft=1e-9)
    speculator = Speculator(DrafterParams(), BudgetParams("gate"), cost)
    phrase = rng.integers(0, 50, 30).astype(np.int32)
    slots = np.array([speculator.open("one", phrase, key) for key in range(live)])
    drafted = []
    for step in range(30 * LONELY):
        proposal = speculator.propose(slots, np.full(live, 20))
        drafted.append(int(proposal.lengths.sum()))
        tokens = phrase[(step + np.arange(live)) % 30] if step % 3 else rng.integers(50, 10**6, live).astype(np.int32)
        speculator.record(proposal, np.zeros(live, np.int64), tokens, np.arange(live + 1), 0.01)
    late = np.array(drafted[len(drafted) // 2 :])
    assert 0 < (late > 0).mean() <= 1.5 / LONELY
    assert late.max() <= 16 * 4


class AtOnce(SuffixDrafting):
    """Puts nothing off."""

    def verified_burst(self, rows, appended, seconds, tokens) -> None:
        super().verified_burst(rows, appended, seconds, tokens)
        self._run_deferred()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("has_gate", [True, False])
def test_deferred_work_is_done_before_it_is_needed(native: bool, has_gate: bool, monkeypatch: pytest.MonkeyPatch):
    """Compares with a twin that defers nothing, while samples begin, end, branch, are drafted for and aborted."""
    if not native:
        monkeypatch.setattr(drafter, "create_forest", PythonSuffixForest)
    rng = seed_all(11)
    initialize_parallel(11)
    cost = ForwardCost(base=1e-3, per_token=1e-6)
    gates = [SpeculationGate(cost, cost) if has_gate else None for _ in range(2)]
    made = [Speculator(DrafterParams(depth=10, window=2, max_tokens=3000), BudgetParams(), cost, r) for r in gates]
    draftings = [SuffixDrafting(made[0]), AtOnce(made[1])]
    rows: list[Request] = []
    count = most_deferred = 0
    for step in range(80):
        while len(rows) < 6:
            request = GenerationRequest(count, rng.integers(0, 4, 7).astype(np.int32), 40, count, hold=bool(count % 2))
            rows.append(Request(request, count, 16, None))
            count += 1
            for drafting in draftings:
                drafting.submitted(rows[-1])
        asked = [drafting.wants(len(rows)) for drafting in draftings]
        drafts = [[NO_DRAFT] * len(rows)] * 2
        if any(asked) and rng.random() < 0.3:
            limits = np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
            drafts = [drafting.propose(rows, limits) for drafting in draftings]
            assert all(np.array_equal(a, b) for a, b in zip(*drafts, strict=True))
        lengths = np.minimum(rng.integers(1, 9, len(rows)), [len(row.tokens) - row.num_tokens for row in rows])
        is_drafted = any(map(len, drafts[0]))
        if is_drafted:
            lengths = np.minimum(lengths, [len(draft) + 1 for draft in drafts[0]])
        appended = [rng.integers(0, 4, length).astype(np.int32) for length in lengths]
        for row, tokens in zip(rows, appended, strict=True):
            row.extend(tokens, np.zeros(len(tokens)))
        for drafting in draftings:
            if is_drafted:
                widths = np.array([len(draft) for draft in drafts[0]])
                drafting.verified(widths, appended, 0.01, len(rows) + int(widths.sum()))
            else:
                drafting.verified_burst(list(rows), appended, 0.01, len(rows))
            drafting.ran(0.01)
        for row in [row for row in rows if row.num_tokens == len(row.tokens)]:
            rows.remove(row)
            for drafting in draftings:
                drafting.finished(row)
                if row.generation.hold:
                    drafting.released(row)
        most_deferred = max(most_deferred, len(draftings[0]._deferred))
        if step % 3 == 2:
            for drafting in draftings:
                drafting.catch_up()
        if step % 25 == 24:
            rows.clear()
            for drafting in draftings:
                drafting.abandoned()
                drafting.weights_changed(step // 25 + 1)
    assert most_deferred > 4
    states = [drafting.speculator.state_dict() for drafting in draftings]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])
    assert draftings[0]._measured == draftings[1]._measured


def test_a_burst_before_any_draft_does_not_stand_in_the_trees_twice():
    initialize_parallel(1)
    drafting = SuffixDrafting(Speculator(DrafterParams(depth=8), BudgetParams(), DEAR))
    row = Request(GenerationRequest(0, np.arange(5, dtype=np.int32), 9, key=0), 0, 16, None)
    drafting.submitted(row)
    tokens = np.array([7, 8, 9], np.int32)
    row.extend(tokens, np.zeros(3))
    drafting.verified_burst([row], [tokens], 0.1, 1)
    forest = drafting.speculator.drafter
    text = int(drafting.speculator._rows[drafting._slots[row], 0])
    assert forest._forest.tokens(text).tolist() == [0, 1, 2, 3, 4, 7, 8, 9]


def test_what_fails_when_it_is_done_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    initialize_parallel(1)
    drafting = SuffixDrafting(Speculator(DrafterParams(), BudgetParams(), DEAR))
    (row,) = running(seed_all(1), 1, 9)
    drafting.submitted(row)

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(drafting._speculator.drafter._forest, "extend", fail)
    drafting.verified_burst([row], [np.array([1], np.int32)], 0.1, 1)
    with pytest.raises(MemoryError, match="no memory"):
        drafting.propose([row], np.array([3]))


@pytest.mark.parametrize("follows_clock", [False, True])
def test_a_deterministic_run_drafts_by_no_clock(follows_clock: bool):
    """Two that are told the same but for the seconds, which say to one of them that drafts never pay."""
    rng = seed_all(5)
    initialize_parallel(5)
    cost = ForwardCost(base=1e-3, per_token=1e-6)
    made = [Speculator(DrafterParams(depth=10), BudgetParams(), cost, SpeculationGate(cost, cost)) for _ in range(2)]
    draftings = [SuffixDrafting(each, follows_clock) for each in made]
    phrase, drafted = rng.integers(0, 50, 12).astype(np.int32), [[], []]
    for version in range(3):
        rows = [Request(GenerationRequest(i, phrase[:4], 60, i), i, 16, None) for i in range(4)]
        for drafting in draftings:
            drafting.weights_changed(version)
            for row in rows:
                drafting.submitted(row)
        while rows[0].num_tokens < len(rows[0].tokens):
            known, limits = rows[0].num_tokens, np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
            new = np.array([phrase[known % 12]], np.int32)
            for drafting, found, slow in zip(draftings, drafted, (1.0, 100.0), strict=True):
                drafts = drafting.propose(rows, limits) if drafting.wants(4) else [NO_DRAFT] * 4
                found.append([draft.tolist() for draft in drafts])
                widths = np.array([len(draft) for draft in drafts])
                seconds = (slow if widths.any() else 1.0) * 1e-3
                if widths.any():
                    drafting.verified(widths, [new] * 4, seconds, 4 + int(widths.sum()))
                else:
                    drafting.verified_burst(list(rows), [new] * 4, seconds, 4)
                drafting.ran(seconds)
            for row in rows:
                row.extend(new, np.zeros(1))
        for drafting in draftings:
            for row in rows:
                drafting.finished(row)
    assert any(any(map(len, drafts)) for drafts in drafted[0])
    assert (drafted[0] == drafted[1]) is not follows_clock
