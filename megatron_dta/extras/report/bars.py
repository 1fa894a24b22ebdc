"""Draws bars over time as SVG: phase times by step, pipeline timelines, and the balance of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dta.core.planning.pipeline.timeline import TimelineEvent, timeline_span, timeline_utilisation
from megatron_dta.extras.report.line_chart import COLORS
from megatron_dta.extras.report.markup import Markup, legend_key, linear_ticks, number, svg, tag, tick_below

# Phases of a step, in order.
PHASES = ("collect", "prepare", "plan", "train", "update", "critic", "evaluate")
PHASE_COLORS = dict(
    zip(PHASES, ("#4c9a4c", "#8a7a3a", "#9a5fb5", "#2f6fab", "#d9822b", "#b5483a", "#7a7a7a"), strict=True)
)
EVENT_COLORS = {"F": "#3b75af", "B": "#d9822b"}
EVENT_NAMES = {"F": "forward", "B": "backward"}
OTHER_COLOR = "#9a9a9a"
MOST_BARS = 120
MOST_RANK_STEPS = 24
WIDTH, LEFT, ROW = 1130, 70, 22


def phase_chart(records: Sequence[Mapping]) -> Markup | None:
    """Draw the seconds of each phase: one bar per step or per mean of several steps, with totals in the legend."""
    rows = [(r["iteration"], r["timing"]) for r in records if r.get("timing") and "train_seconds" in r["timing"]]
    if not rows:
        return None
    width = -(-len(rows) // MOST_BARS)
    groups = [rows[first : first + width] for first in range(0, len(rows), width)]
    means = [
        {phase: sum(timing.get(f"{phase}_seconds", 0.0) for _, timing in group) / len(group) for phase in PHASES}
        for group in groups
    ]
    highest = max(sum(mean.values()) for mean in means) or 1.0
    height, top, bottom = 240, 10, 34
    scale = (height - top - bottom) / highest
    step = (WIDTH - LEFT - 10) / len(groups)
    boxes = []
    for index, (group, mean) in enumerate(zip(groups, means, strict=True)):
        base = height - bottom
        for phase in PHASES:
            if mean[phase] <= 0:
                continue
            tall = mean[phase] * scale
            base -= tall
            first, last = group[0][0], group[-1][0]
            place = f"step {first}" if first == last else f"steps {first} to {last}, mean"
            boxes.append(
                tag(
                    "rect",
                    tag("title", f"{place}: {phase} {number(mean[phase])} s"),
                    x=LEFT + index * step,
                    y=base,
                    width=max(step - 1, 0.5),
                    height=tall,
                    fill=PHASE_COLORS[phase],
                )
            )
    axes = []
    for value in linear_ticks(0, highest):
        y = height - bottom - value * scale
        axes.append(tag("line", x1=LEFT, x2=WIDTH - 10, y1=y, y2=y, class_="grid"))
        axes.append(tag("text", number(value), x=LEFT - 6, y=y + 4, class_="tick right"))
    ends = [
        tag("text", f"step {groups[0][0][0]}", x=LEFT, y=height - 12, class_="tick"),
        tag("text", f"step {groups[-1][-1][0]}", x=WIDTH - 10, y=height - 12, class_="tick right"),
    ]
    picture = svg(
        WIDTH, height, axes, boxes, ends, title="seconds of each phase", class_="phases", data_bars=len(groups)
    )
    totals = {phase: sum(timing.get(f"{phase}_seconds", 0.0) for _, timing in rows) for phase in PHASES}
    whole = sum(totals.values()) or 1.0
    keys = [
        legend_key(PHASE_COLORS[phase], f"{phase} {number(seconds)} s ({seconds / whole:.0%})")
        for phase, seconds in totals.items()
        if seconds > 0
    ]
    each = "each step" if width == 1 else f"means of {width} steps"
    return tag("figure", tag("figcaption", tag("b", f"seconds, {each}"), keys), picture, class_="wide")


def timeline_chart(title: str, events: Sequence[TimelineEvent], num_stages: int) -> Markup:
    """Draw a timeline with a row per stage and a box per op; idle time is white."""
    start, end = timeline_span(events)
    span = (end - start) or 1.0
    scale = (WIDTH - LEFT - 10) / span
    height = num_stages * ROW + 26
    boxes = [
        _bar(
            _tooltip(event, start),
            event.stage,
            (event.start - start) * scale,
            (event.end - event.start) * scale,
            EVENT_COLORS.get(event.kind, OTHER_COLOR),
        )
        for event in events
    ]
    ticks = [
        tick_below(f"{number(value)} s", LEFT + value * scale, height - 8, WIDTH) for value in linear_ticks(0, span, 8)
    ]
    kinds = [kind for kind in EVENT_NAMES if any(event.kind == kind for event in events)]
    kinds += sorted({event.kind for event in events} - set(kinds))
    keys = [legend_key(EVENT_COLORS.get(kind, OTHER_COLOR), EVENT_NAMES.get(kind, kind)) for kind in kinds]
    share = timeline_utilisation(events, num_stages)
    caption = f"{title}: {number(end - start)} s, busy {share:.1%} of all stages' time"
    names = _row_names("stage", num_stages)
    picture = svg(WIDTH, height, names, boxes, ticks, title=caption, class_="timeline", data_events=len(events))
    return tag("figure", tag("figcaption", tag("b", caption), keys), picture, class_="wide")


def _bar(tooltip: str, row: int, begin: float, width: float, color: str) -> Markup:
    return tag(
        "rect",
        tag("title", tooltip),
        x=LEFT + begin,
        y=row * ROW + 2,
        width=max(width, 0.3),
        height=ROW - 4,
        fill=color,
        class_="op",
    )


def _row_names(word: str, count: int) -> list[Markup]:
    return [tag("text", f"{word} {row}", x=LEFT - 6, y=row * ROW + 15, class_="tick right") for row in range(count)]


def _tooltip(event: TimelineEvent, start: float) -> str:
    name = EVENT_NAMES.get(event.kind, event.kind)
    segment = "" if event.segment < 0 else f" of segment {event.segment}"
    return (
        f"stage {event.stage}: {name}{segment}, {(event.start - start) * 1e3:.3f} to {(event.end - start) * 1e3:.3f} ms"
    )


def rank_chart(records: Sequence[Mapping]) -> Markup | None:
    """Draw when each data-parallel rank was busy in the last steps; a step ends when the slowest rank is done."""
    rows = [
        (record["iteration"], record["timing"]["rank_train_seconds"])
        for record in records
        if record.get("timing", {}).get("rank_train_seconds")
    ]
    if not rows:
        return None
    # A run may have been continued on another number of ranks; only the last number is shown.
    count = len(rows[-1][1])
    rows = [row for row in rows if len(row[1]) == count][-MOST_RANK_STEPS:]
    whole = sum(max(seconds) for _, seconds in rows) or 1.0
    scale = (WIDTH - LEFT - 10) / whole
    boxes, begin = [], 0.0
    for index, (iteration, seconds) in enumerate(rows):
        for rank, busy in enumerate(seconds):
            tooltip = f"step {iteration}, rank {rank}: busy {number(busy)} s of {number(max(seconds))} s"
            boxes.append(_bar(tooltip, rank, begin * scale, busy * scale - 0.6, COLORS[index % 2]))
        begin += max(seconds)
    busy = sum(sum(seconds) for _, seconds in rows) / count / whole
    caption = f"data-parallel ranks, steps {rows[0][0]} to {rows[-1][0]}: busy {busy:.1%} of the time of their slowest"
    picture = svg(
        WIDTH, count * ROW + 6, _row_names("rank", count), boxes, title=caption, class_="ranks", data_events=len(boxes)
    )
    return tag("figure", tag("figcaption", tag("b", caption)), picture, class_="wide")
