"""The experiment of DAS: training with and without drafts, and its ablations of scope, window and budget.

    PYTHONPATH=benchmarks python benchmarks/papers/das.py [--small] [--smallest] [--output-dir OUT] [--seeds N]
        [--tasks TASK ...] [--jobs N] [--no-replays]

Writes das.json, das.md, and plots of rollout seconds, rewards and ablations to OUT, the JSON file after every run.
Complete training runs in OUT are used again. The ablations replay the runs of the tasks, and stored rollouts if
DTA_ROLLOUTS names their folder. --jobs seeds run concurrently, all in the same mode at a time, so that their
seconds compare.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from megatron_dta.common.command_line import check_at_least
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from papers.das_parts import tasks as das_tasks
from papers.das_parts.replays import ABLATIONS, History, live_history, replay_all, stored_history
from papers.das_parts.runs import (
    PLAIN,
    LiveRun,
    LiveTask,
    data_job,
    equal_batches,
    equal_share,
    largest_difference,
    live_job,
    read_run,
    warmup_job,
)
from papers.processes import Processes
from papers.tables import COLORS, PaperReport, paper_parser

Runs = dict[tuple[str, int, str], LiveRun]
"""Runs by task, seed and mode."""

LIVE = {
    "task": "task",
    "seed": "seed",
    "mode": "mode",
    "rollout_seconds": "rollout s",
    "seconds_saved": "saved",
    "sampled_tokens": "sampled tokens",
    "longest": "longest",
    "mean_length": "mean",
    "forwards": "forwards",
    "drafted": "drafted",
    "accepted": "accepted",
    "reward": "held-out reward",
    "same_samples": "same samples",
    "same_batches": "equal batches first",
    "loss_difference": "loss differs by",
}
REPLAY = {
    "history": "history",
    "setting": "setting",
    "tokens_per_forward": "tokens per forward",
    "forwards_saved": "forwards saved",
    "makespan": "makespan s",
    "makespan_saved": "saved",
    "first_epoch_saved": "saved, first epoch",
    "accepted_share": "accepted share",
    "wasted": "wasted tokens",
    "tree_tokens": "tokens in trees",
}
LIVE_NOTE = (
    "The paper reports over 50% less rollout time on math (R1-Distill-Qwen-7B, 128 x 16 samples of up to 16k "
    "tokens, eight H100) and about 25% on code (Qwen3-8B), with rewards on top of each other. Here small models add "
    "numbers in columns, and prompts repeat every few rollout batches. The long tail is a task with many short and "
    "few long problems; a response has four tokens for each digit. Its reward is the share of right characters, "
    "because a model this small seldom solves a whole problem. The forwards of such models are cheap, so drafts "
    "have less to save than with 7B, and their host time counts more. On a CPU the time of a forward grows with its "
    "tokens from the first one, and seconds depend on what else runs. *Drafts, no clock* is --deterministic-mode, "
    "where a default cost (7B on one H100) decides; *drafts* follows measured times. In float32 the samples must be "
    "the same, and with recomputed logprobs so is every loss. In bfloat16 the samples are equal until rounding "
    "changes one; from then on the weights differ, as between two seeds. The forwards without drafts are those of "
    "the same samples with one token in each; in the rows of plain decoding they leave out passes that only compute "
    "prompts. Seconds leave out the first rollout batch, which compiles. Seeds change the order of prompts and the "
    "samples; all runs of a task begin at the same weights."
)
REPLAY_NOTES = {
    "scope": "The paper's problem trees accept 0.2 to 0.4 tokens a round more than a global one, and queries are "
    "faster. Here *both* (our default) uses the better score of the two.",
    "window": "In the paper windows of 16, 32 and all epochs accept alike (6.0 to 6.4), 4 epochs fewer (5.6). It "
    "ties the window to the size of the optimizer's steps and weighs old epochs less, without a formula for either; "
    "both are missing.",
    "budgets": "The paper's length classes, and ours by the probability of ending last.",
}
REPLAY_NOTE = (
    " Replays decode the recorded samples again with the default cost model (8 ms a forward, 30 microseconds a token); "
    "figures are those after the first epoch. Live histories drift with the policy; stored sets do not."
)


def main() -> int:
    """Run the experiment."""
    parser = paper_parser(__doc__ or "", "das")
    parser.add_argument("--tasks", nargs="+", help="names of the tasks to train (default: all of this size)")
    parser.add_argument("--jobs", type=int, default=1, help="maximum number of concurrent seeds")
    parser.add_argument("--no-replays", action="store_true", help="leave the ablations out")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "seeds", "jobs")
    name = "smallest" if arguments.smallest else "small" if arguments.small else "full"
    scale = {"smallest": das_tasks.smallest, "small": das_tasks.small, "full": das_tasks.full}[name]()
    known = {task.name: task for task in scale.tasks}
    unknown = sorted(set(arguments.tasks or ()) - set(known))
    if unknown:
        raise InputError(f"--tasks: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    tasks = [known[name] for name in arguments.tasks or known]
    settings = {"scale": name, "seeds": arguments.seeds, "tasks": [task.name for task in tasks], "jobs": arguments.jobs}
    report = PaperReport("das", arguments.output_dir, settings)
    report.table("live", "Training with and without drafts", LIVE, LIVE_NOTE)
    for key in ABLATIONS:
        report.table(key, f"Ablation: {key}", REPLAY, REPLAY_NOTES[key] + REPLAY_NOTE)
    runs: Runs = {}
    # A scheduler's signal ends the runs under way, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    processes = Processes(report.folder / "runs", ["papers.das_parts.runs"], arguments.jobs)
    try:
        for task in tasks:
            train_task(task, min(task.seeds, arguments.seeds), arguments.jobs, processes, report, runs)
        if not arguments.no_replays:
            for key, row in replay_all(histories(tasks, scale.stored, runs)):
                report.add(key, row)
            report.plot(lambda axes: draw_ablations(axes, report), panels=len(ABLATIONS), suffix="ablations")
    finally:
        processes.close()
        if runs:
            plot_runs(report, runs)
        print(f"tables: {report.write_markdown()}")
    return 0


def train_task(task: LiveTask, seeds: int, jobs: int, processes: Processes, report: PaperReport, runs: Runs) -> None:
    """Train all modes with each seed, and add the runs and their rows."""
    data, _ = processes.run(data_job(task))
    warmup, _ = processes.run(warmup_job(task, data))
    for first in range(1, seeds + 1, jobs):
        group = range(first, min(first + jobs, seeds + 1))
        for mode in task.modes:
            by_seed = {seed: live_job(task, data, warmup, seed, mode) for seed in group}
            for job in by_seed.values():
                processes.begin(job)
            for seed, job in by_seed.items():
                run = runs[task.name, seed, mode] = read_run(processes.run(job)[0])
                reference = runs[task.name, seed, task.modes[0]]
                report.add("live", live_row(run, reference, {"task": task.name, "seed": seed, "mode": mode}))


def live_row(run: LiveRun, plain: LiveRun, names: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run, and how it differs from the run without drafts."""
    lengths = run.lengths()
    seconds, usual = sum(run.rollout_seconds[1:]), sum(plain.rollout_seconds[1:])
    row = {
        **names,
        "rollout_seconds": seconds,
        "first_batch_seconds": run.rollout_seconds[0],
        "sampled_tokens": int(sum(batch_lengths.sum() for batch_lengths in lengths)),
        "longest": int(max(batch_lengths.max() for batch_lengths in lengths)),
        "mean_length": float(sum(batch_lengths.sum() for batch_lengths in lengths) / sum(map(len, lengths))),
        # All samples of a batch decode together, so the longest one decides.
        "forwards": int(sum(batch_lengths.max() for batch_lengths in lengths)),
        "reward": run.evaluations[-1][1],
        "rewards": run.evaluations,
        "seconds_by_batch": run.rollout_seconds,
    }
    if names["mode"] == PLAIN:
        return row
    return row | {
        "seconds_saved": 1 - seconds / usual,
        "forwards": run.drafts("forwards"),
        "drafted": run.drafts("drafted_tokens"),
        "accepted": run.drafts("accepted_tokens"),
        "same_samples": equal_share(run, plain),
        "same_batches": f"{equal_batches(run, plain)} of {len(run.batches)}",
        "loss_difference": largest_difference(run, plain, "loss"),
        "reward_difference": largest_difference(run, plain, "reward"),
    }


def histories(tasks: Sequence[LiveTask], stored: Mapping[str, tuple[int, int, int]], runs: Runs) -> list[History]:
    """The samples of each task's first run, and the stored sets if there are any."""
    result = []
    for task in tasks:
        run = runs[task.name, 1, task.modes[0]]
        result.append(live_history(task.name, run.batches, task.batches_per_epoch))
    folder = os.environ.get("DTA_ROLLOUTS")
    for name, (problems, samples, epochs) in stored.items():
        path = Path(folder or "") / f"{name}.npz"
        if folder and path.exists():
            result.append(stored_history(path, problems, samples, epochs))
        else:
            print(f"{name}: left out, because DTA_ROLLOUTS does not name a folder with it", flush=True)
    return result


def plot_runs(report: PaperReport, runs: Runs) -> None:
    """Seconds by rollout batch, and rewards by step, a panel for each task."""
    names = list(dict.fromkeys(task for task, _, _ in runs))
    report.plot(lambda axes: draw_seconds(axes, names, runs), panels=len(names), suffix="seconds")
    report.plot(lambda axes: draw_rewards(axes, names, runs), panels=len(names), suffix="rewards")


def draw_seconds(axes: Sequence[Axes], names: Sequence[str], runs: Runs) -> None:
    """Rollout seconds by batch; the runs of other seeds are fainter."""
    for panel, name in zip(axes, names, strict=True):
        modes = _modes(name, runs)
        for (task, seed, mode), run in runs.items():
            if task == name:
                seconds = run.rollout_seconds[1:]
                label = mode if seed == 1 else None
                panel.plot(range(2, len(seconds) + 2), seconds, color=COLORS[modes.index(mode)], label=label,
                           alpha=1.0 if seed == 1 else 0.4)  # fmt: skip
        panel.set(title=name, xlabel="rollout batch", ylabel="seconds of the rollout", ylim=(0, None))
        panel.legend()


def draw_rewards(axes: Sequence[Axes], names: Sequence[str], runs: Runs) -> None:
    """Training reward by step, and held-out reward as points; runs with drafts are dashed."""
    for panel, name in zip(axes, names, strict=True):
        modes = _modes(name, runs)
        for (task, seed, mode), run in runs.items():
            if task == name:
                look = {"color": COLORS[modes.index(mode)], "alpha": 1.0 if seed == 1 else 0.4}
                steps = [record["iteration"] for record in run.records]
                rewards = [record["reward"] for record in run.records]
                style = "-" if mode == PLAIN else (0, (3, 1 + modes.index(mode)))
                panel.plot(steps, rewards, linestyle=style, label=mode if seed == 1 else None, **look)
                panel.plot(*zip(*run.evaluations, strict=True), linestyle="", marker="o", markersize=4, **look)
        panel.set(title=name, xlabel="optimizer step", ylabel="reward (line), held out (points)")
        panel.legend()


def draw_ablations(axes: Sequence[Axes], report: PaperReport) -> None:
    """Share of the makespan that each setting saves, with a bar for each history."""
    for panel, key in zip(axes, ABLATIONS, strict=True):
        rows = report.rows(key)
        # Fixed windows by their size, all others in the order in which they ran.
        labels = sorted(dict.fromkeys(row["setting"] for row in rows), key=_leading_number)
        names = list(dict.fromkeys(row["history"] for row in rows))
        height = 0.8 / len(names)
        for i, name in enumerate(names):
            history_rows = [row for row in rows if row["history"] == name]
            positions = [labels.index(row["setting"]) + i * height for row in history_rows]
            saved = [100 * row["makespan_saved"] for row in history_rows]
            panel.barh(positions, saved, height=height, color=COLORS[i % len(COLORS)], label=name)
        panel.set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels, fontsize=7)
        panel.invert_yaxis()
        panel.set(title=key, xlabel="makespan saved (%)")
    # Beside the bars, which begin at the left.
    axes[-1].set_xlim(right=1.7 * axes[-1].get_xlim()[1])
    axes[-1].legend(fontsize=6)


def _leading_number(label: str) -> float:
    return float(label.split()[0]) if label[0].isdigit() else math.inf


def _modes(name: str, runs: Runs) -> list[str]:
    return list(dict.fromkeys(mode for task, _, mode in runs if task == name))


if __name__ == "__main__":
    run_entry_point(main)
