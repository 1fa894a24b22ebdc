"""A picture of speculation: the live batch over time, tokens per forward by length, and what was drafted in vain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_dta.plots.files import checked_path, write_figure
from megatron_dta.speculation.report import DECILES, SpeculationReport

COLORS = ("#3b75af", "#d9822b", "#5a9e4b", "#9a5fb5")
PLAIN_COLOR = "#9a9a9a"


def plot_speculation(
    reports: Sequence[tuple[str, SpeculationReport]],
    path: str | Path,
    plain: tuple[np.ndarray, np.ndarray] | None = None,
    title: str = "",
) -> None:
    """Draw named reports into ``path`` (PNG, PDF or SVG), which appears once it is complete.

    plain: seconds and live sequences of each forward of decoding without speculation, drawn beside them.
    Raises InputError where the file cannot be written or has another suffix.
    """
    path = checked_path(path)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    over_time, by_length, tokens = figure.subplots(1, 3)
    if plain is not None:
        over_time.step(np.cumsum(plain[0]), plain[1], color=PLAIN_COLOR, where="pre", label="plain decoding")
    for color, (name, report) in zip(COLORS, reports, strict=False):
        over_time.step(np.cumsum(report.seconds), report.live, color=color, where="pre", label=name)
        deciles = [np.nan if value is None else value for value in report.tokens_per_forward_by_decile()]
        by_length.plot(np.arange(1, DECILES + 1), deciles, "o-", color=color, label=name)
    over_time.set(xlabel="seconds", ylabel="live sequences", title="live batch", ylim=(0, None), xlim=(0, None))
    by_length.axhline(1, color=PLAIN_COLOR, linewidth=1)
    by_length.set(xlabel="tenth of the samples, by length", ylabel="tokens per forward", title="by length")
    names = [name for name, _ in reports]
    accepted = np.array([sum(report.accepted) for _, report in reports])
    drafted = np.array([sum(report.drafted) for _, report in reports])
    sampled = np.array([sum(report.lengths) for _, report in reports]) - accepted
    base = np.zeros(len(reports))
    for values, label, color in (
        (sampled, "one of each forward", PLAIN_COLOR),
        (accepted, "drafted and accepted", COLORS[2]),
        (drafted - accepted, "drafted in vain", COLORS[1]),
    ):
        tokens.bar(range(len(names)), values, bottom=base, color=color, label=label)
        base = base + values
    tokens.set_xticks(range(len(names)), names)
    tokens.set(ylabel="tokens computed", title="tokens")
    for axes in (over_time, by_length, tokens):
        axes.legend(fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=12)
    write_figure(figure, path)
