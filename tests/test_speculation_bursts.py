"""Bursts of passes without drafts, accounted for at once, leave what passes one by one leave; where nothing is worth a
draft, few passes have some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.model import initialize_parallel
from megatron_dta.sampling.engines.drafting import Drafting, SuffixDrafting
from megatron_dta.sampling.engines.interface import GenerationRequest
from megatron_dta.sampling.engines.scheduler import Sequence
from megatron_dta.speculation import drafter
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.speculator import _LONELY, BudgetParams, Speculator
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


def running(rng: np.random.Generator, count: int, length: int) -> list[Sequence]:
    prompts = rng.integers(0, 5, (count // 2 + 1, 6)).astype(np.int32)
    return [Sequence(GenerationRequest(i, prompts[i // 2], length, key=i), i, 16, None) for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_a_burst_is_its_passes(seed: int):
    rng = seed_all(seed)
    initialize_parallel(seed)
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
            row.extend(tokens, np.zeros(len(tokens)))
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


@pytest.mark.parametrize("native", [True, False])
def test_insertions_beside_other_work_are_there_when_they_are_asked_for(native: bool, monkeypatch: pytest.MonkeyPatch):
    """Two drafters, one of which inserts at once; between insertions samples begin, end, are drafted for, and leave."""
    if not native:
        monkeypatch.setattr(drafter, "create_forest", PythonSuffixForest)
    rng = seed_all(11)
    later, now = (drafter.Drafter(DrafterParams(depth=10, window=2, max_tokens=3000)) for _ in range(2))
    alive: list[int] = []
    for step in range(60):
        while len(alive) < 6:
            prompt = rng.integers(0, 4, 7)
            opened = [each.open(str(len(alive) % 2), prompt) for each in (later, now)]
            assert opened[0] == opened[1]
            alive.append(opened[0])
        samples = np.array(alive)
        counts = rng.integers(1, 9, len(alive))
        tokens = rng.integers(0, 4, counts.sum()).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        later.extend_later(samples, tokens, offsets)
        now.extend(samples, tokens, offsets)
        if step % 3 == 0:
            for each in (later, now):
                each.finish(alive[0], step // 10)
            alive.pop(0)
        if step % 7 == 0:
            drafts = [each.draft(np.array(alive), np.full(len(alive), 5)) for each in (later, now)]
            assert np.array_equal(drafts[0].tokens, drafts[1].tokens)
            assert np.array_equal(drafts[0].lengths, drafts[1].lengths)
        if step % 10 == 9:
            assert later.end_step(step // 10) == now.end_step(step // 10)
        if step % 13 == 0:
            assert (later.stored_tokens, later.num_samples) == (now.stored_tokens, now.num_samples)
            for each in (later, now):
                each.discard(alive[-1])
            alive.pop()
    states = [each.state_dict() for each in (later, now)]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_an_insertion_that_fails_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    broken = drafter.Drafter(DrafterParams())
    sample = np.array([broken.open("one", np.arange(4))])

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(broken._forest, "extend", fail)
    broken.extend_later(sample, np.array([1], np.int32), np.array([0, 1]))
    with pytest.raises(MemoryError, match="no memory"):
        broken.draft(sample, np.array([3]))
