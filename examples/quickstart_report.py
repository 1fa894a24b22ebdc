"""What the quickstart showed: held-out reward before, during and after GRPO, a plot of it, and where everything is.

    python examples/quickstart_report.py RUN

Reads the metrics of RUN/warmup and RUN/grpo, writes RUN/reward.png, and exits with status 1 if GRPO did not take the
held-out reward from under 0.3 to over 0.8.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.monitor.metrics import read_metrics

BEFORE, AFTER = 0.3, 0.8
MEAN_OF_STEPS = 20


def main() -> int:
    """Print the report; status 1 if the model did not learn."""
    if len(sys.argv) != 2:
        raise InputError("give the folder of the quickstart's results")
    run = Path(sys.argv[1])
    warmup, grpo = read_metrics(run / "warmup" / "metrics.jsonl"), read_metrics(run / "grpo" / "metrics.jsonl")
    held_out = [(record["iteration"], record["eval_reward"]) for record in grpo if "eval_reward" in record]
    if not warmup or len(held_out) < 2:
        raise InputError(f"{run}: no metrics of a finished quickstart")
    plot(warmup, grpo, run / "reward.png")
    print(f"\nheld-out reward (fraction of right answers, sampled at temperature 1) after {len(warmup)} supervised")
    print("warm-up steps, by number of GRPO steps:")
    for step, reward in held_out:
        print(f"  {step:5d}  {reward:.3f}  {'#' * round(50 * reward)}")
    reuse = sum(r["tokens"] for r in grpo if "tokens" in r) / sum(r["unique_tokens"] for r in grpo if "tokens" in r)
    print(f"{reuse:.1f}x token reuse in the trees")
    for what, path in (
        ("page with everything", "report.html"),
        ("reward plot", "reward.png"),
        ("tree picture", "tree.png"),
        ("rollouts in the picture", "rollouts.jsonl"),
        ("checkpoint", "grpo"),
        ("metrics", "grpo/metrics.jsonl"),
    ):
        print(f"{what + ':':<24} {run / path}")
    before, after = held_out[0][1], held_out[-1][1]
    if not (before < BEFORE and after > AFTER):
        print(f"FAILED: held-out reward from {before:.3f} to {after:.3f}, not from under {BEFORE} to over {AFTER}")
        return 1
    print(f"GRPO took the held-out reward from {before:.3f} to {after:.3f}")
    return 0


def plot(warmup: list[dict[str, Any]], grpo: list[dict[str, Any]], picture: Path) -> None:
    """Two panels side by side: the loss of the supervised warm-up, then the rewards of GRPO."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 3])
    left.plot([r["iteration"] for r in warmup], [r["loss"] for r in warmup], color="tab:gray")
    left.set(title="supervised warm-up", xlabel="step", ylabel="loss")
    steps = [r["iteration"] for r in grpo if "reward" in r]
    rewards = [r["reward"] for r in grpo if "reward" in r]
    windows = [rewards[max(0, i + 1 - MEAN_OF_STEPS) : i + 1] for i in range(len(rewards))]
    right.plot(steps, rewards, ".", color="tab:blue", alpha=0.2, markersize=3)
    label = f"training problems (mean of {MEAN_OF_STEPS} steps)"
    right.plot(steps, [sum(window) / len(window) for window in windows], color="tab:blue", label=label)
    held_out = [(r["iteration"], r["eval_reward"]) for r in grpo if "eval_reward" in r]
    right.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out problems")
    right.axhline(AFTER, color="black", linewidth=0.8, linestyle=":")
    right.set(title="GRPO on prefix trees", xlabel="step", ylabel="reward", ylim=(0, 1))
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    unfinished = picture.with_name(picture.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=150)
    os.replace(unfinished, picture)


if __name__ == "__main__":
    run_entry_point(main)
