"""Reads the metrics of runs: held-out reward over decoded tokens and over seconds, and what a run was worth.

Seconds leave evaluations out. Those of the first rollout batch, which compiles kernels and captures CUDA graphs, are
replaced by the median of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.monitor.metrics import read_metrics

AXES = {"tokens": "decoded tokens", "sampling": "seconds of sampling", "seconds": "seconds of sampling and training"}
# Savings are those up to this share of the lowest final reward of all methods.
TARGET_SHARE = 0.9


@dataclass(frozen=True)
class Curve:
    """The evaluations of a run.

    Attributes:
        spent: by the names of ``AXES``, float [E]: what had been spent until each evaluation.
        reward: float [E], held-out reward.
    """

    spent: dict[str, np.ndarray]
    reward: np.ndarray

    def at(self, axis: str, spent: float) -> float:
        """The reward when ``spent`` had been spent, interpolated."""
        return float(np.interp(spent, self.spent[axis], self.reward))

    def reaches(self, axis: str, reward: float) -> float | None:
        """What had been spent when the reward was first reached, interpolated; None if it never was."""
        above = np.flatnonzero(self.reward >= reward)
        if not len(above):
            return None
        index = int(above[0])
        if index == 0:
            return float(self.spent[axis][0])
        before, after = self.reward[index - 1], self.reward[index]
        share = (reward - before) / (after - before)
        begin, end = self.spent[axis][index - 1 : index + 1]
        return float(begin + share * (end - begin))

    def points(self) -> dict[str, list[float]]:
        """The curve as plain values."""
        return {**{axis: values.tolist() for axis, values in self.spent.items()}, "reward": self.reward.tolist()}


def read_curve(metrics: Path) -> Curve:
    """The evaluations in a file of metrics."""
    records = read_metrics(metrics)
    steps = [record for record in records if "decoded_tokens" in record]
    spent = dict(zip(AXES, (_tokens(steps), _seconds(steps, "collect_seconds"), _seconds(steps)), strict=True))
    evaluated = [i for i, record in enumerate(records) if "eval_reward" in record]
    if len(evaluated) < 2 or not steps:
        raise InputError(f"{metrics}: no metrics of a finished run")
    # Record 0 is the evaluation before the first step.
    after = [records[i]["iteration"] for i in evaluated]
    sums = {axis: np.concatenate([[0.0], np.cumsum(values)])[after] for axis, values in spent.items()}
    return Curve(sums, np.array([records[i]["eval_reward"] for i in evaluated]))


def summary(metrics: Path, prompts: int, budget: float) -> dict[str, Any]:
    """A run up to ``budget`` decoded tokens.

    Args:
        prompts: prompts of a rollout batch.
    """
    curve = read_curve(metrics)
    steps = [record for record in read_metrics(metrics) if "decoded_tokens" in record]
    tokens = np.cumsum(_tokens(steps))
    count = min(len(steps), int(np.searchsorted(tokens, budget)) + 1)
    used = steps[:count]
    leaves = sum(step["rollouts"] for step in used) / (count * prompts)
    return {
        "reward": curve.at("tokens", min(budget, float(tokens[-1]))),
        "steps": count,
        "decoded_tokens": int(tokens[count - 1]),
        "tokens_of_last_step": int(used[-1]["decoded_tokens"]),
        "leaves": leaves,
        # Independent rollouts all have the same weight.
        "effective_leaves": _mean(used, "effective_leaves") if "effective_leaves" in used[0] else leaves,
        "fallback_share": _mean(used, "fallback_leaves") if "fallback_leaves" in used[0] else 0.0,
        "decoded_share": float(tokens[count - 1]) / sum(step["rollouts"] * step["response_tokens"] for step in used),
        "sampling_seconds": float(np.sum(_seconds(steps, "collect_seconds")[:count])),
        "seconds": float(np.sum(_seconds(steps)[:count])),
    }


def comparison(curves: Mapping[str, Mapping[int, Curve]], baseline: str, budget: float) -> list[dict[str, Any]]:
    """A row for each method: rewards at equal cost, and the cost of an equal reward relative to ``baseline``.

    Args:
        curves: by method and seed; all methods have the same seeds.
        budget: decoded tokens of all runs; those of the shortest one count where it was ended early.
    """
    everything = [curve for of_method in curves.values() for curve in of_method.values()]
    common = {axis: min(float(curve.spent[axis][-1]) for curve in everything) for axis in AXES}
    budget = min(budget, common["tokens"])
    target = TARGET_SHARE * min(
        float(np.mean([curve.at("tokens", budget) for curve in of_method.values()])) for of_method in curves.values()
    )
    rows = []
    for method, of_method in curves.items():
        method_curves = list(of_method.values())
        row: dict[str, Any] = {"method": method, "seeds": len(method_curves), "tokens": round(budget), "target": target}
        for share, name in ((0.25, "reward_quarter"), (0.5, "reward_half"), (1.0, "reward")):
            row[name] = _average([curve.at("tokens", share * budget) for curve in method_curves])
        row["reward_spread"] = _spread([curve.at("tokens", budget) for curve in method_curves])
        for axis in ("sampling", "seconds"):
            row[f"reward_at_equal_{axis}"] = _average([curve.at(axis, common[axis]) for curve in method_curves])
            row[f"{axis}_of_run"] = _average([float(curve.spent[axis][-1]) for curve in method_curves])
            row[f"equal_{axis}"] = common[axis]
        for axis in AXES:
            row[f"{axis}_saved"] = _saved(of_method, curves[baseline], axis, target)
        rows.append(row)
    return rows


def _saved(curves: Mapping[int, Curve], baseline: Mapping[int, Curve], axis: str, target: float) -> float | None:
    """Share of the cost of ``target`` that is saved, mean over the seeds in which both reach it."""
    shares = []
    for seed in curves:
        cost, usual = curves[seed].reaches(axis, target), baseline[seed].reaches(axis, target)
        if cost is not None and usual:
            shares.append(1 - cost / usual)
    return _average(shares) if shares else None


def _tokens(steps: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([step["decoded_tokens"] for step in steps])


def _seconds(steps: Sequence[Mapping[str, Any]], name: str = "step_seconds") -> np.ndarray:
    seconds = np.array([step["timing"].get(name, 0.0) for step in steps])
    if len(seconds) > 1:
        seconds[0] = np.median(seconds[1:])
    return seconds


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([step[name] for step in steps]))


def _average(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation; None for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
