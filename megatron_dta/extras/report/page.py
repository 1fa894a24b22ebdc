"""Builds the report's page section by section. Missing sections are listed with the flag that enables them.

The page loads nothing from elsewhere. It contains its styles, its pictures and one script, which searches the
transcripts, and a Content-Security-Policy forbids everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dta.core.rollouts import Rollout
from megatron_dta.extras.report.bars import PHASES, phase_chart, rank_chart, timeline_chart
from megatron_dta.extras.report.draft_charts import draft_charts
from megatron_dta.extras.report.line_chart import COLORS, Series, line_chart, metric_charts, series_of, smoothed
from megatron_dta.extras.report.markup import Markup, join, number, tag
from megatron_dta.extras.report.run_files import RunFiles, SavedStep
from megatron_dta.extras.report.search import SCRIPT_SOURCE, search_bar, search_script
from megatron_dta.extras.report.sessions import session_trees
from megatron_dta.extras.report.transcripts import MOST_CHARACTERS, transcripts
from megatron_dta.extras.report.tree_picture import tree_picture
from megatron_dta.training.monitor.benefits import benefit_sentences

POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {SCRIPT_SOURCE}"
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1180px; padding: 20px; color: #222; }
html { background: #fff; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 8px; border-bottom: 1px solid #ddd; }
p { margin: 6px 0; } .note { color: #666; } .alarm { color: #a33327; font-weight: 600; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.tile { border: 1px solid #ddd; border-radius: 6px; padding: 8px 14px; } .tile b { display: block; font-size: 19px; }
.tile span { color: #666; font-size: 13px; }
.figures { display: flex; flex-wrap: wrap; gap: 12px 18px; } figure { margin: 0 0 10px; max-width: 100%; }
figcaption { font-size: 13px; margin-bottom: 3px; } .key { margin-left: 12px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 4px; border-radius: 2px; }
figure > svg { max-width: 100%; height: auto; display: block; background: #fff; }
figure:not(.wide) { width: 560px; }
.grid { stroke: #e8e8e8; } .axis { stroke: #999; } .mark { stroke: #b5483a; stroke-dasharray: 3 3; }
.tick { font-size: 11px; fill: #666; } .right { text-anchor: end; } .middle { text-anchor: middle; }
.curve { fill: none; stroke-width: 1.6; } .link { fill: none; stroke: #bbb; } .op { stroke: #fff; stroke-width: 0.4; }
.node { stroke: #8a8a8a; stroke-width: 0.7; }
.inside { font: 10.5px ui-monospace, monospace; fill: #222; white-space: pre; } .light { fill: #fff; }
.leaf { font-size: 12px; fill: #333; white-space: pre; } .branch { font-size: 10px; fill: #666; text-anchor: end; }
table { border-collapse: collapse; font-size: 13px; }
td { border-bottom: 1px solid #e5e5e5; padding: 2px 12px 2px 0; text-align: left; }
td:last-child { font-family: ui-monospace, monospace; }
details { margin: 8px 0; } summary { cursor: pointer; }
.missing { font-size: 13px; color: #666; margin: 6px 0; padding-left: 18px; }
.search input { font: inherit; width: 340px; padding: 3px 6px; } .search button { font: inherit; margin-left: 6px; }
.search .note { margin-left: 10px; }
.rollout { margin: 3px 0; border: 1px solid #ddd; border-radius: 4px; padding: 3px 8px; }
.rollout summary { overflow-wrap: anywhere; font-size: 13px; }
.turn { display: flex; border-top: 1px solid #eee; padding: 4px 0; }
.turn > b { flex: 0 0 100px; font-size: 12px; color: #555; overflow-wrap: anywhere; }
.call { display: block; border-left: 2px solid #ccc; padding-left: 8px; } .call > b { font-weight: 600; }
.text { flex: 1; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.text { font: 12.5px/1.4 ui-monospace, monospace; } .trained { background: #e3eefb; } .special { color: #999; }
::highlight(found) { background: #ffe08a; } ::highlight(here) { background: #ff9d3a; }
"""
SMOOTHING = 10
TRANSCRIPTS = "Rollouts"
# Charts of each section: (title, metric, ...).
_Curve = tuple[str, ...]
LOSS_CHARTS: tuple[_Curve, ...] = (
    ("loss", "loss", "eval_loss", "value_loss"),
    ("gradient norm", "grad_norm", "critic_grad_norm"),
    ("learning rate", "learning_rate", "critic_learning_rate"),
    ("entropy", "entropy"),
    ("KL to the reference, penalty", "ref_kl", "kl_penalty"),
    ("preference: accuracy", "dpo_accuracy"),
    ("critic: explained variance", "explained_variance"),
    ("clipped tokens", "clip_fraction", "value_clip_fraction", "tis_clip_fraction"),
)
TREE_CHARTS: tuple[_Curve, ...] = (
    ("tokens of all sequences over unique tokens (reuse)", "token_reuse"),
    ("tokens of a step", "tokens", "unique_tokens"),
    ("tokens in flight, recomputed tokens", "peak_in_flight_tokens", "recomputed_tokens"),
    ("segments", "segments"),
    ("leaves of sampled trees", "effective_leaves", "fallback_leaves"),
    ("branches of a session", "session_branches"),
    ("tokens of sessions: trees, and a row for every call", "session_tokens", "session_row_tokens"),
)
MISMATCH_CHARTS: tuple[_Curve, ...] = (
    ("|trainer's - sampler's logprob|, mean and maximum", "sampler_logprob_gap", "sampler_logprob_gap_max"),
    ("exp of the mean difference", "sampler_probability_ratio"),
    ("importance ratio, mean and maximum", "ratio", "ratio_max"),
    ("importance weights (TIS)", "tis_weight"),
)
SPEED_CHARTS: tuple[_Curve, ...] = (
    ("tokens a second", "timing/tokens_per_second", "timing/unique_tokens_per_second"),
    ("sampled tokens a second", "timing/sampled_tokens_per_second"),
)
FAILURE_CHARTS: tuple[_Curve, ...] = (
    ("failed rewards", "reward_failures", "reward_timeouts"),
    ("responses that ran too long or could not be judged", "code_timeouts", "math_timeouts", "math_errors"),
    ("tool calls and errors", "tool_calls", "tool_errors"),
    ("failed environment steps", "environment_failures", "environment_timeouts"),
    ("failed sessions of agents", "failed_sessions", "agent_timeouts", "abandoned_calls"),
)


def report_html(run: RunFiles, most_prompts: int = 3, prompt: str | None = None) -> str:
    """Return the page.

    Args:
        most_prompts: number of groups of each saved step whose trees and rollouts are shown.
        prompt: show only groups whose id contains this text.
    """
    sections = [
        _section("Reward", _reward_charts(run), "this run trains without rewards"),
        _section("Loss and update", metric_charts(run.records, LOSS_CHARTS), "no step has been trained"),
        _section("Trees", metric_charts(run.records, TREE_CHARTS), "no step has been trained"),
        _trees(run, most_prompts, prompt),
        _transcripts(run, most_prompts, prompt),
        _sessions(run, most_prompts, prompt),
        _section(
            "Time", [phase_chart(run.records), *metric_charts(run.records, SPEED_CHARTS)], "no times were recorded"
        ),
        _section("Pipeline", _timelines(run), "no timelines; train with --timeline-dir DIR"),
        _section(
            "Balance of data-parallel ranks",
            [
                rank_chart(run.records),
                *metric_charts(run.records, (("balance (1: all ranks take equally long)", "timing/rank_balance"),)),
            ],
            "one data-parallel rank has nothing to balance",
        ),
        _section(
            "Sampler and trainer",
            [_alarms(run.records), *metric_charts(run.records, MISMATCH_CHARTS)],
            "the sampler's logprobs are unknown or were not compared",
        ),
        _section("Failures", metric_charts(run.records, FAILURE_CHARTS), "none were counted"),
        _section("Drafts", draft_charts(run.records), "nothing was drafted; train with --rollout-speculation das"),
    ]
    missing = [section for section in sections if isinstance(section, Missing)]
    body = [
        _header(run),
        *(section for section in sections if not isinstance(section, Missing)),
        _missing(missing),
        _all_metrics(run.records),
        _settings(run.settings),
        search_script() if run.steps and not any(each.title == TRANSCRIPTS for each in missing) else None,
    ]
    head = join(
        [
            Markup('<meta charset="utf-8">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", f"Run {run.folder.name}"),
            Markup(f"<style>{STYLE}</style>"),
        ]
    )
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}{tag("body", body)}</html>\n'


@dataclass(frozen=True)
class Missing:
    """A section without content, and the reason."""

    title: str
    why: str


def _section(title: str, parts: Sequence[Markup | None], otherwise: str) -> Markup | Missing:
    found = [part for part in parts if part is not None]
    if not found:
        return Missing(title, otherwise)
    return tag("section", tag("h2", title), tag("div", found, class_="figures"))


def _missing(missing: Sequence[Missing]) -> Markup | None:
    """Return the list of sections without content, one line each."""
    if not missing:
        return None
    lines = [tag("li", tag("b", each.title), f": {each.why}") for each in missing]
    return tag("section", tag("h2", "Not in this run"), tag("ul", lines, class_="missing"))


def _header(run: RunFiles) -> Markup:
    trained = [record for record in run.records if record["iteration"] > 0]
    last = trained[-1] if trained else run.records[-1]
    tiles = [("steps", number(last["iteration"]))]
    for label, name in (("reward, last step", "reward"), ("held-out reward, last", "eval_reward"), ("loss", "loss")):
        value = next((r[name] for r in reversed(run.records) if r.get(name) is not None), None)
        if value is not None:
            tiles.append((label, number(value)))
    unique = sum(record.get("unique_tokens") or 0 for record in trained)
    if unique:
        tiles.append(("reuse, all steps", f"{sum(record['tokens'] for record in trained) / unique:.2f}"))
        tiles.append(("unique tokens trained", number(unique)))
    names = [f"{phase}_seconds" for phase in PHASES]
    seconds = sum(record.get("timing", {}).get(name, 0.0) for record in run.records for name in names)
    if seconds:
        tiles.append(("seconds in all steps", number(seconds)))
    skipped = sum(bool(record.get("skipped")) for record in trained)
    notes = [tag("p", sentence) for sentence in benefit_sentences(run.records)]
    if run.best:
        text = f"Best checkpoint: {run.best.get('checkpoint')}, {run.best.get('metric')} {run.best.get('value')}"
        notes.append(tag("p", text))
    if skipped:
        notes.append(tag("p", f"Skipped steps: {skipped}; loss or gradient not finite, or an outlier.", class_="alarm"))
    boxes = [tag("div", tag("b", value), tag("span", label), class_="tile") for label, value in tiles]
    return tag("header", tag("h1", f"Run {run.folder.name}"), tag("div", boxes, class_="tiles"), notes)


def _reward_charts(run: RunFiles) -> list[Markup | None]:
    sampled = series_of(run.records, "reward", COLORS[0], "sampled, each step")
    curves: list[Series | None] = []
    if sampled is not None:
        curves = [Series(sampled.name, sampled.values, sampled.color, faint=True)]
        curves.append(smoothed(Series("sampled", sampled.values, sampled.color), SMOOTHING))
    curves.append(series_of(run.records, "eval_reward", COLORS[1], "held-out"))
    marks = []
    if run.best.get("iteration"):
        marks = [(run.best["iteration"], f"best checkpoint: {run.best.get('metric')} {run.best.get('value')}")]
    names = {name for record in run.records for name in record if name.startswith("eval_pass@")}
    names = sorted(names, key=lambda name: (len(name), name))
    held_out = [series_of(run.records, name, COLORS[i % len(COLORS)]) for i, name in enumerate(names)]
    return [
        line_chart("reward", curves, marks),
        line_chart("held-out prompts", held_out),
        *metric_charts(
            run.records,
            (
                ("reward, leaves weighted", "weighted_reward"),
                ("reward before selection", "collected_reward"),
                ("tokens of a response", "response_tokens", "eval_response_tokens"),
                ("responses that ended by themselves", "ended", "eval_ended"),
                ("groups whose rewards are all equal", "uniform_groups"),
            ),
        ),
    ]


def _trees(run: RunFiles, most_prompts: int, prompt: str | None) -> Markup | Missing:
    parts: list[Markup | None] = [
        tag(
            "p",
            "Each bar is a run of tokens that the same rollouts share; its length is the square root of their number."
            " Its colour is the mean advantage of its trained tokens: blue above 0, red below, white at 0, grey if no "
            "token is trained. ⌀ is the mean reward below a branching point. Tooltips show the text.",
            class_="note",
        )
    ]
    for step in run.steps:
        for name, members in chosen_groups(step, most_prompts, prompt):
            parts.append(tree_picture(f"step {step.iteration}, group {name}", members, step.texts))
    return _section("Trees of prompts", parts if len(parts) > 1 else [], _without_rollouts(run))


def _without_rollouts(run: RunFiles) -> str:
    return "no group matches --prompt" if run.steps else "no rollouts; train with --save-rollouts-interval N"


def _transcripts(run: RunFiles, most_prompts: int, prompt: str | None) -> Markup | Missing:
    """Return a collapsible transcript of every rollout of the chosen groups, with a search field."""
    shown: list[Markup] = []
    used, wanted = 0, 0
    for step in run.steps:
        groups = chosen_groups(step, most_prompts, prompt)
        found, more = transcripts(step, [name for name, _ in groups], MOST_CHARACTERS - used)
        shown, used, wanted = shown + found, used + more, wanted + sum(len(members) for _, members in groups)
    if not shown:
        return Missing(TRANSCRIPTS, _without_rollouts(run))
    cut = f" The page contains the first {len(shown)} of {wanted}; --prompt TEXT selects others." * (
        len(shown) < wanted
    )
    note = tag("p", f"Every rollout of these groups. Trained tokens are shaded.{cut}", class_="note")
    return tag("section", tag("h2", TRANSCRIPTS), note, search_bar(len(shown)), shown)


def chosen_groups(step: SavedStep, most: int, prompt: str | None = None) -> list[tuple[str, list[Rollout]]]:
    """Return the groups whose rewards have the largest variance, in the order of the file."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in step.rollouts:
        if prompt is None or prompt in rollout.group_id:
            groups.setdefault(rollout.group_id, []).append(rollout)

    def spread(members: list[Rollout]) -> float:
        rewards = [rollout.reward for rollout in members if rollout.reward is not None]
        if not rewards:
            return 0.0
        mean = sum(rewards) / len(rewards)
        return sum((reward - mean) ** 2 for reward in rewards) / len(rewards)

    best = sorted(groups, key=lambda name: -spread(groups[name]))[:most]
    return [(name, members) for name, members in groups.items() if name in best]


def _sessions(run: RunFiles, most_prompts: int, prompt: str | None) -> Markup | Missing:
    """Return the trees of the sessions of some groups of each saved batch."""
    shown: list[Markup] = []
    for batch in dict.fromkeys(session.batch for session in run.sessions):
        own = [each for each in run.sessions if each.batch == batch and (prompt is None or prompt in each.group_id)]
        groups = list(dict.fromkeys(session.group_id for session in own))[:most_prompts]
        shown += session_trees([session for session in own if session.group_id in groups])
    if not shown:
        return Missing("Sessions of agents", "no agents, or no --save-rollouts-interval N")
    note = "Each call below the one that it continues. Shaded: what was sampled and is trained, each answer once."
    return tag("section", tag("h2", "Sessions of agents"), tag("p", note, class_="note"), shown)


def _timelines(run: RunFiles) -> list[Markup]:
    parts = []
    for timeline in run.timelines:
        stages = 1 + max((event.stage for event in timeline.measured), default=0)
        if timeline.planned:
            parts.append(timeline_chart(f"step {timeline.iteration}, planned", timeline.planned, stages))
        parts.append(timeline_chart(f"step {timeline.iteration}, measured", timeline.measured, stages))
    return parts


def _alarms(records: Sequence[Mapping[str, Any]]) -> Markup | None:
    steps = [record["iteration"] for record in records if record.get("sampler_mismatch_alarm")]
    if not steps:
        return None
    shown = ", ".join(map(str, steps[:20])) + (" ..." if len(steps) > 20 else "")
    return tag("p", f"{len(steps)} alarms (--sampler-mismatch-alarm), at steps {shown}.", class_="alarm")


def _all_metrics(records: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a collapsible section with a chart of every metric."""
    names = sorted({name for record in records for name in record if name not in ("iteration", "timing")})
    names += sorted({f"timing/{name}" for record in records for name in record.get("timing", {})})
    charts = [line_chart(name, [series_of(records, name)]) for name in names]
    found = [chart for chart in charts if chart is not None]
    return tag(
        "section",
        tag("h2", "Every metric"),
        tag("details", tag("summary", f"{len(found)} charts"), tag("div", found, class_="figures")),
    )


def _settings(settings: Mapping[str, Any]) -> Markup | None:
    if not settings:
        return None
    rows = [
        tag("tr", tag("td", flag), tag("td", " ".join(map(str, value)) if isinstance(value, list) else value))
        for flag, value in settings.items()
        if value not in (None, False)
    ]
    return tag(
        "section", tag("h2", "Settings"), tag("details", tag("summary", f"{len(rows)} settings"), tag("table", rows))
    )
