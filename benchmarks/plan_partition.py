"""Divides the sequences of a rollout file over data-parallel ranks and reports how balanced the ranks are.

    python benchmarks/plan_partition.py FILE --data-parallel-size 8 [--sample-granularity turn] [--json]

FILE is a rollout file (.jsonl, .parquet or .npz). Costs are the seconds of a rank's forward and backward predicted by
the cost model (core/planning/costs/model.py); a shared prefix counts on each rank that computes it. Duplicated
tokens are the computed tokens beyond the unique ones. As in training, tokens after the last trained token of a sequence
are left out. Planning time includes the prefix tree.

With --expert-model-parallel-size E, each E ranks in a row share experts and wait for each other in every op. The
partition is then the one whose slowest group is predicted to be fastest, and "even ranks" is the one without that.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.table import Table

from common.planning.partition_bound import least_slowest
from common.planning.predicted_costs import add_cost_flags, read_costs
from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, partition_costs, trained_parts
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS
from megatron_dta.core.rollouts.load import load_chosen_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--data-parallel-size", type=int, metavar="N", required=True, help="number of ranks")
    add_sample_granularity(parser)
    parser.add_argument(
        "--expert-model-parallel-size", type=int, metavar="E", default=1, help="ranks that share experts"
    )
    parser.add_argument(
        "--tree-segment-tokens",
        type=int,
        metavar="N",
        default=DEFAULT_SEGMENT_TOKENS,
        help="maximum tokens of a segment, for --expert-model-parallel-size (default: %(default)s)",
    )
    counts = [flag[2:].replace("-", "_") for flag in add_cost_flags(parser)]
    parser.add_argument("--max-sequences", type=int, metavar="N", help="only the first N sequences")
    parser.add_argument("--max-length", type=int, metavar="N", help="only the first N tokens of each sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    sizes = ("data_parallel_size", "expert_model_parallel_size", "tree_segment_tokens")
    check_at_least(arguments, 1, *sizes, "max_sequences", "max_length", *counts)
    ranks, experts = arguments.data_parallel_size, arguments.expert_model_parallel_size
    if ranks % experts:
        raise InputError(f"--expert-model-parallel-size {experts} does not divide --data-parallel-size {ranks}")
    return arguments


def figures(partition: Partition, step: GroupStep | None, seconds: float) -> dict[str, object]:
    sequences = np.bincount(partition.rank_of_sequence, minlength=partition.num_ranks)
    group = {} if step is None else {"slowest_group": step.slowest(partition.rank_of_sequence)}
    return group | {
        "slowest_rank": float(partition.cost_per_rank.max()),
        "max_over_mean": partition.max_over_mean,
        "total_cost": partition.total_cost,
        "duplicated_tokens": partition.duplicated_tokens,
        "idle_ranks": int(np.count_nonzero(sequences == 0)),
        "seconds": seconds,
        "cost_per_rank": partition.cost_per_rank.tolist(),
        "tokens_per_rank": partition.tokens_per_rank.tolist(),
        "sequences_per_rank": sequences.tolist(),
    }


def compare(rollouts: list[Rollout], arguments: argparse.Namespace, model: CostModel) -> dict[str, object]:
    """Return the figures of the partition, and those of even ranks if ranks share experts."""
    ranks, experts = arguments.data_parallel_size, arguments.expert_model_parallel_size
    begin = time.perf_counter()
    sequences, masks = trained_parts(rollouts)
    tree = build_prefix_tree(sequences)
    costs = SequenceCosts.of(tree, model, masks)
    step = None
    if experts > 1:
        budget = StepBudget(arguments.tree_segment_tokens)
        step = GroupStep(sequences, masks, experts, budget, PipelineShape(cost_model=model))
    partition = partition_costs(costs, ranks, step and (lambda splits: [step.slowest(split) for split in splits]))
    result = figures(partition, step, time.perf_counter() - begin)
    result["least_slowest_cost"] = least_slowest(costs, ranks)
    result["sequences"], result["tokens"] = len(sequences), sum(map(len, sequences))
    result["unique_tokens"] = tree.num_tokens
    if step is not None:
        begin = time.perf_counter()
        even = partition_costs(costs, ranks)
        result["even_ranks"] = figures(even, step, time.perf_counter() - begin)
    return result


def print_table(values: dict[str, object], title: str) -> None:
    table = Table("figure", title=title, title_justify="left")
    methods = {"this planner": values} | ({"even ranks": values["even_ranks"]} if "even_ranks" in values else {})
    for name in methods:
        table.add_column(name, justify="right")
    labels = {
        "slowest_group": "slowest group (seconds)",
        "slowest_rank": "slowest rank (seconds)",
        "max_over_mean": "slowest / mean",
        "total_cost": "all ranks (seconds)",
        "duplicated_tokens": "duplicated tokens",
        "idle_ranks": "idle ranks",
        "seconds": "planning (seconds)",
    }
    for key, label in labels.items():
        if key in values:
            shown = [method[key] for method in methods.values()]
            table.add_row(label, *(f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in shown))
    bound = f"no partition has a slowest rank below {values['least_slowest_cost']:.4f} seconds"
    table.caption, table.caption_justify = f"{bound}; seconds: {values['costs']}", "left"
    Console().print(table)


def main() -> None:
    arguments = parse_arguments()
    model, source = read_costs(arguments)
    values = compare(load_chosen_rollouts(arguments), arguments, model) | {"costs": source}
    counts = f"{values['sequences']:,} sequences, {values['unique_tokens']:,} of {values['tokens']:,} tokens unique"
    print_table(values, f"{arguments.file}: {counts}, {arguments.data_parallel_size} ranks")
    if arguments.json:
        print_json(values)


if __name__ == "__main__":
    run_entry_point(main)
