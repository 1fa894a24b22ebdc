"""Draws speed-ups over the overlap of the sequences with their bounds, and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from papers.tables import COLORS, PaperReport
from papers.tree_training_parts.curves import Curves

LABELS = {"packed": "packed trees", "dta": "trees"}
WAY_LABELS = {"dense": "dense", "packed": "packed trees", "dta": "trees", "longest path": "longest paths"}


def plot_overlap(report: PaperReport, rows: dict[str, list[dict[str, Any]]]) -> None:
    """``tree_training-overlap.png``: one panel for random trees, one for rollout sets."""
    shown = {part: part_rows for part, part_rows in rows.items() if part_rows}

    def draw(axes: Sequence[Axes]) -> None:
        for panel, (part, part_rows) in zip(axes, shown.items(), strict=True):
            for color, (mode, label) in zip(COLORS, LABELS.items(), strict=False):
                for name, style in (("speed_up", "o-"), ("bound", "x--")):
                    points = sorted(
                        (row["overlap"], row[f"{mode}_{name}"]) for row in part_rows if row.get(f"{mode}_{name}")
                    )
                    text = label if name == "speed_up" else f"{label}, bound"
                    style = style if part == "overlap" else style[0]
                    panel.plot(*np.array(points).reshape(-1, 2).T, style, color=color, label=text, markersize=5)
            panel.set(xlabel="overlap: 1 - unique / sequence tokens", ylabel="speed-up over dense", yscale="log")
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.set_title("random trees" if part == "overlap" else "rollout sets", fontsize=10)
            panel.legend(fontsize=8)

    report.plot(draw, panels=len(shown), suffix="overlap")


def plot_curves(report: PaperReport, curves: dict[str, list[Curves]]) -> None:
    """``tree_training-curves.png``: held-out losses and the rewards of GRPO, means over the seeds."""

    def draw(axes: Sequence[Axes]) -> None:
        for panel, name, title in zip(axes, ("held_out_loss", "reward"), ("supervised", "GRPO"), strict=True):
            for color, (way, runs) in zip(COLORS, curves.items(), strict=False):
                mean = np.mean([getattr(run, name) for run in runs], axis=0)
                steps = runs[0].held_out_steps if name == "held_out_loss" else np.arange(1, len(mean) + 1)
                # Equal curves lie on each other: the later ones are thinner.
                width = {"dense": 5.0, "packed": 3.0}.get(way, 1.2)
                panel.plot(steps, mean, color=color, linewidth=width, label=WAY_LABELS[way])
            panel.set(xlabel="step", ylabel="held-out loss" if name == "held_out_loss" else "reward of the samples")
            panel.set_title(title, fontsize=10)
            panel.legend(fontsize=8)

    report.plot(draw, panels=2, suffix="curves")
