"""Statistics and pictures of speculation, against loops over samples and forwards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from conftest import seed_all
from megatron_dta.extras.report.draft_charts import draft_charts
from megatron_dta.extras.report.plots import speculation as plots
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
    ends, found = np.cumsum(report.seconds), []
    for part in range(parts):
        moments = (part + (np.arange(20_000 // parts) + 0.5) / (20_000 // parts)) / parts * ends[-1]
        found.append(float(np.mean([report.live[(ends <= moment).sum()] for moment in moments])))
    return found


@pytest.mark.parametrize(("samples", "forwards"), [(57, 31), (4, 3), (200, 8)])
def test_figures_by_loops(samples: int, forwards: int) -> None:
    report = made_up(seed_all(samples), samples, forwards)
    figures, metrics = report.figures(), report.metrics()
    assert all(is_known(f"timing/{name}") for name in metrics)
    rows = sorted(range(samples), key=lambda i: (report.lengths[i], i))
    at = 0
    for decile in range(10):
        count = samples // 10 + (decile < samples % 10)
        own, at = rows[at : at + count], at + count
        name = f"decile_{decile + 1}"
        if not own:
            assert f"speculation_wasted_tokens_{name}" not in metrics
            assert figures["wasted_tokens_by_decile"][decile] is None
            continue
        wasted = sum(report.drafted[i] - report.accepted[i] for i in own)
        assert metrics[f"speculation_wasted_tokens_{name}"] == wasted == figures["wasted_tokens_by_decile"][decile]
        gain = sum(report.lengths[i] for i in own) / sum(report.steps[i] for i in own)
        assert metrics[f"speculation_tokens_per_forward_{name}"] == pytest.approx(gain)
    for number, name in enumerate(CLASSES):
        own = [i for i in range(samples) if report.classes[i] == number]
        if own:
            wasted = sum(report.drafted[i] - report.accepted[i] for i in own)
            assert metrics[f"speculation_wasted_tokens_{name}"] == wasted == figures["wasted_tokens_by_class"][name]
            gain = sum(report.lengths[i] for i in own) / sum(report.steps[i] for i in own)
            assert metrics[f"speculation_tokens_per_forward_{name}"] == pytest.approx(gain)
        else:
            assert figures["wasted_tokens_by_class"][name] is None
    wasted = [v for name, v in metrics.items() if name.startswith("speculation_wasted_tokens_decile")]
    assert sum(wasted) == metrics["speculation_wasted_tokens"] == sum(report.drafted) - sum(report.accepted)
    assert metrics["speculation_makespan_seconds"] == pytest.approx(sum(report.seconds))
    live = [metrics[f"speculation_live_batch_tenth_{tenth}"] for tenth in range(1, 11)]
    assert live == figures["live_batch_over_time"]
    np.testing.assert_allclose(live, parts_of_time(report, 10), rtol=0.01)


def test_nothing_was_run() -> None:
    metrics = SpeculationReport().metrics()
    assert metrics["speculation_makespan_seconds"] == metrics["speculation_wasted_tokens"] == 0
    assert not any(re.search(r"_(decile|tenth|short|medium|long)(_|$)", name) for name in metrics)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_drafts", [False, True])
def test_forwards_without_drafts_by_a_schedule(seed: int, has_drafts: bool) -> None:
    """Samples that wait for a place, in two phases; with drafts they end in another order, so it is an estimate."""
    rng = seed_all(seed)
    plain, total = PlainForwards(), 0
    for _ in range(2):
        plain.begin_phase()
        lengths, places = rng.integers(1, 50, 30).tolist(), 7
        free = [0] * places
        for length in lengths:
            begin = free.pop(free.index(min(free)))
            free.append(begin + length)
        total += max(free)
        running, waiting, now = [], lengths, 0.0
        while waiting or running:
            while waiting and len(running) < places:
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


def dots(chart: object) -> dict[str, list[str]]:
    """The tooltips of each curve of a figure."""
    series = re.findall(r'data-name="([^"]*)"(.*?)</g></g>', str(chart), flags=re.S)
    return {name: re.findall(r"<title>(.*?)</title>", body) for name, body in series}


def test_charts_of_a_run() -> None:
    rng = seed_all(2)
    reports = [made_up(rng, 40, 20) for _ in range(5)]
    records = [{"iteration": i, "timing": report.metrics()} for i, report in enumerate(reports, 3)]
    records.insert(2, {"iteration": 99, "timing": {}})
    charts = [dots(chart) for chart in draft_charts(records)]
    assert all(charts)
    by_class, live, deciles, wasted = charts[1], *charts[-3:]
    assert set(by_class) == {*(f"tokens_per_forward_{c}" for c in CLASSES), "tokens_per_forward_longest_4"}
    assert {"makespan_seconds", "draft_seconds"} <= {name for chart in charts for name in chart}
    for chart, field in ((live, "live_batch_over_time"), (deciles, "tokens_per_forward_by_decile")):
        # The first, the middle and the last step.
        assert list(chart) == ["step 3", "step 5", "step 7"]
        for name, report in zip(chart, (reports[0], reports[2], reports[4]), strict=True):
            shown = [float(text.rsplit(" ", 1)[1]) for text in chart[name]]
            np.testing.assert_allclose(shown, report.figures()[field], rtol=2e-3)
    assert "tenth of the samples, shortest first 10: " in wasted["step 7"][-1]
    assert draft_charts([{"iteration": 1, "timing": {"collect_seconds": 1.0}}]) == [None] * len(charts)


def test_picture_of_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seed_all(5)
    reports = [("warm", made_up(rng, 60, 30)), ("cold", made_up(rng, 60, 40))]
    reports[1][1].classes[:] = [1] * 60
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "write_figure", lambda figure, path: drawn.append(figure))
    plots.plot_speculation(reports, tmp_path / "das.png", (np.full(50, 0.02), np.arange(50, 0, -1)), "a title")
    axes = {panel.get_title(): panel for panel in drawn[0].axes}
    assert all(panel.get_legend().get_texts() for panel in axes.values())
    labels = [text.get_text() for text in axes["live batch and makespan"].get_legend().get_texts()]
    assert labels == ["plain decoding: 1 s", *(f"{name}: {report.makespan:.3g} s" for name, report in reports)]
    for title, values in (
        ("by length", SpeculationReport.tokens_per_forward_by_decile),
        ("rejected drafts, by length", SpeculationReport.wasted_tokens_by_decile),
    ):
        for line, (_, report) in zip(axes[title].lines[:2], reports, strict=True):
            np.testing.assert_allclose(line.get_ydata(), values(report))
    heights = [bar.get_height() for bar in axes["by length class"].patches]
    by_class = [report.tokens_per_forward_by_class() for _, report in reports]
    assert heights == pytest.approx([row[name] or 0 for row in by_class for name in CLASSES])
    words = {text.get_text() for text in axes["by length class"].texts}
    assert f"{sum(reports[1][1].drafted) - sum(reports[1][1].accepted):,} rejected" in words
    assert [bar.get_height() for bar in axes["drafter"].patches] == [report.draft_seconds for _, report in reports]
    assert {text.get_text() for text in axes["drafter"].texts} == {"3 MiB"}
    tops = [bar.get_y() + bar.get_height() for bar in axes["tokens"].patches[-2:]]
    assert tops == [sum(r.lengths) + sum(r.drafted) - sum(r.accepted) for _, r in reports]
