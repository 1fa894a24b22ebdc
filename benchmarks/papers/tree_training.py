"""Runs the experiments of Tree Training (arXiv 2511.00413): what shared prefixes save against the sequences' overlap.

    PYTHONPATH=benchmarks python benchmarks/papers/tree_training.py [--small] [--parts PART ...]

overlap          a step dense packed, in packed trees and in trees, on random trees with overlaps of 0 to 0.95
sets             the same on rollout sets (the folder DTA_ROLLOUTS), cut to a number of tokens
packing          tokens of packed trees by contiguous cuts and by first fit decreasing; needs no GPU
longest-path     what training only the longest path of a tree loses: tokens, terms of the loss, the exact gradient
learning-curves  a small model on arithmetic, trained in all these ways

Both sides run the same kernels, dense is packed and never padded, and packed trees are the better of both packings. The
bound of a speed-up is the ratio of the operations of both modes. The files appear in --output-dir: JSON, Markdown and
two plots. --smallest uses random trees alone. --seeds is for gradients and curves: 3, on the small scales 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.benchmark_model import TINY, benchmark_model
from megatron_dta.common.command_line import check_at_least
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from papers.tables import PaperReport, paper_parser
from papers.tree_training_parts.curves import WAYS, CurveRun, Curves, CurveSettings
from papers.tree_training_parts.data import TreeSet, load_set, random_trees
from papers.tree_training_parts.longest_path import gradient_row, lost_shares
from papers.tree_training_parts.packing import packing_rows
from papers.tree_training_parts.plots import plot_curves, plot_overlap
from papers.tree_training_parts.steps import StepTimer
from papers.tree_training_parts.text import add_tables

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
# Of random trees.
VOCABULARY = 1024
PARTS = ("overlap", "sets", "packing", "longest-path", "learning-curves")


@dataclass(frozen=True)
class Scale:
    """Sizes of an experiment.

    Attributes:
        sequences, length: of a random tree.
        capacity: tokens of a pack in timed steps.
        capacities: tokens of a pack where packs are counted.
        set_tokens: rollout sets are cut to this many tokens for timed steps.
        gradient_tokens: and to this many for gradients in float64.
        steps: timed steps.
    """

    model: str
    sequences: int
    length: int
    capacity: int
    capacities: tuple[int, ...]
    set_tokens: int
    gradient_tokens: int
    steps: int
    curves: CurveSettings


SCALES = {
    "smallest": Scale("tiny", 4, 16, 64, (32, 64), 0, 0, 1, CurveSettings(1, 1, 2, 2, max_operand=4)),
    "small": Scale("tiny", 32, 128, 512, (8192, 16384, 32768), 4000, 4000, 3, CurveSettings(40, 10)),
    "full": Scale("qwen3-1.7b", 32, 4096, 16384, (8192, 16384, 32768), 120_000, 20_000, 3, CurveSettings(300, 100)),
}


def parse_arguments() -> argparse.Namespace:
    parser = paper_parser(__doc__, "tree_training")
    parser.set_defaults(seeds=None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--max-tokens", type=int, help="of a rollout set in a timed step (default: by scale)")
    parser.add_argument("--steps", type=int, help="timed steps after one to warm up; the median counts")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "max_tokens", "steps", "seeds")
    arguments.scale = "smallest" if arguments.smallest else "small" if arguments.small else "full"
    if arguments.seeds is None:
        arguments.seeds = 3 if arguments.scale == "full" else 1
    if arguments.scale == "full" and not torch.cuda.is_available():
        timed = {"overlap", "sets"} & set(arguments.parts)
        if timed:
            raise InputError(f"the parts {' and '.join(sorted(timed))} need a GPU; give --small, or other --parts")
    return arguments


class Experiment:
    """The parts of the experiment on one scale, and the report that they fill."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.scale = arguments, SCALES[arguments.scale]
        settings = vars(arguments)
        self.report = PaperReport("tree_training", arguments.output_dir, settings)
        self._sets: list[TreeSet] | None = None
        self._timer: StepTimer | None = None
        self.curves: dict[str, list[Curves]] = {}

    def run(self) -> None:
        """Run the parts that were asked for, and write tables and plots."""
        add_tables(self.report, [part for part in PARTS if part in self.arguments.parts])
        for part in self.report.tables:
            getattr(self, part.replace("-", "_"))()
            self.report.write_markdown()
        rows = {part: self.report.rows(part) for part in ("overlap", "sets") if part in self.report.tables}
        if any(rows.values()):
            plot_overlap(self.report, rows)
        if self.curves:
            plot_curves(self.report, self.curves)

    def overlap(self) -> None:
        """Steps on random trees."""
        for trees in self._random_trees():
            self.report.add("overlap", self._step_timer().compare(trees, self.scale.capacity))

    def sets(self) -> None:
        """Steps on rollout sets."""
        for trees in self._rollout_sets():
            cut = trees.first_tokens(self.arguments.max_tokens or self.scale.set_tokens)
            if cut is not None:
                self.report.add("sets", self._step_timer().compare(cut.renumbered(), self.scale.capacity))

    def packing(self) -> None:
        """Tokens of packs; on two CPU cores some rollout sets have millions, so small scales use their first tokens."""
        for trees in self._rollout_sets() or self._random_trees():
            packed = trees if self.arguments.scale != "small" else trees.first_tokens(300_000)
            for row in packing_rows(packed, self.scale.capacities) if packed is not None else ():
                self.report.add("packing", row)

    def longest_path(self) -> None:
        """Lost shares of whole sets, and gradients on their first tokens."""
        for trees in [*self._random_trees(), *self._rollout_sets()]:
            is_random = trees.name.startswith("overlap")
            cut = self._small_trees(trees) if is_random else trees.first_tokens(self.scale.gradient_tokens)
            lost = lost_shares(trees)
            if cut is None:
                self.report.add("longest-path", lost)
            for seed in range(self.arguments.seeds if cut is not None else 0):
                self.report.add("longest-path", lost | gradient_row(cut, seed + 1, self.scale.capacity))

    def learning_curves(self) -> None:
        """Runs in all ways with the same seeds."""
        for seed in range(1, self.arguments.seeds + 1):
            for way in WAYS:
                curve = CurveRun(way, seed, self.scale.curves).run()
                self.curves.setdefault(way, []).append(curve)
                row = {"way": way, "seed": seed, "held_out_loss": curve.held_out_loss[-1]}
                row |= {"held_out_after_sft": curve.held_out_after_sft, "held_out": curve.held_out}
                row |= curve.largest_difference(self.curves["dense"][seed - 1])
                row |= {"sft_losses": curve.sft_loss, "grpo_losses": curve.grpo_loss, "rewards": curve.reward}
                row |= {"held_out_losses": curve.held_out_loss, "held_out_steps": curve.held_out_steps}
                self.report.add("learning-curves", row)

    def _step_timer(self) -> StepTimer:
        """The model of the timed steps, for all sets that will be timed."""
        if self._timer is None:
            vocab_size, longest, is_tiny = VOCABULARY, self.scale.length, self.scale.model in TINY
            for trees in self._rollout_sets() if "sets" in self.arguments.parts else ():
                cut = trees.first_tokens(self.arguments.max_tokens or self.scale.set_tokens)
                if cut is not None:
                    vocab_size, longest = max(vocab_size, cut.renumbered().vocab_size), max(longest, cut.longest)
            model = benchmark_model(self.scale.model, vocab_size, longest, bf16=not is_tiny)
            self._timer = StepTimer(model, self.arguments.steps or self.scale.steps)
        return self._timer

    def _random_trees(self) -> Iterator[TreeSet]:
        for overlap in OVERLAPS if self.arguments.scale != "smallest" else OVERLAPS[::3]:
            yield random_trees(overlap, self.scale.sequences, self.scale.length, VOCABULARY)

    def _small_trees(self, trees: TreeSet) -> TreeSet:
        """Trees of the same overlap that gradients in float64 can be computed on."""
        if self.arguments.scale == "smallest":
            return trees
        return random_trees(float(trees.name.split()[1]), 32, 128, 512, trees=3)

    def _rollout_sets(self) -> Sequence[TreeSet]:
        """The rollout sets; none on the smallest scale or without a folder of them."""
        if self._sets is None:
            folder = os.environ.get("DTA_ROLLOUTS")
            self._sets = []
            if self.arguments.scale != "smallest" and folder is None:
                print("rollout sets are left out: DTA_ROLLOUTS names no folder", file=sys.stderr)
            elif self.arguments.scale != "smallest":
                self._sets = [load_set(path) for path in sorted(Path(folder).glob("*.npz"))]
        return self._sets


def main() -> int:
    Experiment(parse_arguments()).run()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
