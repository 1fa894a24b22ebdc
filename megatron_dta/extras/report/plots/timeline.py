"""Draws pipeline timelines: when each stage runs which op, with several timelines on one time axis.

Each row is a stage and each box an op. Forwards have one colour and backwards another, lighter for each further model
chunk. Idle time is white.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_dta.core.planning.pipeline.timeline import TimelineEvent, timeline_span, timeline_utilisation
from megatron_dta.extras.report.plots.files import write_figure

COLORS = {"F": "#3b75af", "B": "#d9822b"}
NAMES = {"F": "forward", "B": "backward"}
OTHER_COLOR = "#9a9a9a"
WAITING = "wait"  # as white as a stage that is idle for another reason
MAX_OUTLINED_OPS = 400  # on a stage; beyond it, outlines would hide the boxes
MAX_LABELLED_OPS = 40  # on a stage


def plot_timelines(
    timelines: Sequence[tuple[str, Sequence[TimelineEvent]]], path: str | Path, num_stages: int, title: str = ""
) -> None:
    """Draw named timelines below each other into ``path`` (PNG, PDF or SVG), which appears once it is complete.

    Raises InputError where the file cannot be written or has another suffix.
    """
    height = 1.2 + len(timelines) * (0.9 + 0.42 * num_stages)
    figure = Figure(figsize=(13, max(3.0, height)), layout="constrained")
    rows = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    longest = 0.0
    for axes, (name, events) in zip(rows, timelines, strict=True):
        start, end = timeline_span(events)
        events = [event for event in events if event.kind != WAITING]
        longest = max(longest, end - start)
        _draw(axes, events, num_stages, start)
        share = timeline_utilisation(events, num_stages)
        axes.set_title(f"{name}: {end - start:,.4g} seconds, {share:.1%} of all stages' time", fontsize=10, loc="left")
    rows[-1].set_xlim(0, longest or 1.0)
    rows[-1].set_xlabel("seconds")
    if title:
        figure.suptitle(title, fontsize=12)
    kinds = {event.kind for _, events in timelines for event in events} - {WAITING}
    handles = [Patch(color=COLORS.get(kind, OTHER_COLOR), label=NAMES.get(kind, kind)) for kind in _ordered(kinds)]
    if handles:
        rows[0].legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), fontsize=8, frameon=False
        )
    write_figure(figure, path)


def _ordered(kinds: set[str]) -> list[str]:
    return [kind for kind in COLORS if kind in kinds] + sorted(kinds - COLORS.keys())


def _draw(axes: Axes, events: Sequence[TimelineEvent], num_stages: int, origin: float) -> None:
    corners = np.empty((len(events), 4, 2))
    colors = np.empty((len(events), 3))
    num_model_chunks = 1 + max((event.chunk for event in events), default=0)
    for i, event in enumerate(events):
        left, right, top = event.start - origin, event.end - origin, event.stage - 0.42
        corners[i] = (left, top), (right, top), (right, top + 0.84), (left, top + 0.84)
        color = np.asarray(to_rgb(COLORS.get(event.kind, OTHER_COLOR)))
        colors[i] = color + (1 - color) * 0.55 * event.chunk / max(1, num_model_chunks - 1)
    per_stage = np.bincount([event.stage for event in events], minlength=1).max() if events else 0
    outlined = per_stage <= MAX_OUTLINED_OPS
    outline = {"edgecolors": "white", "linewidths": 0.4} if outlined else {"linewidths": 0, "antialiaseds": False}
    axes.add_collection(PolyCollection(corners, facecolors=colors, **outline))
    if per_stage <= MAX_LABELLED_OPS:
        for event in events:
            if event.segment >= 0:
                middle = (event.start + event.end) / 2 - origin
                axes.text(middle, event.stage, str(event.segment), ha="center", va="center", fontsize=6.5, color="w")
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.tick_params(axis="y", length=0)
