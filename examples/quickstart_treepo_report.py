"""Held-out reward of GRPO on independent rollouts and of TreePO on sampled trees, at equal decoded tokens.

    python examples/quickstart_treepo_report.py RUN

Reads the metrics of RUN/grpo and RUN/treepo, writes RUN/reward_by_tokens.png, and exits with status 1 if TreePO did not
take the held-out reward from under 0.3 to over 0.8.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.monitor.metrics import read_metrics

BEFORE, AFTER = 0.3, 0.8
METHODS = {"grpo": "GRPO, independent rollouts", "treepo": "TreePO, sampled trees"}
POINTS = 8


def main() -> int:
    """Print the comparison and draw it; status 1 if the model did not learn on trees."""
    if len(sys.argv) != 2:
        raise InputError("give the folder of the quickstart's results")
    run = Path(sys.argv[1])
    curves = {name: held_out_curve(run / name / "metrics.jsonl") for name in METHODS}
    plot(curves, run / "reward_by_tokens.png")
    end = min(tokens[-1] for tokens, _ in curves.values())
    print("\nheld-out reward (fraction of right answers, sampled at temperature 1) by decoded tokens:")
    print(f"{'tokens':>10}" + "".join(f"{name:>9}" for name in curves))
    for tokens in np.linspace(0, end, POINTS):
        rewards = [np.interp(tokens, *curve) for curve in curves.values()]
        print(f"{tokens:10,.0f}" + "".join(f"{reward:9.3f}" for reward in rewards))
    for name, label in METHODS.items():
        records = [record for record in read_metrics(run / name / "metrics.jsonl") if "decoded_tokens" in record]
        decoded, rollouts = (sum(record[key] for record in records) for key in ("decoded_tokens", "rollouts"))
        trained = sum(record["tokens"] for record in records) / sum(record["unique_tokens"] for record in records)
        print(
            f"{label}: {len(records)} steps, {decoded:,.0f} decoded tokens for {rollouts:,.0f} rollouts "
            f"({decoded / rollouts:.2f} each); {trained:.1f}x token reuse in training"
        )
    print(f"plot: {run / 'reward_by_tokens.png'}")
    before, after = curves["treepo"][1][0], curves["treepo"][1][-1]
    if not (before < BEFORE and after > AFTER):
        print(f"FAILED: held-out reward from {before:.3f} to {after:.3f}, not from under {BEFORE} to over {AFTER}")
        return 1
    print(f"TreePO took the held-out reward from {before:.3f} to {after:.3f}")
    return 0


def held_out_curve(metrics: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens decoded so far, held-out reward) of every evaluation."""
    tokens, points = 0.0, []
    for record in read_metrics(metrics):
        tokens += record.get("decoded_tokens", 0.0)
        if "eval_reward" in record:
            points.append((tokens, record["eval_reward"]))
    if len(points) < 2:
        raise InputError(f"{metrics}: no metrics of a finished quickstart")
    return tuple(np.array(points).T)


def plot(curves: dict[str, tuple[np.ndarray, np.ndarray]], picture: Path) -> None:
    """Both curves over the tokens that sampling decoded."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, color in (("grpo", "tab:blue"), ("treepo", "tab:orange")):
        axes.plot(*curves[name], "o-", color=color, label=METHODS[name])
    axes.axvline(min(tokens[-1] for tokens, _ in curves.values()), color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="decoded tokens", ylabel="held-out reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    unfinished = picture.with_name(picture.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=150)
    os.replace(unfinished, picture)


if __name__ == "__main__":
    run_entry_point(main)
