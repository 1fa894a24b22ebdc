"""A picture of speculation: the live batch over time and the makespan, accepted and rejected draft tokens by
length and length class, all tokens computed, and what the drafter takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_dta.extras.report.plots.files import write_figure
from megatron_dta.sampling.speculation.lengths import LengthClass
from megatron_dta.sampling.speculation.report import DECILES, SpeculationReport

COLORS = ("#3b75af", "#d9822b", "#5a9e4b", "#9a5fb5")
PLAIN_COLOR = "#9a9a9a"
_TENTHS = np.arange(1, DECILES + 1)
_Reports = Sequence[tuple[str, SpeculationReport]]


def plot_speculation(
    reports: Sequence[tuple[str, SpeculationReport]],
    path: str | Path,
    plain: tuple[np.ndarray, np.ndarray] | None = None,
    title: str = "",
) -> None:
    """Draw named reports into ``path`` (PNG, PDF or SVG), which appears once it is complete.

    plain: seconds and live sequences of each forward of decoding without speculation, drawn next to them.
    Raises InputError where the file cannot be written or has another suffix.
    """
    figure = Figure(figsize=(13, 8.0), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    over_time, by_length, by_class, tokens, wasted, drafter = panels
    _draw_over_time(over_time, reports, plain)
    for color, (name, report) in zip(COLORS, reports, strict=False):
        by_length.plot(_TENTHS, _numbers(report.tokens_per_forward_by_decile()), "o-", color=color, label=name)
        wasted.plot(_TENTHS, _numbers(report.wasted_tokens_by_decile()), "o-", color=color, label=name)
    by_length.set(title="by length", xlabel="tenth of the samples, by length", ylabel="tokens per forward")
    wasted.set(title="rejected drafts, by length", xlabel="tenth of the samples, by length", ylabel="tokens")
    _draw_by_class(by_class, reports)
    for axes in (by_length, by_class):
        axes.axhline(1, color=PLAIN_COLOR, linewidth=1)
    _draw_tokens(tokens, reports)
    _draw_drafter(drafter, reports)
    for axes in panels:
        axes.legend(fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=12)
    write_figure(figure, path)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


def _draw_over_time(axes: Axes, reports: _Reports, plain: tuple[np.ndarray, np.ndarray] | None) -> None:
    if plain is not None:
        label = f"plain decoding: {plain[0].sum():.3g} s"
        axes.step(np.cumsum(plain[0]), plain[1], color=PLAIN_COLOR, where="pre", label=label)
    for color, (name, report) in zip(COLORS, reports, strict=False):
        label = f"{name}: {report.makespan:.3g} s"
        axes.step(np.cumsum(report.seconds), report.live, color=color, where="pre", label=label)
    axes.set(title="live batch and makespan", xlabel="seconds", ylabel="live sequences", ylim=(0, None), xlim=(0, None))


def _draw_by_class(axes: Axes, reports: _Reports) -> None:
    """Bars side by side, with the number of rejected tokens written into them."""
    width = 0.8 / max(1, len(reports))
    names = [c.name.lower() for c in LengthClass]
    for i, (color, (name, report)) in enumerate(zip(COLORS, reports, strict=False)):
        values, wasted = report.tokens_per_forward_by_class(), report.wasted_tokens_by_class()
        at = np.arange(len(names)) + (i - (len(reports) - 1) / 2) * width
        bars = axes.bar(at, [values[c] or 0.0 for c in names], width, color=color, label=name)
        labels = ["" if wasted[c] is None else f"{wasted[c]:,} rejected" for c in names]
        axes.bar_label(bars, labels, label_type="center", fontsize=6, rotation=90)
    axes.set_xticks(range(len(names)), names)
    axes.set(title="by length class", ylabel="tokens per forward")


def _draw_tokens(axes: Axes, reports: _Reports) -> None:
    accepted = np.array([sum(report.accepted) for _, report in reports])
    drafted = np.array([sum(report.drafted) for _, report in reports])
    sampled = np.array([sum(report.lengths) for _, report in reports]) - accepted
    base = np.zeros(len(reports))
    for values, label, color in (
        (sampled, "one of each forward", PLAIN_COLOR),
        (accepted, "drafted and accepted", COLORS[2]),
        (drafted - accepted, "rejected drafts", COLORS[1]),
    ):
        axes.bar(range(len(reports)), values, bottom=base, color=color, label=label)
        base = base + values
    axes.set_xticks(range(len(reports)), [name for name, _ in reports])
    axes.set(title="tokens", ylabel="tokens computed")


def _draw_drafter(axes: Axes, reports: _Reports) -> None:
    """Its CPU time as bars, with the memory of its trees written into them."""
    seconds = [report.draft_seconds for _, report in reports]
    bars = axes.bar(range(len(reports)), seconds, color=COLORS[0], label="CPU time, and memory of the trees")
    labels = [f"{report.drafter_bytes / 2**20:.3g} MiB" for _, report in reports]
    axes.bar_label(bars, labels, label_type="center", fontsize=8)
    axes.set_xticks(range(len(reports)), [name for name, _ in reports])
    axes.set(title="drafter", ylabel="seconds")
