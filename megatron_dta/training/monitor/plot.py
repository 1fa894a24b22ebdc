"""Plots the reward over the steps of a run from its metrics file."""

from __future__ import annotations

from pathlib import Path

from megatron_dta.core.common.files import replacing
from megatron_dta.training.monitor.metrics import read_metrics

# Number of steps in the moving mean, which is drawn over the dots of single steps.
_WINDOW = 10


def plot_reward(metrics: Path, picture: Path) -> bool:
    """Draw training and held-out reward of ``metrics`` to ``picture`` (PNG); False if it holds no rewards."""
    # Half a second to import, and only needed here.
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    trained = [(record["iteration"], record["reward"]) for record in records if record.get("reward") is not None]
    held_out = [
        (record["iteration"], record["eval_reward"]) for record in records if record.get("eval_reward") is not None
    ]
    if not trained and not held_out:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if trained:
        steps, rewards = zip(*trained, strict=True)
        smooth = [sum(rewards[max(0, i - _WINDOW + 1) : i + 1]) / min(i + 1, _WINDOW) for i in range(len(rewards))]
        axes.plot(steps, rewards, ".", color="tab:blue", alpha=0.3, label="sampled, each step")
        axes.plot(steps, smooth, color="tab:blue", label=f"sampled, mean of {_WINDOW} steps")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out prompts")
    axes.set(xlabel="optimizer step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    return True
