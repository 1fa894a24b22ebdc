"""The experiments of AReaL-DTA (arXiv 2602.00482), like for like: all modes on the same kernels, with their bounds.

    python benchmarks/papers/areal_dta.py [--small] [--smallest] [--output-dir runs/papers/areal_dta]
        [--parts modes sizes orders balance rivals] [--model qwen3-1.7b] [--tree-memory-gib 40]

    modes    dense one by one with recomputation, dense packed, packed trees and trees; by trajectory and by turn
    sizes    segment sizes
    orders   orders of traversal and cuts: sorted, random, the planner's
    balance  ours against contiguous cuts by tokens and by predicted cost and first fit, simulated
    rivals   figures of others, quoted with their source, and packed trees on other attention where a GPU has it

Rollouts are those in the folder $DTA_ROLLOUTS or --rollouts. Without these flags the experiment needs a GPU: the first
--trajectories trajectories of --set in bfloat16. --small takes a tiny model and short sets, and generated trajectories
where there is no such folder; --smallest generated ones only.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.benchmark_model import MODELS, TINY, benchmark_model
from common.training_step import StepTimer
from megatron_dta.common.command_line import check_at_least
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.rollouts.load import load_rollouts
from papers.areal_parts import balance, notes, orders, rivals, steps
from papers.areal_parts.workload import RolloutSet, generated_set, load_set
from papers.tables import COLORS, PaperReport, paper_parser

PARTS = ("modes", "sizes", "orders", "balance", "rivals")
NEEDS_MODEL = {"modes", "sizes", "orders", "rivals"}


@dataclass(frozen=True)
class Preset:
    """What a run of one size measures.

    Attributes:
        sets: rollout sets of the steps, each with its number of trajectories.
        balance_sets: those that are divided over ranks; None for all in the folder.
        generated: arguments of the generated set besides its seed, or None: sets are files.
    """

    model: str
    settings: steps.StepSettings
    sets: tuple[tuple[str, int], ...]
    balance_sets: tuple[tuple[str, int], ...] | None
    ranks: tuple[int, ...]
    generated: tuple[int, int, int, int]


SMALLEST = Preset(
    "tiny",
    steps.StepSettings(1, 64, (32, 256), 64, 256, None, longest_warm_up=0.0),
    (),
    (),
    (2, 4),
    (2, 2, 4, 4),
)
SMALL = Preset(
    "tiny",
    steps.StepSettings(1, 512, (128, 256, 512, 1024), 512, 2048, None, longest_warm_up=1.0),
    (("mint_math_8x100", 4), ("humaneval_codegen16b_100x40", 40)),
    (("mint_math_8x100", 200), ("tau1_airline_gpt4o_4x50", 80), ("math_qwen25_8x100", 200)),
    (2, 4, 8, 16, 32),
    (4, 8, 6, 40),
)
FULL = Preset(
    "qwen3-1.7b",
    steps.StepSettings(2, None, (1024, 2048, 4096, 8192), 4096, 16384, 40.0),
    ((rivals.QUOTED_SET, rivals.QUOTED_TRAJECTORIES),),
    None,
    (2, 4, 8, 16, 32, 64),
    (4, 8, 6, 400),
)


def parse_arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "areal_dta")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="tables to make")
    parser.add_argument("--rollouts", type=Path, help="folder of the rollout sets (default: $DTA_ROLLOUTS)")
    parser.add_argument("--set", default=rivals.QUOTED_SET, help="rollout set of the steps on a GPU")
    parser.add_argument(
        "--trajectories", type=int, default=rivals.QUOTED_TRAJECTORIES, help="the first ones of the set"
    )
    parser.add_argument("--model", choices=list(MODELS), help="default: qwen3-1.7b; with --small tiny")
    parser.add_argument(
        "--tree-memory-gib", type=float, help="memory of dense packed training and of trees (default: 40)"
    )
    parser.add_argument("--steps", type=int, help="timed runs of a step (default: 2; with --small 1)")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "seeds", "trajectories", "steps")
    gib = arguments.tree_memory_gib
    if gib is not None and not 0 < gib < math.inf:
        raise InputError(f"--tree-memory-gib must be above 0, not {gib}")
    return arguments


def choose_preset(arguments: argparse.Namespace) -> Preset:
    """The preset of the flags, with the values that were given."""
    preset = SMALLEST if arguments.smallest else SMALL if arguments.small else FULL
    if preset is FULL:
        preset = replace(preset, sets=((arguments.set, arguments.trajectories),))
        if not torch.cuda.is_available() and NEEDS_MODEL & set(arguments.parts):
            raise InputError(
                "the experiment measures a CUDA GPU, and there is none here; give --small or --parts balance"
            )
    settings = preset.settings
    if arguments.steps is not None:
        settings = replace(settings, steps=arguments.steps)
    if arguments.tree_memory_gib is not None:
        settings = replace(settings, memory_gib=arguments.tree_memory_gib)
    return replace(preset, settings=settings, model=arguments.model or preset.model)


class Rollouts:
    """The rollout sets of a run."""

    def __init__(self, arguments: argparse.Namespace, preset: Preset) -> None:
        folder = arguments.rollouts or os.environ.get("DTA_ROLLOUTS")
        self.preset, self.renumber = preset, preset.model in TINY
        self.folder = Path(folder) if folder and not arguments.smallest else None
        if self.folder is not None and not self.folder.is_dir():
            raise InputError(f"--rollouts {self.folder}: there is no such folder")
        if self.folder is None and preset.sets and not arguments.small:
            raise InputError("the rollout sets are needed: give --rollouts FOLDER or set DTA_ROLLOUTS")

    def of_steps(self) -> list[RolloutSet]:
        """The sets whose steps are measured."""
        if self.folder is None:
            return [generated_set(0, *self.preset.generated)]
        return [load_set(self.folder / f"{name}.npz", count, self.renumber) for name, count in self.preset.sets]

    def of_balance(self) -> list[balance.BalanceSet]:
        """The sets that are divided over ranks, one sample per trajectory."""
        if self.folder is None:
            generated = [generated_set(seed, *self.preset.generated) for seed in range(3)]
            return [
                balance.BalanceSet(f"{rollout_set.name}, seed {i}", rollout_set.trajectories)
                for i, rollout_set in enumerate(generated)
            ]
        sets = self.preset.balance_sets
        if sets is None:
            sets = tuple((path.name.removesuffix(".npz"), None) for path in sorted(self.folder.glob("*.npz")))
        paths = [(self.folder / f"{name}.npz", name, count) for name, count in sets]
        return [balance.BalanceSet(name, load_rollouts(path, max_sequences=count)) for path, name, count in paths]


def make_timer(arguments: argparse.Namespace, preset: Preset, sets: Sequence[RolloutSet]) -> StepTimer:
    """The model that all steps are timed on."""
    most, longest = max(rollout_set.most for rollout_set in sets), max(rollout_set.longest for rollout_set in sets)
    vocab_size = most + 1 if preset.model in TINY else MODELS[preset.model].vocab_size
    if most >= vocab_size:
        raise InputError(f"--set: has token id {most}, but {preset.model} has {vocab_size}")
    config = benchmark_model(preset.model, vocab_size, longest, bf16=torch.cuda.is_available())
    timer = StepTimer(config, ParallelConfig(), 1)
    timer.limit_memory(preset.settings.memory_gib)
    return timer


def add_tables(report: PaperReport, parts: Sequence[str], on_gpu: bool) -> None:
    """All tables, in the order in which they appear."""
    tables = {
        "modes": [("modes", "Modes", steps.MODE_COLUMNS)],
        "sizes": [("sizes", "Segment sizes of trees, one sample per trajectory", steps.SIZE_COLUMNS)],
        "orders": [("orders", "Orders of traversal, one sample per trajectory", orders.COLUMNS)],
        "balance": [
            ("balance", "Balance over data-parallel ranks, simulated", balance.COLUMNS),
            ("balance_sets", "The same for each set", balance.SET_COLUMNS),
        ],
        "rivals": [("rivals", "Rivals", rivals.COLUMNS)],
    }
    if on_gpu:
        tables["rivals"].append(("attention", "Attention of the largest pack, one layer", rivals.ATTENTION_COLUMNS))
    for part in PARTS:
        for key, title, columns in tables[part] if part in parts else ():
            report.table(key, title, columns, notes.NOTES.get(key, ""))


def draw_modes(axes: Axes, rows: Sequence[dict]) -> None:
    """Speed-up of each mode over dense packed training, with its bound."""
    rows = [row for row in rows if "speed_up" in row]
    names = list(dict.fromkeys(row["mode"] for row in rows))
    groups = list(dict.fromkeys((row["set"], row["sample"]) for row in rows))
    width = 0.8 / len(names)
    for row in rows:
        at = groups.index((row["set"], row["sample"])) + (names.index(row["mode"]) - (len(names) - 1) / 2) * width
        axes.bar(at, row["speed_up"], width, color=COLORS[names.index(row["mode"])])
        axes.plot([at - width / 2, at + width / 2], [row["bound"]] * 2, color="black")
    for name, color in zip(names, COLORS, strict=False):
        axes.bar(0, 0, color=color, label=name)
    axes.plot([], [], color="black", label="bound: ratio of operations")
    axes.set_xticks(range(len(groups)), [f"{name}\none sample per {sample}" for name, sample in groups], fontsize=6)
    axes.set_ylabel("speed-up over dense, packed")
    axes.set_title("Modes of training")
    axes.legend(fontsize=7, loc="upper left")


def draw(report: PaperReport) -> None:
    """The plot of what was measured."""
    drawings: list[tuple[Callable[[Axes, Sequence[dict]], None], list[dict]]] = []
    for key, function in (("modes", draw_modes), ("balance", balance.draw_balance)):
        if key in report.tables and report.rows(key):
            drawings.append((function, report.rows(key)))

    def fill(axes: Sequence[Axes]) -> None:
        for panel, (function, rows) in zip(axes, drawings, strict=True):
            function(panel, rows)

    if drawings:
        report.plot(fill, panels=len(drawings))


def main() -> int:
    arguments = parse_arguments()
    preset, parts, on_gpu = choose_preset(arguments), arguments.parts, torch.cuda.is_available()
    rollouts = Rollouts(arguments, preset)
    settings = vars(arguments)
    report = PaperReport("areal_dta", arguments.output_dir, settings | {"preset": str(preset)})
    add_tables(report, parts, on_gpu)
    if "balance" in parts:
        model = CostModel.from_shape(MODELS["qwen3-1.7b"])
        balance.simulate_balance(report, rollouts.of_balance(), model, preset.ranks)
    if "rivals" in parts:
        rivals.quote_rivals(report)
    if NEEDS_MODEL & set(parts) and (on_gpu or set(parts) & (NEEDS_MODEL - {"rivals"})):
        sets = rollouts.of_steps()
        timer = make_timer(arguments, preset, sets)
        for rollout_set in sets:
            if "modes" in parts:
                steps.measure_modes(report, timer, rollout_set, preset.settings)
            if "sizes" in parts:
                steps.measure_sizes(report, timer, rollout_set, preset.settings)
            if "orders" in parts:
                orders.measure_orders(report, timer, rollout_set, preset.settings, arguments.seeds)
            if "rivals" in parts and on_gpu:
                rivals.measure_rivals(report, timer, rollout_set, preset.settings)
        torch.distributed.destroy_process_group()
    report.write_markdown()
    draw(report)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
