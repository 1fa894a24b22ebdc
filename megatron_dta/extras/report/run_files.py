"""Reads and checks the files of a run.

RUN/metrics.jsonl               one record per step                      (always, with --save)
RUN/settings.json               all settings by flag                     (always, with --save)
RUN/best_checkpoint.json        the best checkpoint                      (--keep-best-checkpoint)
RUN/rollouts/step_*             rollouts of some steps, with texts       (--save-rollouts-interval)
RUN/sessions/batch_*.jsonl      sessions of agents                       (--agent-command, --save-rollouts-interval)
--timeline-dir, step_*.json     the ops of each stage, with times        (--timeline-dir)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dta.common.rows import read_rows
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import read_json
from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.report.sessions import SavedSession, session_from
from megatron_dta.training.checkpoint.best import BEST
from megatron_dta.training.data.saved_rollouts import FOLDER, TEXTS_SUFFIX, TOKENS_SUFFIX
from megatron_dta.training.monitor.metrics import SETTINGS, read_metrics
from megatron_dta.training.monitor.timeline_files import read_timelines

MOST_TIMELINES = 2
TextRun = tuple[int, str, bool]


@dataclass(frozen=True)
class SavedStep:
    """Rollouts of one step.

    Attributes:
        texts: texts of tokens by id, if known.
        runs: for each rollout its pieces (number of tokens, text, whether it is a special token), if known.
    """

    iteration: int
    rollouts: list[Rollout]
    texts: dict[int, str] | None
    runs: list[list[TextRun]] | None = None


@dataclass(frozen=True)
class RunFiles:
    """Everything a report shows; ``timelines`` by step and name."""

    folder: Path
    records: list[dict[str, Any]]
    settings: dict[str, Any]
    best: dict[str, Any]
    steps: list[SavedStep]
    timelines: dict[int, dict[str, list[TimelineEvent]]]
    sessions: list[SavedSession]


def read_run(folder: str | Path, most_steps: int = 3) -> RunFiles:
    """Read a run, with at most ``most_steps`` steps with rollouts, evenly spread from the first to the last.

    Raises InputError where there are no metrics, or a file is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the --save folder of a run")
    settings = _json_object(folder / SETTINGS)
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics)
    if not records:
        raise InputError(f"{metrics}: contains no metrics; give the --save folder of a run")
    steps = _numbered(folder / FOLDER, r"step_(\d+)\.jsonl")
    sessions = _numbered(folder / "sessions", r"batch_(\d+)\.jsonl")
    timelines = _numbered(Path(settings.get("--timeline-dir") or folder / "timeline"), r"step_(\d+)\.json")
    return RunFiles(
        folder,
        records,
        settings,
        _json_object(folder / BEST),
        [_saved_step(iteration, path) for iteration, path in _spread(steps, most_steps)],
        {iteration: read_timelines(path) for iteration, path in _spread(timelines, MOST_TIMELINES)},
        [
            session_from(batch, f"{path}: row {row}", value)
            for batch, path in _spread(sessions, most_steps)
            for row, value in read_rows(path)
        ],
    )


def _saved_step(iteration: int, path: Path) -> SavedStep:
    named = _json_object(path.with_name(path.stem + TOKENS_SUFFIX))
    if not all(len(token) < 19 and token.isdecimal() and isinstance(text, str) for token, text in named.items()):
        raise InputError(f"{path.stem + TOKENS_SUFFIX}: must contain token ids with their texts")
    rollouts = load_rollouts(path)
    texts = {int(token): text for token, text in named.items()} or None
    return SavedStep(iteration, rollouts, texts, _text_runs(path.with_name(path.stem + TEXTS_SUFFIX), rollouts))


def _text_runs(path: Path, rollouts: list[Rollout]) -> list[list[TextRun]] | None:
    """Return the texts of ``rollouts``, checked against them, or None if there is no file."""
    if not path.is_file():
        return None
    entries = read_json(path)
    if not isinstance(entries, list) or len(entries) != len(rollouts):
        raise InputError(f"{path}: must contain a list with an entry for each of {len(rollouts)} rollouts")
    for number, (runs, rollout) in enumerate(zip(entries, rollouts, strict=True), 1):
        is_whole = isinstance(runs, list) and all(_is_run(run) for run in runs)
        if not is_whole or sum(count for count, _, _ in runs) != len(rollout):
            raise InputError(
                f"{path}: entry {number} must contain [tokens, text, special] for all {len(rollout)} tokens"
            )
    return [[tuple(run) for run in runs] for runs in entries]


def _is_run(run: Any) -> bool:
    return isinstance(run, list) and [*map(type, run)] == [int, str, bool] and run[0] > 0


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the folder's files by the number in their names."""
    if not folder.is_dir():
        return {}
    matches = ((re.fullmatch(pattern, path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def _spread(files: dict[int, Path], most: int) -> list[tuple[int, Path]]:
    """Return at most ``most`` files, evenly spread, including the first and the last."""
    pairs = sorted(files.items())
    if len(pairs) <= most:
        return pairs
    if most == 1:
        return pairs[-1:]
    return [pairs[round(i * (len(pairs) - 1) / (most - 1))] for i in range(most)]


def _json_object(path: Path) -> dict[str, Any]:
    """Return the file's object; empty if there is no file."""
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: must contain one JSON object")
    return value
