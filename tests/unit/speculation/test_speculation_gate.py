"""The gate for passes with drafts: what it lets through, and that losses stay within its overhead budget."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.speculation.budgets import BudgetParams
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.gate import CREDIT, LOSS_SHARE, Rounds
from megatron_dta.speculation.speculator import Speculator

PLAIN = ForwardCost(base=2e-3, per_token=1e-5)
DRAFTED = ForwardCost(base=4e-3, per_token=1e-5)


def warm(rounds: Rounds, live: int = 40) -> Rounds:
    """After one burst that took what was expected."""
    assert not rounds.wants(live)
    rounds.ran(live, 8, 8 * float(PLAIN.seconds(live)))
    assert rounds.wants(live)
    return rounds


def test_gain_is_that_of_passes_not_run():
    rounds = warm(Rounds(PLAIN, DRAFTED))
    # One accepted token of all 40 samples is one pass of 40 less.
    gain = rounds.gain(np.ones(40), np.full(40, 40.0), 40)
    assert gain == pytest.approx(float(PLAIN.seconds(40)))
    # Of the last one to end it is a whole forward's base, whoever else runs.
    assert rounds.gain(np.array([3.0]), np.array([1.0]), 40) == pytest.approx(3 * (2e-3 + 1e-5))
    extra = rounds.drafted(100) - rounds.plain(40)
    assert extra == pytest.approx(5e-3 - 2.4e-3)
    assert rounds.pays(1.01 * extra, 40, 100)
    assert not rounds.pays(0.99 * extra, 40, 100)


def test_seconds_follow_what_is_measured():
    rounds = Rounds(PLAIN, DRAFTED)
    rounds.ran(40, 8, 3 * 8 * float(PLAIN.seconds(40)))
    assert rounds.plain(10) == pytest.approx(3 * float(PLAIN.seconds(10)))
    assert rounds.drafted(50) == pytest.approx(3 * float(DRAFTED.seconds(50)))
    for _ in range(5):
        rounds.ran_drafted(40, 80, 1.0, 1.5 * float(DRAFTED.seconds(80)))
    assert rounds.drafted(50) == pytest.approx(1.5 * float(DRAFTED.seconds(50)))
    rounds.is_measured = False
    rounds.ran(40, 8, 100.0)
    assert rounds.plain(10) == pytest.approx(3 * float(PLAIN.seconds(10)))


def test_what_the_last_sample_saves_goes_down_once_it_drafts():
    """To what a token takes with drafts; against decoding without any it saves as much as before."""
    rounds = warm(Rounds(PLAIN, DRAFTED))
    tokens, alone = np.array([3.0]), np.array([1.0])
    before = rounds.gain(tokens, alone, 40)
    assert before == pytest.approx(rounds.saved(tokens, alone, 40))
    for _ in range(50):
        rounds.went_on(8.0)
    price = float(DRAFTED.seconds(8)) / 8
    assert price < 0.8 * 2e-3
    assert rounds.gain(tokens, alone, 40) == pytest.approx(3 * (price + 1e-5), rel=1e-3)
    assert rounds.saved(tokens, alone, 40) == pytest.approx(before)
    whole = warm(Rounds(PLAIN, DRAFTED, prices_whole=True))
    whole.went_on(8.0)
    assert whole.gain(tokens, alone, 40) == pytest.approx(before)
    # The gate of single tokens goes by the same price.
    assert rounds.cost(40).base == pytest.approx(price, rel=1e-3)
    for _ in range(50):
        rounds.went_on(1.0)
    assert rounds.gain(tokens, alone, 40) == pytest.approx(before, rel=1e-3)


def test_fewer_samples_are_looked_at_again():
    """After looking in vain many rounds pass, unless half of the samples have ended meanwhile."""
    rounds = warm(Rounds(PLAIN, DRAFTED), 400)
    for _ in range(12):
        rounds.in_vain(400)
    waited = 0
    while not rounds.wants(400):
        waited += 1
    assert waited > 8
    for _ in range(2):
        rounds.in_vain(400)
    assert not rounds.asks_next
    assert [rounds.wants(live) for live in (300, 201, 200)] == [False, False, False]
    assert rounds.asks_next
    assert rounds.wants(199)


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_bounded_whatever_is_expected(seed: int):
    """Drafts that are always expected to be worth it and never are; half of the passes with them take longer too."""
    rng = seed_all(seed)
    rounds, live = warm(Rounds(PLAIN, DRAFTED)), 40
    spent, drafted, most = 8 * rounds.plain(live), 0, 0.0
    passes = 8
    for _ in range(3000):
        tokens = live + int(rng.integers(1, 200))
        if rounds.wants(live) and rounds.pays(1.0, live, tokens):
            seconds = float(DRAFTED.seconds(tokens)) * float(rng.choice([1.0, 1.5]))
            rounds.ran_drafted(live, tokens, 0.0, seconds)
            drafted, passes, spent = drafted + 1, passes + 1, spent + seconds
        else:
            rounds.ran(live, 8, 8 * float(PLAIN.seconds(live)))
            passes, spent = passes + 8, spent + 8 * float(PLAIN.seconds(live))
        plain = passes * float(PLAIN.seconds(live))
        # One pass may overdraw the overhead budget.
        largest = 1.5 * float(DRAFTED.seconds(live + 200))
        most = max(most, spent - plain - LOSS_SHARE * plain - (1 + CREDIT) * largest)
    assert 3 < drafted < 600
    assert most <= 0
    assert spent < 1.01 * plain


@pytest.mark.parametrize("live", [3, 40, 400])
def test_text_that_cannot_be_drafted_is_left_alone(live: int):
    """Samples without any repetition in what matters: few passes have drafts, and few rounds look for some."""
    rng = seed_all(live)
    rounds = Rounds(PLAIN, DRAFTED)
    speculator = Speculator(DrafterParams(), BudgetParams(), DRAFTED, rounds)
    phrase = rng.integers(0, 50, 30).astype(np.int32)
    slots = np.array([speculator.open("one", phrase, key) for key in range(live)])
    most, asked, drafted, count = np.full(live, 20), 0, 0, 400
    plain = spent = 0.0
    for step in range(count):
        proposal = speculator.propose(slots, most) if speculator.wants(live) else None
        tokens = phrase[(step + np.arange(live)) % 30] if step % 3 else rng.integers(50, 10**6, live).astype(np.int32)
        asked += proposal is not None
        if proposal is not None and proposal.lengths.any():
            seconds, passes = float(DRAFTED.seconds(live + proposal.lengths.sum())), 1
            speculator.record(proposal, np.zeros(live, np.int64), tokens, np.arange(live + 1), seconds)
            drafted += 1
        else:
            seconds, passes = 8 * float(PLAIN.seconds(live)), 8
            appended = np.repeat(tokens[:, None], 8, axis=1) + rng.integers(0, 10**6, (live, 8)).astype(np.int32)
            speculator.record_burst(slots, list(appended), seconds, proposal is not None)
        speculator.took(seconds)
        spent, plain = spent + seconds, plain + passes * float(PLAIN.seconds(live))
    assert drafted > 0 or live == 3
    assert drafted < 0.1 * count
    assert asked < 0.35 * count
    assert spent < 1.01 * plain
