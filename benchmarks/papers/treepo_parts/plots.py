"""Plots of the TreePO experiment: rewards over what they cost, rates of sampling, and votes over seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from papers.tables import COLORS
from papers.treepo_parts.curves import AXES, Curve

_RATES = {
    "trajectories_per_second": "trajectories/s",
    "leaf_tokens_per_second": "leaf tokens/s",
    "effective_leaves_per_second": "effective\nleaves/s",
    "decoded_tokens": "decoded\ntokens",
}
_POINTS = 60
_VOTE_COSTS = {"decoded_tokens": "decoded tokens", "sampling_seconds": "seconds of sampling"}


def plot_curves(axes: Sequence[Axes], curves: Mapping[str, Mapping[int, Curve]]) -> None:
    """Held-out reward over each kind of cost: the mean over the seeds, and the range of all seeds."""
    for panel, (axis, label) in zip(axes, AXES.items(), strict=True):
        for color, (method, of_method) in zip(COLORS, curves.items(), strict=False):
            method_curves = list(of_method.values())
            spent = np.linspace(0, min(curve.spent[axis][-1] for curve in method_curves), _POINTS)
            rewards = np.array([np.interp(spent, curve.spent[axis], curve.reward) for curve in method_curves])
            panel.plot(spent, rewards.mean(axis=0), color=color, label=method)
            panel.fill_between(spent, rewards.min(axis=0), rewards.max(axis=0), color=color, alpha=0.15, linewidth=0)
        panel.set(xlabel=label, ylabel="held-out reward", ylim=(0, None))
        panel.grid(alpha=0.3)
    axes[0].legend()


def plot_sampling(axes: Sequence[Axes], rates: Sequence[Mapping[str, Any]], votes: Sequence[Mapping[str, Any]]) -> None:
    """Rates of trees relative to independent rollouts, and maj@k over decoded tokens and over seconds of sampling."""
    if rates:
        _plot_rates(axes[0], [row for row in rates if row["method"] == "tree"])
    if votes:
        _plot_votes(axes[-len(_VOTE_COSTS) :], votes)


def sampling_panels(rates: Sequence[Mapping[str, Any]], votes: Sequence[Mapping[str, Any]]) -> int:
    """Number of axes that ``plot_sampling`` needs."""
    return bool(rates) + len(_VOTE_COSTS) * bool(votes)


def _plot_rates(panel: Axes, trees: Sequence[Mapping[str, Any]]) -> None:
    width = 0.8 / max(1, len(trees))
    for number, (color, row) in enumerate(zip(COLORS, trees, strict=False)):
        positions = np.arange(len(_RATES)) + (number - (len(trees) - 1) / 2) * width
        heights = [row[f"{name}_ratio"] for name in _RATES]
        panel.bar(positions, heights, width, color=color, label=f"segments of {row['segment']}")
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(_RATES)), list(_RATES.values()))
    panel.set(ylabel="trees / independent rollouts")
    if trees:
        panel.legend()


def _plot_votes(axes: Sequence[Axes], votes: Sequence[Mapping[str, Any]]) -> None:
    models = list(dict.fromkeys(row["model"] for row in votes))
    samplers = list(dict.fromkeys(row["sampler"] for row in votes))
    for panel, cost in zip(axes, _VOTE_COSTS, strict=True):
        for model, style in zip(models, ("-", "--", ":"), strict=False):
            for color, sampler in zip(COLORS, samplers, strict=False):
                rows = [row for row in votes if (row["model"], row["sampler"]) == (model, sampler)]
                points = [row[cost] for row in rows], [row["majority"] for row in rows]
                panel.plot(*points, "o", linestyle=style, color=color, label=f"{model}, {sampler}")
                for row in rows:
                    panel.annotate(f"k={row['k']}", (row[cost], row["majority"]), fontsize=6, xytext=(2, 3),
                                   textcoords="offset points")  # fmt: skip
        panel.set(xlabel=_VOTE_COSTS[cost], ylabel="maj@k", ylim=(0, None))
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize="x-small", handlelength=4)
