"""Which rounds may have drafts is decided by their seconds, and costs a percent where drafts do not pay."""

import numpy as np
import pytest

from megatron_dta.sampling.speculation.clock import LOSS_SHARE, TRIAL_ROUNDS, DraftingClock


def run(clock: DraftingClock, seconds: float, drafted: float, gain: float, tokens: int, rng: np.random.Generator):
    """Rounds of 60 rows, 8 passes each without drafts, until ``tokens`` tokens are there. A pass takes ``seconds``, one
    with drafts ``drafted`` for ``gain`` tokens a row, the trees of a trial 20 ms. Returns the time, that of as many
    tokens without drafts, and the rounds that could have drafts."""
    done, time, asked = 0.0, 0.0, 0
    while done < tokens:
        if clock.is_due:
            clock.begin(20e-3)
            time += 20e-3 * clock.is_on
            clock.spend(20e-3 * clock.is_on, 0.0)
        count, cost = (round(60 * gain), drafted) if clock.is_on else (480, 8 * seconds)
        cost *= rng.uniform(0.9, 1.1)
        asked += clock.is_on
        clock.took(60, count / 60, cost, clock.is_on)
        done, time = done + count, time + cost
    return time, done / 60 * seconds, asked


@pytest.mark.parametrize("drafted", [3e-3, 20e-3])
def test_drafts_that_do_not_pay_cost_a_percent(drafted: float) -> None:
    """Rounds with drafts take as long as 3 or 20 passes and give two tokens a row."""
    clock = DraftingClock()
    time, plain, asked = run(clock, 1e-3, drafted, 2.0, 4_000_000, np.random.default_rng(3))
    assert asked > 0
    # The last trial may cost more than was left, by what its rounds take.
    assert time < plain * 1.003 + LOSS_SHARE * plain + TRIAL_ROUNDS * drafted
    assert clock.saved == pytest.approx(plain - time, abs=0.003 * plain)


def test_drafts_that_pay_stay_until_they_do_not() -> None:
    clock, rng = DraftingClock(), np.random.default_rng(4)
    run(clock, 1e-3, 2e-3, 4.0, 600_000, rng)  # until the time allows a trial
    clock.begin_batch()
    time, plain, _ = run(clock, 1e-3, 2e-3, 4.0, 600_000, rng)
    assert clock.is_on
    assert time < 0.55 * plain
    assert clock.saved == pytest.approx(plain - time, rel=0.1)
    for _ in range(2 * TRIAL_ROUNDS):  # the present trial may have saved enough to win
        clock.took(60, 1, 2e-3, True)
    assert not clock.is_on


def test_ranks_that_decide_together_use_no_seconds_of_theirs() -> None:
    """Two ranks with other clocks and the rates of one of them ask in the same rounds."""
    first = DraftingClock()
    for _ in range(5):
        first.took(60, 8, 8e-3, False)
        first.took(60, 4, 2e-3, True)
    ranks = [DraftingClock(), DraftingClock()]
    for clock in ranks:
        clock.share(first.rates())
    asked = []
    for index in range(800):
        for clock, slow in zip(ranks, (1.0, 50.0), strict=True):
            on = clock.is_on
            clock.took(60, 4 if on else 8, slow * (1 + index % 3), on)
            if clock.is_due:
                clock.begin(1e-3)
        assert ranks[0].is_on == ranks[1].is_on
        asked.append(ranks[0].is_on)
    assert not asked[0]
    assert asked[-1]
