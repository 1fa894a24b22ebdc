"""Draws the held-out rewards of the runs of examples/distillation.sh: curves.png and curves.json in their folder.

python examples/distillation_report.py DIR
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {
    "grpo": "GRPO alone",
    "teacher": "teacher alone, whole vocabulary",
    "teacher-and-rewards": "teacher and rewards",
    "teacher-sampled": "teacher alone, sampled tokens",
}


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """(step, held-out reward, seconds of training and sampling so far) at every evaluation of a run."""
    path, found, seconds = folder / "metrics.jsonl", [], 0.0
    if not path.is_file():
        raise InputError(f"{path}: no such file; run examples/distillation.sh first")
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        seconds += row["timing"].get("step_seconds", 0.0)
        if "eval_reward" in row:
            found.append((row["iteration"], row["eval_reward"], round(seconds, 1)))
    return found


def main() -> int:
    """Read the runs and write the files."""
    parser = CommandLineParser(main.__doc__)
    parser.add_argument("folder", type=Path, help="OUT of examples/distillation.sh")
    folder = parser.parse_args().folder
    curves = {name: curve(folder / f"run-{name}") for name in NAMES}
    (folder / "curves.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in curves.items():
        axes.plot([step for step, *_ in points], [reward for _, reward, _ in points], label=NAMES[name])
    axes.set(xlabel="optimizer steps", ylabel="held-out reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=110)
    for name, points in curves.items():
        reached = next((str(step) for step, reward, _ in points if reward >= 0.9), "not reached")
        print(f"{NAMES[name]:34} first {points[0][1]:.3f}, last {points[-1][1]:.3f}, 0.9 at step {reached}")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
