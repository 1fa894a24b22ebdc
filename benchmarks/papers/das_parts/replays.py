"""Replays recorded histories of several epochs with the scopes, windows and budgets of DAS."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.speculation.drafter import SCOPES, DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.native import load_library
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Speculator
from replay_das import merged
from rollout_parts.das_replay import (
    RecordedSample,
    plain_lives,
    plain_makespan,
    recorded_samples,
    replay_wave,
)

UNLIMITED = 10**6
"""A window that evicts nothing."""
BUDGETS = {
    "length classes (paper)": "class",
    "straggler (ours)": "straggler",
}


@dataclass(frozen=True)
class History:
    """Recorded samples in the order in which they were sampled.

    Attributes:
        batches: samples of each rollout batch.
        epoch: rollout batches of an epoch, in which each problem is sampled once.
    """

    name: str
    batches: Sequence[Sequence[RecordedSample]]
    epoch: int


@dataclass(frozen=True)
class Setting:
    """How a history is replayed."""

    label: str
    scope: str = "both"
    window: int = UNLIMITED
    budget: str = "straggler"


def live_history(name: str, batches: Sequence[Sequence[Rollout]], epoch: int) -> History:
    """The history of a training run; the problem of a sample is its prompt, as in the engine."""
    recorded = [
        [replace(s, problem=hashlib.blake2b(s.prompt.tobytes(), digest_size=16).hexdigest()) for s in samples]
        for samples in map(recorded_samples, batches)
    ]
    return History(name, recorded, epoch)


def stored_history(path: Path, problems: int, samples: int, epochs: int) -> History:
    """The first ``problems`` groups of a stored set, ``samples`` of each in an epoch of one batch."""
    groups: dict[str, list[RecordedSample]] = {}
    for sample in recorded_samples(load_rollouts(path), stop_degenerate=True):
        groups.setdefault(sample.problem, []).append(sample)
    kept = list(groups.values())[:problems]
    batches = [
        [sample for problem_samples in kept for sample in problem_samples[epoch * samples : (epoch + 1) * samples]]
        for epoch in range(epochs)
    ]
    return History(path.stem, [batch for batch in batches if batch], 1)


def scope_settings(history: History) -> Iterator[Setting]:
    """The trees that are searched."""
    for scope in SCOPES:
        yield Setting(scope, scope=scope)


def window_settings(history: History) -> Iterator[Setting]:
    """Windows that differ for this history, and all samples."""
    for epochs in (0.5, 1, 2, 4):
        window = round(epochs * history.epoch)
        if window == epochs * history.epoch and 1 <= window < len(history.batches):
            yield Setting(f"{epochs:g} epoch{'s' if epochs > 1 else ''}", window=window)
    yield Setting("all samples")


def budget_settings(history: History) -> Iterator[Setting]:
    """All budgets, with the default window of 16 rollout batches."""
    for label, budget in BUDGETS.items():
        yield Setting(label, window=DrafterParams().window, budget=budget)


ABLATIONS = {"scope": scope_settings, "window": window_settings, "budgets": budget_settings}


def replayed(history: History, setting: Setting) -> list[SpeculationReport]:
    """The reports of the rollout batches, decoded one after the other by one speculator."""
    cost = ForwardCost()
    gate = SpeculationGate(cost, cost, prices_whole=True)
    params = DrafterParams(window=setting.window, max_tokens=10**9, scope=setting.scope)
    speculator = Speculator(params, gate, setting.budget)
    return [replay_wave(speculator, batch, step) for step, batch in enumerate(history.batches)]


def replay_row(history: History, setting: Setting) -> dict[str, Any]:
    """The figures of the batches after the first epoch, in which nothing is known of a problem but its siblings."""
    reports = replayed(history, setting)
    first = min(history.epoch, len(reports) - 1)
    report, batches = merged(reports[first:]), history.batches[first:]
    plain = sum(plain_makespan(batch, ForwardCost()) for batch in batches)
    forwards = sum(len(plain_lives(batch)) for batch in batches)
    early = sum(plain_makespan(batch, ForwardCost()) for batch in history.batches[:first])
    drafted, accepted = int(np.sum(report.drafted)), int(np.sum(report.accepted))
    return {
        "history": history.name,
        "setting": setting.label,
        "tokens_per_forward": report.tokens_per_forward,
        "plain_forwards": forwards,
        "forwards": len(report.live),
        "forwards_saved": 1 - len(report.live) / forwards,
        "plain_makespan": plain,
        "makespan": report.makespan,
        "makespan_saved": 1 - report.makespan / plain,
        "first_epoch_saved": 1 - sum(epoch_report.makespan for epoch_report in reports[:first]) / early
        if first
        else None,
        "drafted": drafted,
        "accepted": accepted,
        "accepted_share": accepted / drafted if drafted else 0.0,
        "wasted": drafted - accepted,
        "tree_tokens": report.drafter_tokens,
        "samples": len(report.lengths),
    }


def replay_all(histories: Sequence[History]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(ablation, row) of each history and setting in order, computed on all processors."""
    jobs = [(key, h, setting) for h in histories for key, make in ABLATIONS.items() for setting in make(h)]
    load_library()  # Compile it before starting processes.
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        runs = [(key, pool.submit(replay_row, history, setting)) for key, history, setting in jobs]
        for key, run in runs:
            yield key, run.result()
