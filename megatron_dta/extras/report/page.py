"""The page of a run, section by section. Sections without content are listed with the flag that enables them.

The page loads nothing from elsewhere. It contains its styles, its pictures and one script, which searches transcripts
and sessions, and a Content-Security-Policy forbids everything else. All texts are escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.report import charts
from megatron_dta.extras.report.charts import Chart, metric_charts
from megatron_dta.extras.report.run_files import RunFiles, SavedStep
from megatron_dta.extras.report.sessions import SavedSession
from megatron_dta.extras.report.text import number, visible
from megatron_dta.extras.report.transcripts import MOST_CHARACTERS, Turn, transcripts
from megatron_dta.extras.report.tree_picture import TreePicture, tree_picture
from megatron_dta.training.monitor.benefits import benefit_sentences


@dataclass
class Section:
    """A part of the page; ``missing`` says why it has no content."""

    title: str
    missing: str
    charts: list[Chart] = field(default_factory=list)
    alarm: str = ""
    note: str = ""
    trees: list[TreePicture] = field(default_factory=list)
    rollouts: list[tuple[str, list[Turn]]] = field(default_factory=list)
    sessions: list[SavedSession] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not (self.charts or self.alarm or self.trees or self.rollouts or self.sessions)


def report_html(run: RunFiles, most_prompts: int = 3, prompt: str | None = None) -> str:
    """Return the page.

    Args:
        most_prompts: number of groups of each saved step whose trees and rollouts are shown.
        prompt: show only groups whose id contains this text.
    """
    run = replace(run, records=[charts.flat(record) for record in run.records])
    records = run.records
    speed = charts.phase_chart(records) + metric_charts(records, charts.SPEED_CHARTS)
    balance = charts.rank_chart(records) + metric_charts(records, charts.BALANCE_CHARTS)
    mismatch = metric_charts(records, charts.MISMATCH_CHARTS)
    drafts = charts.metric_charts(records, charts.DRAFT_CHARTS, charts.DRAFTS)
    sections = [
        Section("Reward", "this run trains without rewards", charts.reward_charts(run)),
        Section("Loss and update", "no step has been trained", metric_charts(records, charts.LOSS_CHARTS)),
        Section("Trees", "no step has been trained", metric_charts(records, charts.TREE_CHARTS)),
        *_rollouts(run, most_prompts, prompt),
        _sessions(run, prompt),
        Section("Time", "no times were recorded", speed),
        Section("Pipeline", "no timelines; train with --timeline-dir DIR", charts.timeline_charts(run)),
        Section("Balance of data-parallel ranks", "one data-parallel rank has nothing to balance", balance),
        Section("Sampler and trainer", "the sampler's logprobs were not compared", mismatch),
        Section("Failures", "none were counted", metric_charts(records, charts.FAILURE_CHARTS)),
        Section("Drafts", "nothing was drafted; train with --rollout-speculation das", drafts),
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        title=f"Run {run.folder.name}",
        tiles=_tiles(run),
        sentences=benefit_sentences(records),
        best=run.best,
        skipped=sum(bool(record.get("skipped")) for record in records if record["iteration"] > 0),
        sections=[section for section in sections if not section.is_empty()],
        missing=[section for section in sections if section.is_empty()],
        metrics=charts.metric_rows(records),
        settings={flag: value for flag, value in run.settings.items() if value not in (None, False)},
    )


def _tiles(run: RunFiles) -> list[tuple[str, str]]:
    """Label and value of the figures on top."""
    trained = [record for record in run.records if record["iteration"] > 0] or run.records[-1:]
    tiles = [("steps", number(trained[-1]["iteration"]))]
    for label, name in (("reward, last step", "reward"), ("held-out reward, last", "eval_reward"), ("loss", "loss")):
        value = next((record[name] for record in reversed(run.records) if record.get(name) is not None), None)
        if value is not None:
            tiles.append((label, number(value)))
    unique = sum(record.get("unique_tokens") or 0 for record in trained)
    if unique:
        tiles.append(("reuse, all steps", f"{sum(record.get('tokens', 0) for record in trained) / unique:.2f}"))
        tiles.append(("unique tokens trained", number(unique)))
    if seconds := sum(charts.phase_seconds(run.records).values()):
        tiles.append(("seconds in all steps", number(seconds)))
    return tiles


def _rollouts(run: RunFiles, most_prompts: int, prompt: str | None) -> list[Section]:
    """The trees of the chosen groups, and a transcript of each of their rollouts."""
    missing = "no group matches --prompt" if run.steps else "no rollouts; train with --save-rollouts-interval N"
    pictures, texts = Section("Trees of prompts", missing), Section("Rollouts", missing)
    pictures.note = (
        "Each bar is a run of tokens that the same rollouts share; its length is the square root of their number. "
        "Its colour is the mean advantage of its trained tokens: blue above 0, red below, white at 0, grey if no "
        "token is trained. ⌀ is the mean reward below a branching point. Tooltips show the text."
    )
    used, wanted = 0, 0
    for step in run.steps:
        groups = chosen_groups(step, most_prompts, prompt)
        for name, members in groups.items():
            pictures.trees.append(tree_picture(f"step {step.iteration}, group {name}", members, step.texts))
        shown, characters = transcripts(step, list(groups), MOST_CHARACTERS - used)
        texts.rollouts += shown
        used, wanted = used + characters, wanted + sum(map(len, groups.values()))
    texts.note = "Every rollout of these groups. Trained tokens are shaded."
    if len(texts.rollouts) < wanted:
        texts.note += f" The page contains the first {len(texts.rollouts)} of {wanted}; --prompt TEXT selects others."
    return [pictures, texts]


def chosen_groups(step: SavedStep, most: int, prompt: str | None) -> dict[str, list[Rollout]]:
    """Return the groups whose rewards have the largest variance, in the order of the file."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in step.rollouts:
        if prompt is None or prompt in rollout.group_id:
            groups.setdefault(rollout.group_id, []).append(rollout)

    def spread(name: str) -> float:
        rewards = [rollout.reward for rollout in groups[name] if rollout.reward is not None]
        mean = sum(rewards) / max(1, len(rewards))
        return sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards))

    best = sorted(groups, key=spread, reverse=True)[:most]
    return {name: members for name, members in groups.items() if name in best}


def _sessions(run: RunFiles, prompt: str | None) -> Section:
    """The trees of the sessions of the saved batches, up to a number of characters."""
    section = Section("Sessions of agents", "no agents, or no --save-rollouts-interval N")
    section.note = (
        "Each call is below the one that it continues. Shaded: what was sampled and is trained, each answer once."
    )
    wanted = [session for session in run.sessions if prompt is None or prompt in session.group_id]
    used = 0
    for session in wanted:
        used += sum(len(context) + len(output) for _, _, context, output in session.calls)
        if used > MOST_CHARACTERS:
            section.note += f" The page contains the first {len(section.sessions)} of {len(wanted)} sessions;"
            section.note += " --prompt TEXT selects others."
            break
        section.sessions.append(session)
    return section
