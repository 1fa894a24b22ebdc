"""Plans the pipeline of a training step over a rollout file, as training does, and simulates it without a GPU.

    python benchmarks/simulate_pipeline.py FILE --pipeline-model-parallel-size 4 [--layers auto] [--json]

Utilisation is computing time over the total time of all stages. The ideal utilisation N / (N + P - 1) is that of N
equal microbatches on P stages; the bound is an upper limit for any schedule of these segments under this limit on
in-flight tokens. Costs come from the cost model: counted for Qwen3-32B on an H200, or for --model.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from rich.table import Table

from common.planning.predicted_costs import SHAPE, add_cost_flags, read_costs
from common.planning.schedule_check import check_schedule
from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.pipeline.bounds import makespan_bound
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.layers import layers_per_stage
from megatron_dta.core.planning.pipeline.planner import in_flight_limits
from megatron_dta.core.planning.pipeline.schedule import peak_in_flight, tree_1f1b
from megatron_dta.core.planning.pipeline.segments import ideal_utilisation
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_chosen_rollouts


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--pipeline-model-parallel-size", type=int, metavar="P", required=True, help="number of stages")
    parser.add_argument("--layers", choices=("equal", "auto"), default="equal", help="how layers are divided")
    add_sample_granularity(parser)
    counts = ["--pipeline-model-parallel-size", *add_cost_flags(parser)]
    for flag in ("--max-sequences", "--max-length", "--tree-segment-tokens"):
        counts.append(flag)
        parser.add_argument(flag, type=int, metavar="N", help="limit (default: none, or chosen by the planner)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, *(flag[2:].replace("-", "_") for flag in counts))
    return arguments


def figures(step: StepPlan, shape: PipelineShape) -> dict[str, Any]:
    """Simulate the planned training pass."""
    segments, schedule, stages = step.segments, step.training.schedule, shape.num_stages
    parents, lengths = segments.segment_parent, segments.lengths
    counts = lengths, segments.attention_pairs, np.diff(step.segment_edges)
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers, ~step.training.kept)
    timeline, static = simulate(schedule, parents, costs, 0.0), tree_1f1b(parents, stages)
    limit = max(in_flight_limits(parents, lengths, stages, shape.max_in_flight_tokens))
    bound = makespan_bound(parents, lengths, costs, stages, shape.num_model_chunks, limit)
    ideal, busy = ideal_utilisation(segments.num_segments, stages), np.asarray(timeline.busy)
    return {
        "layers_per_stage": list(shape.layers),
        "segments": segments.num_segments,
        "segment_tokens": segments.segment_tokens,
        "makespan": timeline.makespan,
        "utilisation": timeline.utilisation,
        "ideal_utilisation": ideal,
        "share_of_ideal": timeline.utilisation / ideal,
        "bound_utilisation": float(busy.sum()) / (stages * bound) if bound else 1.0,
        "static_utilisation": simulate(static, parents, costs, 0.0).utilisation,
        "busiest_over_mean": float(busy.max() / busy.mean()) if busy.any() else 1.0,
        "depth_first_in_flight_tokens": segments.peak_in_flight_tokens,
        "in_flight_limit": limit,
        "peak_in_flight_tokens": max(math.ceil(peak) for peak in peak_in_flight(schedule, lengths)),
    }


def main() -> None:
    arguments = parse_arguments()
    (model, source), stages = read_costs(arguments), arguments.pipeline_model_parallel_size
    num_layers = arguments.num_layers or SHAPE["num_layers"]
    layers = [num_layers // stages] * stages
    if arguments.layers == "auto" or num_layers % stages:
        # As --pipeline-model-parallel-layout auto: by the cost of a token, independent of the data.
        layer_seconds = model.seconds_per_token / num_layers
        layers = layers_per_stage(num_layers, stages, layer_seconds, model.seconds_per_edge, stages)
    samples = [TrainingSample(*parts) for parts in zip(*trained_parts(load_chosen_rollouts(arguments)), strict=True)]
    shape = PipelineShape(stages, 1, tuple(layers), model)
    step = plan_step(samples, "dta", StepBudget(arguments.tree_segment_tokens), shape)
    check_schedule(step.training.schedule, step.segments.segment_parent)
    values = figures(step, shape)
    table = Table(title=f"{stages} stages, seconds of {source}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.json:
        print_json(values)


if __name__ == "__main__":
    run_entry_point(main)
