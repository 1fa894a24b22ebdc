"""Bursts of passes without drafts, accounted for at once, leave what passes one by one leave; where nothing is worth a
draft, few passes have some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.engines.drafting import Drafting, SuffixDrafting
from megatron_dta.sampling.engines.interface import GenerationRequest
from megatron_dta.sampling.engines.scheduler import Sequence
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.speculator import _LONELY, BudgetParams, Speculator

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


def running(rng: np.random.Generator, count: int, length: int) -> list[Sequence]:
    prompts = rng.integers(0, 5, (count // 2 + 1, 6)).astype(np.int32)
    return [Sequence(GenerationRequest(i, prompts[i // 2], length, key=i), i, 16, None) for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_a_burst_is_its_passes(seed: int):
    rng = seed_all(seed)
    pair = Pair.of(DEAR, exploration=0.0)
    rows = running(rng, 9, 80)
    for drafting in pair.both():
        for row in rows:
            drafting.submitted(row)
    ended: list[Sequence] = []
    while rows:
        most = np.array([len(row.tokens) - row.known - 1 for row in rows])
        drafts = [drafting.propose(rows, most) for drafting in pair.both()]
        assert all(len(draft) == 0 for both in drafts for draft in both)
        lengths = np.minimum(rng.integers(1, 9, len(rows)), [len(row.tokens) - row.known for row in rows])
        appended = [rng.integers(0, 5, length).astype(np.int32) for length in lengths]
        for row, tokens in zip(rows, appended, strict=True):
            for token in tokens.tolist():
                row.append(token, 0.0)
        for drafting in pair.both():
            drafting.verified_burst(rows, appended, 0.5)
        ended += [row for row in rows if row.known == len(row.tokens)]
        for drafting in pair.both():
            for row in rows:
                if row.known == len(row.tokens):
                    drafting.finished(row)
        rows = [row for row in rows if row.known < len(row.tokens)]
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
    assert pair.fast._measured == pytest.approx(pair.slow._measured)


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
        drafting.verified_burst(rows, [np.ones(length, np.int32)] * 3, 1.0)
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
    for step in range(30 * _LONELY):
        proposal = speculator.propose(slots, np.full(live, 20))
        drafted.append(int(proposal.lengths.sum()))
        tokens = phrase[(step + np.arange(live)) % 30] if step % 3 else rng.integers(50, 10**6, live).astype(np.int32)
        speculator.record(proposal, np.zeros(live, np.int64), tokens, np.arange(live + 1), 0.01)
    late = np.array(drafted[len(drafted) // 2 :])
    assert 0 < (late > 0).mean() <= 1.5 / _LONELY
    assert late.max() <= 16 * 4
