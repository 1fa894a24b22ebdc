"""The charts of the page: which metrics are drawn together, and the values of a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
from megatron_dta.extras.report.plots.curves import Curve, curve_figure, is_logarithmic, sparkline, stacked_figure
from megatron_dta.extras.report.plots.figures import COLORS, svg_text
from megatron_dta.extras.report.plots.timeline import timeline_figure
from megatron_dta.extras.report.run_files import RunFiles
from megatron_dta.extras.report.text import number

Records = Sequence[Mapping[str, Any]]
# Phases of a step in order, with their colours.
PHASES = {"collect": 2, "prepare": 6, "plan": 3, "train": 0, "update": 1, "critic": 4, "evaluate": 7}
MOST_BARS, MOST_SPARKS = 120, 150
MOST_RANK_STEPS = 24
SMOOTHING = 10
FAINT = "59"  # opacity, in hexadecimal
# (title, metric, ...) for each chart.
REWARD_CHARTS = (
    ("reward, leaves weighted", "weighted_reward"),
    ("reward before selection", "collected_reward"),
    ("tokens of a response", "response_tokens", "eval_response_tokens"),
    ("responses that ended by themselves", "ended", "eval_ended"),
    ("groups whose rewards are all equal", "uniform_groups"),
)
LOSS_CHARTS = (
    ("loss", "loss", "eval_loss", "value_loss"),
    ("gradient norm", "grad_norm", "critic_grad_norm"),
    ("learning rate", "learning_rate", "critic_learning_rate"),
    ("entropy", "entropy"),
    ("KL to the reference, penalty", "ref_kl", "kl_penalty"),
    ("preference: accuracy", "dpo_accuracy"),
    ("critic: explained variance", "explained_variance"),
    ("clipped tokens", "clip_fraction", "value_clip_fraction", "tis_clip_fraction"),
)
TREE_CHARTS = (
    ("tokens of all sequences over unique tokens (reuse)", "token_reuse"),
    ("tokens of a step", "tokens", "unique_tokens"),
    ("tokens in flight, recomputed tokens", "peak_in_flight_tokens", "recomputed_tokens"),
    ("segments", "segments"),
    ("leaves of sampled trees", "effective_leaves", "fallback_leaves"),
    ("branches of a session", "session_branches"),
    ("tokens of sessions: trees, and a row for every call", "session_tokens", "session_row_tokens"),
)
MISMATCH_CHARTS = (
    ("|trainer's - sampler's logprob|, mean and maximum", "sampler_logprob_gap", "sampler_logprob_gap_max"),
    ("exp of the mean difference", "sampler_probability_ratio"),
    ("importance ratio, mean and maximum", "ratio", "ratio_max"),
    ("importance weights (TIS)", "tis_weight"),
)
SPEED_CHARTS = (
    ("tokens a second", "timing/tokens_per_second", "timing/unique_tokens_per_second"),
    ("sampled tokens a second", "timing/sampled_tokens_per_second"),
)
BALANCE_CHARTS = (("balance (1: all ranks take equally long)", "timing/rank_balance"),)
FAILURE_CHARTS = (
    ("failed rewards", "reward_failures", "reward_timeouts"),
    ("responses that ran too long or could not be judged", "code_timeouts", "math_timeouts", "math_errors"),
    ("tool calls and errors", "tool_calls", "tool_errors"),
    ("failed environment steps", "environment_failures", "environment_timeouts"),
    ("failed sessions of agents", "failed_sessions", "agent_timeouts", "abandoned_calls"),
)
DRAFTS = "timing/speculation_"
DRAFT_CHARTS = (
    (
        "tokens of a forward pass, and of those of the four longest samples",
        "tokens_per_forward",
        "tokens_per_forward_longest_4",
    ),
    ("drafted tokens that were accepted", "acceptance"),
    ("drafted, accepted and wasted tokens", "drafted_tokens", "accepted_tokens", "wasted_tokens"),
    ("seconds: all passes of a rollout batch, the drafter", "makespan_seconds", "draft_seconds"),
    ("memory of the trees (bytes)", "drafter_bytes"),
)


@dataclass(frozen=True)
class Chart:
    """A figure below its title and the keys (colour, text) of its legend."""

    title: str
    keys: Sequence[tuple[str, str]]
    svg: Markup
    wide: bool = False

    @classmethod
    def of(cls, title: str, keys: Sequence[tuple[str, str]], figure: Figure, wide: bool = False) -> Chart:
        return cls(title, keys, Markup(svg_text(figure)), wide)


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its timings as ``timing/NAME``."""
    return {**record, **{f"timing/{name}": value for name, value in record.get("timing", {}).items()}}


def curve_of(records: Records, name: str, color: str = COLORS[0], label: str | None = None) -> Curve | None:
    """Return the curve of a metric, or None if no record has a number for it."""
    pairs = [(record["iteration"], record[name]) for record in records if name in record]
    values = np.array([v if isinstance(v, (bool, int, float)) else np.nan for _, v in pairs], float)
    if not np.isfinite(values).any():
        return None
    values[np.isinf(values)] = np.nan
    return Curve(label or name, np.array([step for step, _ in pairs]), values, color)


def curve_chart(title: str, curves: Sequence[Curve | None], best: int | None = None) -> list[Chart]:
    """Return a chart of the curves that are not None; none without curves. ``best`` is the best checkpoint's step."""
    drawn = [curve.thinned() for curve in curves if curve is not None]
    if not drawn:
        return []
    keys = [(curve.color, curve.name) for curve in drawn] + [(COLORS[4], f"best checkpoint, step {best}")] * bool(best)
    note = " (logarithmic)" if is_logarithmic(drawn) else ""
    return [Chart.of(title + note, keys, curve_figure(drawn, best))]


def metric_charts(records: Records, charts: Sequence[tuple[str, ...]], prefix: str = "") -> list[Chart]:
    """Return the charts that have values; the legends omit ``prefix``, with which the names of metrics begin."""
    drawn = []
    for title, *names in charts:
        curves = [
            curve_of(records, prefix + name, COLORS[i], name.removeprefix("timing/")) for i, name in enumerate(names)
        ]
        drawn += curve_chart(title, curves)
    return drawn


def reward_charts(run: RunFiles) -> list[Chart]:
    sampled = curve_of(run.records, "reward", COLORS[0], "sampled")
    curves = [] if sampled is None else [replace(sampled, color=COLORS[0] + FAINT), sampled.smoothed(SMOOTHING)]
    curves.append(curve_of(run.records, "eval_reward", COLORS[1], "held-out"))
    names = {name for record in run.records for name in record if name.startswith("eval_pass@")}
    names = sorted(names, key=lambda name: (len(name), name))[: len(COLORS)]
    charts = curve_chart("reward", curves, best=run.best.get("iteration"))
    charts += metric_charts(run.records, [("held-out prompts", *names)])
    return charts + metric_charts(run.records, REWARD_CHARTS)


def phase_seconds(records: Records) -> dict[str, float]:
    """Seconds of each phase in all steps."""
    totals = {name: sum(record.get(f"timing/{name}_seconds", 0.0) for record in records) for name in PHASES}
    return {name: seconds for name, seconds in totals.items() if seconds > 0}


def phase_chart(records: Records) -> list[Chart]:
    """The seconds of each phase: of each step, or means of several, with totals in the legend."""
    records = [record for record in records if "timing/train_seconds" in record]
    totals = phase_seconds(records)
    if not totals:
        return []
    steps = np.array([record["iteration"] for record in records])
    parts, keys = [], []
    for name, seconds in totals.items():
        values = np.array([record.get(f"timing/{name}_seconds", 0.0) for record in records])
        parts.append(Curve("seconds", steps, values, COLORS[PHASES[name]]).thinned(MOST_BARS))
        keys.append((parts[-1].color, f"{name} {number(seconds)} s ({seconds / sum(totals.values()):.0%})"))
    return [Chart.of(parts[0].name, keys, stacked_figure(int(steps[0]), parts), wide=True)]


def rank_chart(records: Records) -> list[Chart]:
    """When each data-parallel rank was busy in the last steps; a step ends when the slowest rank is done."""
    rows = [(r["iteration"], s) for r in records if (s := r.get("timing/rank_train_seconds"))]
    # A run may have been continued on another number of ranks; only the last number is shown.
    rows = [(step, seconds) for step, seconds in rows if len(seconds) == len(rows[-1][1])][-MOST_RANK_STEPS:]
    if not rows:
        return []
    events, begin = [], 0.0
    for index, (step, seconds) in enumerate(rows):
        events += [
            TimelineEvent(rank, "step", step, index % 2, begin, begin + busy) for rank, busy in enumerate(seconds)
        ]
        begin += max(seconds)
    count = len(rows[0][1])
    share = sum(sum(seconds) for _, seconds in rows) / count / (begin or 1.0)
    title = f"data-parallel ranks, steps {rows[0][0]} to {rows[-1][0]}: busy {share:.1%} of the time of their slowest"
    return [Chart.of(title, [], timeline_figure({"": events}, count, row="rank"), wide=True)]


def timeline_charts(run: RunFiles) -> list[Chart]:
    charts = []
    for iteration, timelines in run.timelines.items():
        stages = 1 + max((event.stage for events in timelines.values() for event in events), default=0)
        charts.append(Chart.of(f"step {iteration}", [], timeline_figure(timelines, stages), wide=True))
    return charts


def metric_rows(records: Records) -> list[tuple[str, Markup, list[str]]]:
    """A row for each metric: name, small curve, and its first, last, smallest and largest value."""
    rows = []
    for name in sorted({name for record in records for name in record} - {"iteration"}, key=lambda n: ("/" in n, n)):
        curve = curve_of(records, name)
        if curve is not None:
            known = curve.values[np.isfinite(curve.values)]
            values = [number(float(value)) for value in (known[0], known[-1], known.min(), known.max())]
            rows.append((name, Markup(svg_text(sparkline(curve.thinned(MOST_SPARKS)))), values))
    return rows
