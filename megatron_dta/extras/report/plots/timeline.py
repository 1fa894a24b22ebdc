"""Draws pipeline timelines: when each stage runs which op, with several timelines on one time axis.

Each row is a stage and each box an op. Forwards have one colour and backwards another, lighter for each further model
chunk. Idle time is white.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_dta.core.planning.pipeline.timeline import TimelineEvent, timeline_span, timeline_utilisation
from megatron_dta.extras.report.plots.figures import COLORS, STYLE, add_boxes, label_box, legend_above

# Kind of event to name and colour; the rows of ranks have one event a step.
KINDS = {"F": ("forward", COLORS[0]), "B": ("backward", COLORS[1]), "step": ("step", COLORS[0])}
OTHER_COLOR = "#9a9a9a"
WAITING = "wait"  # as white as a stage that is idle for another reason
MOST_LABELLED = 40  # ops of a row
CHARACTER = 0.006  # width of a digit as a share of the longest timeline


@rc_context(STYLE)
def timeline_figure(
    timelines: Mapping[str, Sequence[TimelineEvent]], num_rows: int, title: str = "", row: str = "stage"
) -> Figure:
    """Draw named timelines below each other; ``row`` says what a row is."""
    height = 0.6 + len(timelines) * (0.5 + 0.3 * num_rows) + 0.3 * bool(title)
    figure = Figure(figsize=(1130 / 72, height), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    spans = [timeline_span(events) for events in timelines.values()]
    longest = max(end - start for start, end in spans) or 1.0
    for axes, (name, events), (start, end) in zip(panels, timelines.items(), spans, strict=True):
        _draw(axes, [event for event in events if event.kind != WAITING], start, CHARACTER * longest)
        share = timeline_utilisation(events, num_rows)
        axes.set_title(f"{name}: {end - start:,.4g} seconds, {share:.1%} of all stages' time" if name else "")
        axes.set_ylim(num_rows - 0.5, -0.5)
        axes.set_yticks(range(num_rows), [f"{row} {index}" for index in range(num_rows)])
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlim(0, longest)
    panels[-1].set_xlabel("seconds")
    figure.suptitle(title)
    kinds = {event.kind for events in timelines.values() for event in events} - {WAITING}
    known = [Patch(color=color, label=name) for kind, (name, color) in KINDS.items() if kind in kinds]
    others = [Patch(color=OTHER_COLOR, label=kind) for kind in sorted(kinds - KINDS.keys())]
    if len(kinds) > 1:
        legend_above(panels[0], handles=known + others)
    return figure


def _draw(axes: Axes, events: Sequence[TimelineEvent], origin: float, character: float) -> None:
    times = np.array([(event.start - origin, event.end - origin) for event in events]).reshape(-1, 2)
    rows = np.array([event.stage for event in events], int)
    chunks = np.array([event.chunk for event in events], float)
    colors = np.array([to_rgb(KINDS.get(event.kind, ("", OTHER_COLOR))[1]) for event in events]).reshape(-1, 3)
    colors += (1 - colors) * 0.55 * (chunks / max(1.0, chunks.max(initial=0)))[:, None]
    add_boxes(axes, times, rows[:, None] + np.array([[-0.42, 0.42]]), colors)
    if np.bincount(rows, minlength=1).max() <= MOST_LABELLED:
        for event, (begin, end), color in zip(events, times, colors, strict=True):
            label = str(event.segment)
            if event.segment >= 0 and end - begin > character * len(label):
                label_box(axes, (begin + end) / 2, event.stage, label, color)
