"""Divides the sequences of a rollout file over data-parallel ranks and reports how balanced the ranks are.

    megatron-dta plan-partition FILE --data-parallel-size 8 [--sample-granularity turn] [--json]

FILE is a rollout file (.jsonl, .parquet or .npz). Costs are the seconds of a rank's forward and backward predicted by
the cost model (core/planning/costs/model.py); a shared prefix counts on each rank that computes it. Duplicated
tokens are the computed tokens beyond the unique ones. As in training, tokens after the last trained token of a sequence
are left out. Planning time includes the prefix tree.

With --expert-model-parallel-size E, each E ranks in a row share experts and wait for each other in every op. The
partition is then the one whose slowest group is predicted to be fastest, and "even ranks" is the one without that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.table import Table

from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, least_slowest, partition_costs, trained_parts
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS
from megatron_dta.core.rollouts.load import load_chosen_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.capacity.predicted_costs import add_cost_flags, read_costs
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep

EVEN_RANKS = "even_ranks"
"""The key of --json of the partition without groups of ranks that wait for each other."""


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--data-parallel-size", type=int, metavar="N", required=True, help="number of ranks")
    add_sample_granularity(parser)
    parser.add_argument(
        "--keep-together",
        choices=("sequence", "trajectory", "group"),
        default="sequence",
        help="unit that stays on one rank: a sequence, a trajectory or a group (default: %(default)s)",
    )
    parser.add_argument(
        "--expert-model-parallel-size",
        type=int,
        metavar="E",
        default=1,
        help="ranks that share experts, a divisor of --data-parallel-size (default: %(default)s)",
    )
    parser.add_argument(
        "--tree-segment-tokens",
        type=int,
        metavar="N",
        help="maximum tokens of a segment, for --expert-model-parallel-size (default: 2048)",
    )
    counts = add_cost_flags(parser)
    parser.add_argument("--max-sequences", type=int, metavar="N", help="only the first N sequences")
    parser.add_argument("--max-length", type=int, metavar="N", help="only the first N tokens of each sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    counts = [flag[2:].replace("-", "_") for flag in counts]
    sizes = ("data_parallel_size", "expert_model_parallel_size", "tree_segment_tokens")
    check_at_least(arguments, 1, *sizes, "max_sequences", "max_length", *counts)
    ranks, experts = arguments.data_parallel_size, arguments.expert_model_parallel_size
    if ranks % experts:
        raise InputError(f"--expert-model-parallel-size {experts} does not divide --data-parallel-size {ranks}")
    if experts == 1 and arguments.tree_segment_tokens is not None:
        raise InputError("--tree-segment-tokens has no effect without --expert-model-parallel-size; leave it out")
    return arguments


def names_to_keep(rollouts: list[Rollout], unit: str) -> list[str] | None:
    """Return the name of the unit of each rollout; a rollout without a trajectory is a unit of its own."""
    if unit == "group":
        return [rollout.group_id for rollout in rollouts]
    if unit == "trajectory":
        return [
            f"row {row}" if rollout.trajectory_id is None else json.dumps([rollout.group_id, rollout.trajectory_id])
            for row, rollout in enumerate(rollouts)
        ]
    return None


def figures(partition: Partition, seconds: float) -> dict[str, object]:
    """Return the figures of one method by their keys of ``--json``."""
    sequences = np.bincount(partition.rank_of_sequence, minlength=partition.num_ranks)
    return {
        "cost_per_rank": partition.cost_per_rank.tolist(),
        "max_over_mean": partition.max_over_mean,
        "total_cost": partition.total_cost,
        "duplicated_tokens": partition.duplicated_tokens,
        "seconds": seconds,
        "tokens_per_rank": partition.tokens_per_rank.tolist(),
        "sequences_per_rank": sequences.tolist(),
        "idle_ranks": int(np.count_nonzero(sequences == 0)),
    }


def compare(rollouts: list[Rollout], arguments: argparse.Namespace, model: CostModel) -> dict[str, object]:
    """Return the figures of the partition, and those of even ranks under ``EVEN_RANKS`` if ranks share experts."""
    ranks = arguments.data_parallel_size
    names = names_to_keep(rollouts, arguments.keep_together)
    begin = time.perf_counter()
    sequences, masks = trained_parts(rollouts)
    tree = build_prefix_tree(sequences)
    costs = SequenceCosts.of(tree, model, masks, names)
    step = None
    if arguments.expert_model_parallel_size > 1:
        size = arguments.tree_segment_tokens or DEFAULT_SEGMENT_TOKENS
        shape = PipelineShape(cost_model=model)
        step = GroupStep(sequences, masks, arguments.expert_model_parallel_size, StepBudget(size), shape)

    def measured(partition: Partition, seconds: float) -> dict[str, object]:
        group = {} if step is None else {"slowest_group": step.slowest(partition.rank_of_sequence)}
        return figures(partition, seconds) | group

    partition = partition_costs(costs, ranks, step and (lambda splits: [step.slowest(split) for split in splits]))
    result = measured(partition, time.perf_counter() - begin)
    result["least_slowest_cost"] = least_slowest(costs, ranks)
    result["sequences"], result["tokens"] = len(sequences), sum(map(len, sequences))
    result["unique_tokens"] = tree.num_tokens

    if step is not None:
        begin = time.perf_counter()
        even = partition_costs(costs, ranks)
        result[EVEN_RANKS] = measured(even, time.perf_counter() - begin)
    return result


def print_table(values: dict[str, object], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    methods = {"this planner": values} | ({"even ranks": values[EVEN_RANKS]} if EVEN_RANKS in values else {})
    for name in methods:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[dict], str]] = {
        "slowest rank (seconds)": lambda v: f"{max(v['cost_per_rank']):.4f}",
        "slowest / mean": lambda v: f"{v['max_over_mean']:.4f}",
        "fastest rank (seconds)": lambda v: f"{min(v['cost_per_rank']):.4f}",
        "all ranks (seconds)": lambda v: f"{v['total_cost']:.4f}",
        "duplicated tokens": lambda v: f"{v['duplicated_tokens']:,}",
        "idle ranks": lambda v: f"{v['idle_ranks']:,}",
        "planning (seconds)": lambda v: f"{v['seconds']:.3f}",
    }
    if "slowest_group" in values:
        rows = {"slowest group (seconds)": lambda v: f"{v['slowest_group']:.4f}"} | rows
    for label, show in rows.items():
        table.add_row(label, *(show(method) for method in methods.values()))
    bound = f"no partition has a slowest rank below {values['least_slowest_cost']:.4f} seconds"
    table.caption = f"{bound}; seconds: {values['costs']}"
    table.caption_justify = "left"
    Console().print(table)


def main() -> None:
    arguments = parse_arguments()
    model, source = read_costs(arguments)
    rollouts = load_chosen_rollouts(arguments)
    values = compare(rollouts, arguments, model) | {"costs": source}
    name = f"{Path(arguments.file).name}, one sequence per {arguments.sample_granularity}"
    counts = f"{values['sequences']:,} sequences, {values['unique_tokens']:,} of {values['tokens']:,} tokens unique"
    print_table(values, f"{name}: {counts}, {arguments.data_parallel_size} ranks")
    if arguments.json:
        print_json(values)
