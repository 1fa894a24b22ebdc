"""Charts of metrics over the steps of a run: curves, stacked parts, and small curves without axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from megatron_dta.extras.report.plots.figures import COLORS, STYLE

# A point is 1/72 inch and a pixel of the page.
NARROW, WIDE, SMALL = (560 / 72, 236 / 72), (1130 / 72, 230 / 72), (150 / 72, 22 / 72)
MOST_POINTS = 1000
# Curves of at most this many points have a dot at each.
MOST_DOTS = 150
LOG_RANGE = 1000.0
ROUND = (1, 2, 5, 10)


@dataclass(frozen=True)
class Curve:
    """The values of ``steps``; missing values are NaN."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    color: str = COLORS[0]

    def thinned(self, most: int = MOST_POINTS) -> Curve:
        """Return means over equal numbers of steps if there are more than ``most``."""
        width = -(-len(self.steps) // most)
        if width <= 1:
            return self
        begins = np.arange(0, len(self.steps), width)
        known = np.isfinite(self.values)
        counts = np.add.reduceat(known.astype(int), begins)
        sums = np.add.reduceat(np.where(known, self.values, 0.0), begins)
        means = np.divide(sums, counts, out=np.full(len(begins), np.nan), where=counts > 0)
        last = np.minimum(begins + width, len(self.steps)) - 1
        return replace(self, name=f"{self.name} (means of {width} steps)", steps=self.steps[last], values=means)

    def smoothed(self, window: int) -> Curve:
        """Return the means of the last ``window`` known values."""
        known = np.isfinite(self.values)
        sums = np.cumsum(np.concatenate([[0.0], self.values[known]]))
        ends = np.arange(1, len(sums))
        begins = np.maximum(ends - window, 0)
        means = (sums[ends] - sums[begins]) / (ends - begins)
        return replace(self, name=f"{self.name}, mean of {window} steps", steps=self.steps[known], values=means)


def is_logarithmic(curves: Sequence[Curve]) -> bool:
    """Whether all values are above 0 and the largest is more than ``LOG_RANGE`` times the smallest."""
    values = np.concatenate([curve.values for curve in curves])
    return bool(np.nanmin(values) > 0 and np.nanmax(values) > LOG_RANGE * np.nanmin(values))


@rc_context(STYLE)
def curve_figure(curves: Sequence[Curve], marked_step: int | None = None) -> Figure:
    """Draw curves over the steps, with a vertical line at ``marked_step``."""
    figure = Figure(figsize=NARROW)
    axes = figure.add_axes((0.11, 0.17, 0.87, 0.78))
    for curve in curves:
        known = np.isfinite(curve.values)
        padded = np.concatenate([[False], known, [False]])
        is_dot = known if len(known) <= MOST_DOTS else known & ~padded[:-2] & ~padded[2:]
        axes.plot(curve.steps, curve.values, linewidth=1.5, color=curve.color)
        axes.plot(curve.steps[is_dot], curve.values[is_dot], "o", markersize=4.5, color=curve.color, markeredgewidth=0)
    if marked_step is not None:
        axes.axvline(marked_step, color=COLORS[4], linestyle="--", linewidth=1)
    values = np.concatenate([curve.values for curve in curves])
    if is_logarithmic(curves):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
        # Other values are shorter with a common offset or exponent.
        if np.nanmax(np.abs(values)) < 1e7 and np.ptp(values[np.isfinite(values)]) > 1e-2:
            axes.yaxis.set_major_formatter("{x:,.8g}")
    _finish(axes, "step")
    return figure


@rc_context(STYLE)
def stacked_figure(first: int, parts: Sequence[Curve]) -> Figure:
    """Draw parts on top of each other, from step ``first``; each value is for the steps up to and including its own."""
    figure = Figure(figsize=WIDE)
    axes = figure.add_axes((0.055, 0.17, 0.94, 0.8))
    edges, base = np.concatenate([[first - 0.5], parts[0].steps + 0.5]), np.zeros(len(parts[0].steps))
    for part in parts:
        axes.stairs(base + part.values, edges, baseline=base, fill=True, color=part.color, linewidth=0)
        base = base + part.values
    axes.set_ylim(0, None)
    _finish(axes, "step")
    return figure


def _finish(axes: Axes, across: str) -> None:
    """Lines behind the data at round values, and whole numbers below the axis."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", which="both", length=0)
    first, last = axes.dataLim.intervalx
    margin = 0.01 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1, steps=ROUND))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(across, loc="right")


@rc_context(STYLE)
def sparkline(curve: Curve) -> Figure:
    """Draw a small curve without axes, whose creation would take three times as long."""
    figure = Figure(figsize=SMALL)
    low, high = np.nanmin(curve.values), np.nanmax(curve.values)
    heights = 0.1 + 0.8 * (curve.values - low) / (high - low) if high > low else 0.5 + 0 * curve.values
    across = np.linspace(0, 1, len(heights))
    figure.add_artist(Line2D(across, heights, color=curve.color, linewidth=1, marker="" if len(heights) > 1 else "."))
    return figure
