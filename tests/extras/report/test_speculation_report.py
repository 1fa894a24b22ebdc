"""Statistics and curves of speculation."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.speculation.report import PlainForwards, SpeculationReport, drafting_benefit
from megatron_dta.training.monitor.metric_names import is_known


def made_up(rng: np.random.Generator, samples: int, forwards: int) -> SpeculationReport:
    report = SpeculationReport(draft_seconds=float(rng.random()), drafter_bytes=3 << 20, drafter_tokens=40_000)
    live = np.sort(rng.integers(1, samples + 1, forwards))[::-1]
    for count, seconds in zip(live.tolist(), rng.exponential(0.01, forwards).tolist(), strict=True):
        report.add_forward(count, count + 5, seconds)
    for _ in range(samples):
        length = int(rng.integers(1, 90))
        accepted = int(rng.integers(0, length))
        drafted = accepted + int(rng.integers(0, 50))
        report.add_sample(length, length - accepted, drafted, accepted)
    return report


def test_figures_by_loops() -> None:
    report = made_up(seed_all(57), 57, 31)
    metrics = report.metrics()
    assert all(is_known(f"timing/{name}") for name in metrics)
    assert metrics["speculation_wasted_tokens"] == sum(report.drafted) - sum(report.accepted)
    assert metrics["speculation_makespan_seconds"] == pytest.approx(sum(report.seconds))
    longest = sorted(range(57), key=lambda i: (report.lengths[i], i))[-4:]
    gain = sum(report.lengths[i] for i in longest) / sum(report.steps[i] for i in longest)
    assert metrics["speculation_tokens_per_forward_longest_4"] == pytest.approx(gain)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_drafts", [False, True])
def test_forwards_without_drafts_by_a_schedule(seed: int, has_drafts: bool) -> None:
    """Samples that wait for a place, in two phases; with drafts they end in another order, so it is an estimate."""
    rng = seed_all(seed)
    plain, total = PlainForwards(), 0
    for _ in range(2):
        plain.begin_phase()
        lengths, slots = rng.integers(1, 50, 30).tolist(), 7
        free = [0] * slots
        for length in lengths:
            begin = free.pop(free.index(min(free)))
            free.append(begin + length)
        total += max(free)
        running, waiting, now = [], lengths, 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                length, *waiting = waiting
                steps = length / rng.uniform(1, 4) if has_drafts else length
                running.append((now + steps, plain.start() + length))
            running.sort()
            now, end = running.pop(0)
            plain.end(end)
    assert plain.total == pytest.approx(total, rel=0.3 if has_drafts else 0)


def test_what_drafts_saved_in_a_sentence() -> None:
    """By the clock, over the rollout batches of a run."""
    report = SpeculationReport(plain_forwards=20, saved_seconds=9.1)
    for live, tokens in ((8, 8), (8, 12), (6, 9), (4, 4), (4, 4), (2, 9)):
        report.add_forward(live, tokens, 9.0)
    records = [{"iteration": 0, "timing": {}}]
    records += [{"rollout_batch_step": age, "timing": report.metrics()} for age in (0, 1, 0)]
    assert drafting_benefit(records) == (
        "DAS: drafts saved 28 of 40 forwards; decoding took about 18.2 s less with them."
    )
    report.saved_seconds = -3.2
    assert drafting_benefit([{"timing": report.metrics()}]) == (
        "DAS: drafts saved 14 of 20 forwards; decoding took about 3.2 s longer with them."
    )
    report.saved_seconds = None
    assert drafting_benefit([{"timing": report.metrics()}]) == (
        "DAS: drafts saved 14 of 20 forwards; how many seconds is unknown, as no clock is read with "
        "--deterministic-mode."
    )
    servers = {"timing": {"speculation_accepted_tokens": 30.0, "speculation_generated_tokens": 90.0}}
    assert drafting_benefit([servers]) == "DAS: the servers' drafts gave 30 of 90 sampled tokens."
    assert drafting_benefit([{"timing": {}}]) is None
