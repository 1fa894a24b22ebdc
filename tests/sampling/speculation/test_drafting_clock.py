"""Which rounds may have drafts is decided by their seconds, and costs a percent where drafts do not pay."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dta.sampling.in_process import suffix_drafting as suffix_drafting_module
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import GenerationRequest, generate, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation import clock as clock_module
from megatron_dta.sampling.speculation.clock import LOSS_SHARE, TRIAL_ROUNDS, DraftingClock, PlainSchedule
from rollout_forest import started
from sampling_cases import make_model
from speculation_exact_cases import suffix_drafting


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


def test_drafts_that_pay_stay_until_they_do_not() -> None:
    clock, rng = DraftingClock(), np.random.default_rng(4)
    run(clock, 1e-3, 2e-3, 4.0, 600_000, rng)  # until the time allows a trial
    time, plain, _ = run(clock, 1e-3, 2e-3, 4.0, 600_000, rng)
    assert clock.is_on
    assert time < 0.55 * plain
    for _ in range(clock_module._MOST_CARRIED + 2 * TRIAL_ROUNDS):  # lose what the last trials have won
        clock.took(60, 1, 2e-3, True)
    assert not clock.is_on


def test_passes_without_drafts_are_measured_again_and_phases_decide_about_the_next() -> None:
    clock = DraftingClock()
    for saved, stays in ((0.5, True), (-0.02, True), (-0.03, False), (-0.03, False), (0.01, True)):
        clock.is_on |= not clock._batches
        for asked in (True, False, False, False):
            clock.took(50, 8, 8e-3, asked)
            assert clock.asks is (clock.is_on and len(clock._recent[False, 6]) == 3)
            assert clock._risk < clock_module._CAPTURE_SECONDS  # no other graph is captured
        clock.end_phase(PlainSchedule(took=1.0, latest=1.0 + saved, is_plain=False))
        assert clock.is_on is stays
        for _ in range(clock_module._RENEWAL):
            clock.begin_batch()


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


class Scripted(SuffixDrafting):
    """A pass takes 1 ms without drafts and 1.25 ms with; ``spent`` is the sum."""

    spent = 0.0

    def ran(self, seconds: float) -> None:
        done = self._last
        seconds = 0.0 if done is None else done.decoding_passes * (1e-3 if done.drafted is None else 1.25e-3)
        self.spent += seconds
        super().ran(seconds)


@pytest.mark.parametrize(("rows", "known"), [(6, 1), (6, 6), (2, 1), (2, 5)])
def test_what_drafts_saved_is_what_the_clock_says(rows: int, known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six prompts, of which ``rows`` run at once, ``known`` were sampled before and are drafted well, others not."""
    monkeypatch.setattr(suffix_drafting_module, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(clock_module, "TRIAL_ROUNDS", 10**9)  # no trial ends, and none begins by itself
    monkeypatch.setattr(clock_module, "_FIRST_WAIT", 10**9)
    params, model = SamplingParams(1, -1, 0.0, 1.0, seed=5), make_model(7, num_layers=1)
    prompts = np.random.default_rng(3).integers(1, 20, (2, 6, 9)).astype(np.int32)
    prompts[1, :known] = prompts[0, :known]
    spent, saved = [], []
    for drafts in (False, True):
        drafting = Scripted(suffix_drafting(follows_clock=True).speculator)
        engine = started(model, params, drafting=drafting, max_requests=rows)
        for batch in (0, 1):
            engine.update_weights(batch)
            drafting.spent, drafting._clock.is_on, drafting._clock._elapsed = 0.0, drafts and batch == 1, 1e12
            with phase(engine, params, batch):
                generate(engine, [GenerationRequest(i, prompts[batch, i], 24 + 4 * i, i) for i in range(6)])
        spent.append(drafting.spent)
        saved.append(drafting.report().saved_seconds)
    assert saved[0] == pytest.approx(0.0, abs=1e-9)
    # What drafts gain in passes that also compute prompts is left out.
    assert 0.75 * (spent[0] - spent[1]) <= saved[1] <= spent[0] - spent[1] + 1e-9
