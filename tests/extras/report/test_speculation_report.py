"""Statistics and curves of speculation, against loops over samples and forwards."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.speculation.report import PlainForwards, SpeculationReport, drafting_benefit
from megatron_dta.training.monitor.metric_names import is_known

CLASSES = ("short", "medium", "long")


def made_up(rng: np.random.Generator, samples: int, forwards: int) -> SpeculationReport:
    report = SpeculationReport(draft_seconds=float(rng.random()), drafter_bytes=3 << 20, drafter_tokens=40_000)
    live = np.sort(rng.integers(1, samples + 1, forwards))[::-1]
    for count, seconds in zip(live.tolist(), rng.exponential(0.01, forwards).tolist(), strict=True):
        report.add_forward(count, count + 5, seconds)
    for _ in range(samples):
        length = int(rng.integers(1, 90))
        accepted = int(rng.integers(0, length))
        drafted = accepted + int(rng.integers(0, 50))
        report.add_sample(length, length - accepted, drafted, accepted, int(rng.integers(0, 3)))
    return report


def parts_of_time(report: SpeculationReport, parts: int) -> list[float]:
    """Mean live sequences of each part, at twenty thousand moments."""
    ends, means = np.cumsum(report.seconds), []
    for part in range(parts):
        moments = (part + (np.arange(20_000 // parts) + 0.5) / (20_000 // parts)) / parts * ends[-1]
        means.append(float(np.mean([report.live[(ends <= moment).sum()] for moment in moments])))
    return means


@pytest.mark.parametrize(("samples", "forwards"), [(57, 31), (4, 3), (200, 8)])
def test_figures_by_loops(samples: int, forwards: int) -> None:
    report = made_up(seed_all(samples), samples, forwards)
    figures, metrics = report.figures(), report.metrics()
    assert all(is_known(f"timing/{name}") for name in metrics)
    rows = sorted(range(samples), key=lambda i: (report.lengths[i], i))
    at = 0
    for decile in range(10):
        count = samples // 10 + (decile < samples % 10)
        loop_rows, at = rows[at : at + count], at + count
        name = f"decile_{decile + 1}"
        if not loop_rows:
            assert f"speculation_wasted_tokens_{name}" not in metrics
            assert figures["wasted_tokens_by_decile"][decile] is None
            continue
        wasted = sum(report.drafted[i] - report.accepted[i] for i in loop_rows)
        assert metrics[f"speculation_wasted_tokens_{name}"] == wasted == figures["wasted_tokens_by_decile"][decile]
        gain = sum(report.lengths[i] for i in loop_rows) / sum(report.steps[i] for i in loop_rows)
        assert metrics[f"speculation_tokens_per_forward_{name}"] == pytest.approx(gain)
    for number, name in enumerate(CLASSES):
        loop_rows = [i for i in range(samples) if report.classes[i] == number]
        if loop_rows:
            wasted = sum(report.drafted[i] - report.accepted[i] for i in loop_rows)
            assert metrics[f"speculation_wasted_tokens_{name}"] == wasted == figures["wasted_tokens_by_class"][name]
            gain = sum(report.lengths[i] for i in loop_rows) / sum(report.steps[i] for i in loop_rows)
            assert metrics[f"speculation_tokens_per_forward_{name}"] == pytest.approx(gain)
        else:
            assert figures["wasted_tokens_by_class"][name] is None
    wasted = [v for name, v in metrics.items() if name.startswith("speculation_wasted_tokens_decile")]
    assert sum(wasted) == metrics["speculation_wasted_tokens"] == sum(report.drafted) - sum(report.accepted)
    assert metrics["speculation_makespan_seconds"] == pytest.approx(sum(report.seconds))
    live = [metrics[f"speculation_live_batch_tenth_{tenth}"] for tenth in range(1, 11)]
    assert live == figures["live_batch_over_time"]
    np.testing.assert_allclose(live, parts_of_time(report, 10), rtol=0.01)


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


def test_savings_by_hand() -> None:
    """Forwards of 8 and 4 live sequences without drafts take 1.0 and 0.5 s; those with drafts take longer."""
    report = SpeculationReport(plain_forwards=20, outside_seconds=0.25)
    for live, tokens in ((8, 8), (8, 12), (6, 9), (4, 4), (4, 4), (2, 9)):
        report.add_forward(live, tokens, 9.0)
    report.plain_rounds += [(8, 1.0), (4, 0.5), (4, 0.5), (4, 9.0)]
    report.drafted_rounds += [(8, 1.5), (6, 1.0), (2, 0.75)]
    saved, seconds = report.savings()
    assert saved == 14
    assert seconds == pytest.approx(14 * (1.0 + 0.75 + 0.5) / 3 - 0.5 * (1.0 + 0.75 + 0.5) - 0.25)
    records = [{"iteration": 0, "timing": {}}]
    records += [{"rollout_batch_step": age, "timing": report.metrics()} for age in (0, 1, 0)]
    assert drafting_benefit(records) == (
        "DAS: drafts saved 28 of 40 forwards; decoding took about 18.2 s less with them."
    )
    report.drafted_rounds[:] = [(8, 7.0), (6, 5.25), (2, 99.0)]
    assert drafting_benefit([{"timing": report.metrics()}]) == (
        "DAS: drafts saved 14 of 20 forwards; decoding took about 3.2 s longer with them."
    )
    report.plain_rounds.clear()
    assert drafting_benefit([{"timing": report.metrics()}]) == (
        "DAS: drafts saved 14 of 20 forwards; how many seconds is unknown, as no forward ran without drafts."
    )
    report.drafted_rounds.clear()
    assert report.savings() == (14, -0.25)
    servers = {"timing": {"speculation_accepted_tokens": 30.0, "speculation_generated_tokens": 90.0}}
    assert drafting_benefit([servers]) == "DAS: the servers' drafts gave 30 of 90 sampled tokens."
    assert drafting_benefit([{"timing": {}}]) is None
