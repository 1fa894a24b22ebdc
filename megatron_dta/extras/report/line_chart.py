"""Draws line charts of metrics over the steps of a run as SVG.

A run of more than ``MOST_POINTS`` steps is drawn as means over equal numbers of steps. Missing values are gaps. The
axis is logarithmic if all values are above 0 and the largest is more than 1,000 times the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10

from megatron_dta.extras.report.markup import (
    TICK_CHARACTER,
    Markup,
    legend_key,
    linear_ticks,
    log_ticks,
    number,
    padded,
    points,
    svg,
    tag,
    tick_below,
    tick_labels,
)

COLORS = ("#2f6fab", "#d9822b", "#4c9a4c", "#9a5fb5", "#b5483a", "#5f8f8f", "#8a7a3a", "#7a7a7a")
MOST_POINTS = 1000
# Series with at most this number of points get a dot with a tooltip at each.
MOST_DOTS = 150
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 66, 12, 12, 34
LOG_RANGE = 1000.0


@dataclass(frozen=True)
class Series:
    """One curve: pairs (step, value) in the order of the steps; missing values are None."""

    name: str
    values: Sequence[tuple[int, float | None]]
    color: str = COLORS[0]
    faint: bool = False


def series_of(records: Sequence[Mapping], name: str, color: str = COLORS[0], label: str | None = None) -> Series | None:
    """Return the curve of a metric (``timing/NAME`` for a timing), or None if no record has a number for it."""
    found = []
    for record in records:
        part, key = record, name
        if name.startswith("timing/"):
            part, key = record.get("timing", {}), name.removeprefix("timing/")
        if key in part:
            value = part[key]
            is_number = isinstance(value, bool | int | float) and isfinite(value)
            found.append((record["iteration"], float(value) if is_number else None))
    if all(value is None for _, value in found):
        return None
    return Series(label or name, found, color)


def smoothed(series: Series, window: int) -> Series:
    """Return the moving average over the last ``window`` steps that have a value."""
    kept: list[float] = []
    values: list[tuple[int, float | None]] = []
    for step, value in series.values:
        if value is not None:
            kept = [*kept, value][-window:]
        values.append((step, sum(kept) / len(kept) if kept else None))
    return Series(f"{series.name}, mean of {window} steps", values, series.color)


def line_chart(
    title: str, curves: Sequence[Series | None], marks: Sequence[tuple[int, str]] = (), across: str = "step"
) -> Markup | None:
    """Return a figure with the curves that are not None, or None if there are none.

    Args:
        marks: vertical lines, as pairs (step, tooltip).
        across: label of the horizontal axis.
    """
    drawn = [_thinned(series) for series in curves if series is not None]
    if not drawn:
        return None
    known = [value for series in drawn for _, value in series.values if value is not None]
    steps = [step for series in drawn for step, _ in series.values]
    is_log = min(known) > 0 and max(known) > LOG_RANGE * min(known)
    if is_log:
        low, high = padded([log10(value) for value in known])
        height = _scale(low, high, HEIGHT - BOTTOM, TOP)
        ticks = log_ticks(10**low, 10**high)

        def y(value: float) -> float:
            return height(log10(value))
    else:
        low, high = padded(known)
        y = _scale(low, high, HEIGHT - BOTTOM, TOP)
        ticks = linear_ticks(low, high)
    # Labels with many digits need a wider margin.
    left = max(LEFT, 8 + TICK_CHARACTER * max((len(label) for label in tick_labels(ticks)), default=0))
    x = _scale(min(steps), max(steps), left, WIDTH - RIGHT)
    picture = svg(
        WIDTH,
        HEIGHT,
        _axes(x, y, linear_ticks(min(steps), max(steps), 8), ticks, across, left),
        [_mark(x(step), label) for step, label in marks],
        [_curve(series, x, y, across) for series in drawn],
        title=title,
        class_="chart",
        data_points=sum(value is not None for series in drawn for _, value in series.values),
    )
    keys = [legend_key(s.color, s.name) for s in drawn]
    note = " (logarithmic)" if is_log else ""
    return tag("figure", tag("figcaption", tag("b", title + note), keys), picture)


def metric_charts(
    records: Sequence[Mapping], charts: Sequence[tuple[str, ...]], prefix: str = "timing/"
) -> list[Markup | None]:
    """Return a figure for each (title, metrics...); the legends omit ``prefix`` from the names of metrics."""
    return [
        line_chart(
            title,
            [
                series_of(records, name, COLORS[i % len(COLORS)], name.removeprefix(prefix))
                for i, name in enumerate(names)
            ],
        )
        for title, *names in charts
    ]


def _thinned(series: Series) -> Series:
    count = len(series.values)
    if count <= MOST_POINTS:
        return series
    width = -(-count // MOST_POINTS)
    values: list[tuple[int, float | None]] = []
    for first in range(0, count, width):
        part = series.values[first : first + width]
        known = [value for _, value in part if value is not None]
        values.append((part[-1][0], sum(known) / len(known) if known else None))
    return Series(f"{series.name} (means of {width} steps)", values, series.color, series.faint)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if low == high:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _axes(
    x: Callable[[float], float],
    y: Callable[[float], float],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    across: str,
    left: float,
) -> list[Markup]:
    parts = []
    for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        parts.append(tag("line", x1=left, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), class_="grid"))
        parts.append(tag("text", label, x=left - 6, y=y(value) + 4, class_="tick right"))
    for value in x_ticks:
        if value == int(value):
            parts.append(tick_below(number(value), x(value), HEIGHT - BOTTOM + 16, WIDTH))
    parts.append(tag("line", x1=left, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    parts.append(tag("text", across, x=WIDTH - RIGHT, y=HEIGHT - 4, class_="tick right"))
    return parts


def _mark(x: float, label: str) -> Markup:
    return tag("line", tag("title", label), x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")


def _curve(series: Series, x: Callable[[float], float], y: Callable[[float], float], across: str) -> Markup:
    """Draw a path for each run of values without a gap, and a dot for each value."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in series.values:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    opacity = 0.35 if series.faint else None
    lines = [
        tag("path", d=points((x(s), y(v)) for s, v in run), stroke=series.color, class_="curve", opacity=opacity)
        for run in runs
        if len(run) > 1
    ]
    dots = []
    if len(series.values) <= MOST_DOTS or any(len(run) == 1 for run in runs):
        crowded = len(series.values) > MOST_DOTS
        for run in runs:
            if crowded and len(run) > 1:
                continue
            dots += [
                tag("circle", tag("title", f"{series.name}, {across} {s}: {number(v)}"), cx=x(s), cy=y(v), r=2.2)
                for s, v in run
            ]
    return tag("g", lines, tag("g", dots, fill=series.color, opacity=opacity), class_="series", data_name=series.name)
