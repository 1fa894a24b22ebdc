"""What the scratchpad example showed: the reward, and seconds and tokens a second of each phase, trees against dense.

    python examples/scratchpad_report.py RUN

Reads the metrics of RUN/dta and RUN/dense, writes RUN/learning.png and RUN/summary.json, and exits with status 1 if
GRPO did not raise the held-out reward by at least 0.2. Phases are compared over the same steps of both runs, the first
collection left out: it compiles kernels and captures graphs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.measurement import measured_on
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.training.monitor.metrics import read_metrics

LEAST_GAIN = 0.2
MODES = {"dense": "without sharing", "dta": "prefix trees"}
PHASES = {"sampling": "collect", "logprobs": "logprobs", "planning": "plan", "training": "train", "update": "update"}


def main() -> int:
    """Print the comparison, draw it and write it; status 1 if the model did not learn."""
    if len(sys.argv) != 2:
        raise InputError("give the folder of the example's results")
    run = Path(sys.argv[1])
    records = {mode: read_metrics(run / mode / "metrics.jsonl") for mode in MODES}
    held_out = [(record["iteration"], record["eval_reward"]) for record in records["dta"] if "eval_reward" in record]
    chosen = compared_steps(records)
    if len(held_out) < 2 or not all(chosen.values()):
        raise InputError(f"{run}: no metrics of a finished run of examples/scratchpad.sh")
    rows = [phases(mode, steps) for mode, steps in chosen.items()]
    write_summary(run, rows, held_out, records["dta"])
    print("held-out reward (fraction of right sums, sampled at temperature 1) by number of GRPO steps:")
    for step, value in held_out:
        print(f"  {step:5d}  {value:.3f}  {'#' * round(50 * value)}")
    print_phases(rows)
    plot(records["dta"], held_out, rows, run / "learning.png")
    print(f"picture: {run / 'learning.png'}   figures: {run / 'summary.json'}   page: {run / 'report.html'}")
    gain = held_out[-1][1] - held_out[0][1]
    if gain < LEAST_GAIN:
        print(f"FAILED: the held-out reward rose by {gain:.3f}, not by {LEAST_GAIN}")
        return 1
    return 0


def compared_steps(records: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Of both modes the steps that both have done, from the second collection on."""
    steps = {mode: {r["iteration"]: r for r in found if "tokens" in r} for mode, found in records.items()}
    first = [number for number, record in sorted(steps["dta"].items()) if record["rollout_batch_step"] == 0][1:2]
    common = [n for n in sorted(set.intersection(*map(set, steps.values()))) if first and n >= first[0]]
    return {mode: [of_mode[number] for number in common] for mode, of_mode in steps.items()}


def phases(mode: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each phase, and its tokens a second: those of the rollouts, and for sampling those decoded."""
    seconds = {
        phase: sum(record["timing"].get(f"{name}_seconds", 0.0) for record in records) for phase, name in PHASES.items()
    }
    tokens = sum(record["tokens"] for record in records)
    decoded = sum(record["decoded_tokens"] for record in records)
    unique = sum(record["unique_tokens"] for record in records)
    rates = {
        f"{phase}_tokens_per_second": (decoded if phase == "sampling" else tokens) / seconds[phase]
        for phase in ("sampling", "logprobs", "training")
        if seconds[phase]
    }
    peaks = [record["timing"]["peak_memory_gib"] for record in records if "peak_memory_gib" in record["timing"]]
    if peaks:
        rates["peak_memory_gib"] = max(peaks)
    return {
        "mode": mode,
        "steps": len(records),
        "tokens": tokens,
        "decoded_tokens": decoded,
        "unique_tokens": unique,
        "token_reuse": tokens / unique,
        **{f"{phase}_seconds": value for phase, value in seconds.items()},
        "seconds": sum(seconds.values()),
        **rates,
    }


def print_phases(rows: list[dict[str, Any]]) -> None:
    """Both modes side by side."""
    dense, trees = rows
    print(
        f"\n{dense['steps']} steps of both, {dense['tokens']:,.0f} tokens of rollouts; "
        f"{trees['token_reuse']:.2f}x token reuse in the trees"
    )
    print(f"{'phase':<10}{'dense, s':>10}{'trees, s':>10}{'faster':>9}{'dense, tokens/s':>18}{'trees, tokens/s':>18}")
    for phase in [*PHASES, ""]:
        name = f"{phase}_seconds".lstrip("_")
        times = [row[name] for row in rows]
        faster = f"{times[0] / times[1]:.2f}x" if times[1] else ""
        rates = [row.get(f"{phase}_tokens_per_second") for row in rows]
        shown = "".join("" if rate is None else f"{rate:18,.0f}" for rate in rates)
        print(f"{phase or 'all':<10}{times[0]:10.3f}{times[1]:10.3f}{faster:>9}{shown}")


def write_summary(
    run: Path, rows: list[dict[str, Any]], held_out: list[tuple[int, float]], records: list[dict[str, Any]]
) -> None:
    """The figures in the form of the files in ``benchmarks/``."""
    import torch

    settings = json.loads((run / "dta" / "settings.json").read_text(encoding="utf-8"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rewards = [[record["iteration"], record["reward"]] for record in records if "reward" in record]
    result = measured_on("GRPO learns addition in columns; phases with trees and without", settings, device) | {
        "command": "bash examples/scratchpad.sh",
        "rows": rows,
        "held_out_reward": held_out,
        "reward": rewards,
    }
    with replacing(run / "summary.json") as temporary:
        temporary.write_text(json.dumps({"runs": [result]}, indent=1) + "\n", encoding="utf-8")


def plot(
    records: list[dict[str, Any]], held_out: list[tuple[int, float]], rows: list[dict[str, Any]], picture: Path
) -> None:
    """The rewards on the left, the seconds of a step's phases on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    trained = [record for record in records if "reward" in record]
    left.plot(
        [r["iteration"] for r in trained],
        [r["reward"] for r in trained],
        ".",
        color="tab:blue",
        alpha=0.4,
        label="training prompts",
    )
    left.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out prompts")
    left.set(title="GRPO on prefix trees", xlabel="step", ylabel="fraction of right sums", ylim=(0, 1))
    left.legend(loc="lower right")
    left.grid(alpha=0.3)
    for place, row in enumerate(rows):
        bottom = 0.0
        for phase, color in zip(PHASES, ("tab:blue", "tab:green", "tab:gray", "tab:orange", "tab:red"), strict=True):
            height = row[f"{phase}_seconds"] / row["steps"]
            right.bar(place, height, bottom=bottom, color=color, label=phase if place == 0 else None)
            bottom += height
    right.set_xticks(range(len(rows)), [MODES[row["mode"]] for row in rows])
    right.set(title="seconds of a step", ylabel="s")
    right.legend(loc="upper right")
    unfinished = picture.with_name(picture.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=150)
    os.replace(unfinished, picture)


if __name__ == "__main__":
    run_entry_point(main)
