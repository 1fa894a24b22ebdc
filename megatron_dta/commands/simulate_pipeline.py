"""Plans the pipeline of a training step over a rollout file, as training does, and simulates it without a GPU.

    megatron-dta simulate-pipeline FILE --pipeline-model-parallel-size 4 [--json] [--plot t.png] [--trace t.json]

FILE is a rollout file (.jsonl, .parquet or .npz). Utilisation is computing time over the total time of all stages. The
ideal utilisation N / (N + P - 1) is that of N equal microbatches on P stages; the bound is an upper limit for any
schedule of these segments under this limit on in-flight tokens. A token is in flight on a stage from the forward to the
backward of its segment. Costs come from the cost model (core/planning/costs/model.py): counted for Qwen3-32B on
H200 by default, or for --model.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
from rich.table import Table

from megatron_dta.common.command_line import (
    CommandLineParser,
    add_sample_granularity,
    check_at_least,
    check_picture,
    print_json,
)
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.pipeline.bounds import makespan_bound
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.layers import check_layers_per_stage, layers_per_stage
from megatron_dta.core.planning.pipeline.planner import in_flight_limits
from megatron_dta.core.planning.pipeline.schedule import check_schedule, peak_in_flight, tree_1f1b
from megatron_dta.core.planning.pipeline.segments import ideal_utilisation
from megatron_dta.core.planning.pipeline.simulation import Timeline, simulate
from megatron_dta.core.planning.pipeline.timeline import timeline_events, write_timelines
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget, attention_pairs
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_chosen_rollouts
from megatron_dta.extras.capacity.predicted_costs import SHAPE, add_cost_flags, read_costs


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    counts = ["--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"]
    parser.add_argument(counts[0], type=int, metavar="P", required=True, help="number of stages")
    parser.add_argument(counts[1], type=int, metavar="N", default=1, help="model chunks per stage (default: 1)")
    add_sample_granularity(parser)
    parser.add_argument(
        "--tree-mode",
        choices=("dta", "dense"),
        default="dta",
        help="compute shared prefixes once, or each sequence alone",
    )

    def number(flag: str, text: str, default: int | None = None) -> None:
        counts.append(flag)
        parser.add_argument(flag, type=int, metavar="N", default=default, help=text)

    number(
        "--tree-segment-tokens",
        "maximum tokens of a segment; a pipeline may get smaller ones (default: chosen by the planner)",
    )
    number("--tree-memory-tokens", "limit on in-flight tokens when cutting segments (default: chosen by the planner)")
    number(
        "--pipeline-in-flight-tokens", "limit on in-flight tokens of a stage (default: 1.5 x those of a single stage)"
    )
    parser.add_argument(
        "--tree-activation-tokens",
        type=int,
        metavar="N",
        help="in-flight tokens whose activations are kept; others are recomputed (default: all are kept)",
    )
    parser.add_argument(
        "--layers-per-stage",
        metavar="LIST",
        help="'auto' to balance predicted costs, or numbers such as 17,16,16,15 whose sum is --num-layers (default: "
        "equal numbers, or 'auto' if that is not possible)",
    )
    parser.add_argument(
        "--send-seconds", type=float, metavar="S", default=0.0, help="time of a message between stages (default: 0)"
    )
    counts += add_cost_flags(parser)
    number("--max-sequences", "only the first N sequences")
    number("--max-length", "only the first N tokens of each sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--plot", metavar="PICTURE", help="draw the timeline (.png, .pdf or .svg)")
    parser.add_argument("--trace", metavar="JSON", help="write the timeline for chrome://tracing or Perfetto")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, *(flag[2:].replace("-", "_") for flag in counts))
    check_at_least(arguments, 0, "tree_activation_tokens", "send_seconds")
    check_picture(arguments.plot, "--plot")
    return arguments


def layers_of(arguments: argparse.Namespace, model: CostModel) -> list[int]:
    """Return the layers of each virtual stage."""
    stages = arguments.pipeline_model_parallel_size
    virtual = stages * arguments.num_virtual_stages_per_pipeline_rank
    num_layers = arguments.num_layers or SHAPE["num_layers"]
    if arguments.layers_per_stage is None and num_layers % virtual == 0:
        return [num_layers // virtual] * virtual
    if arguments.layers_per_stage in (None, "auto"):
        # As --pipeline-model-parallel-layout auto: by the cost of a token, independent of the data.
        layer, output = model.seconds_per_token / num_layers, model.seconds_per_edge
        return layers_per_stage(num_layers, virtual, layer, output, stages)
    try:
        layers = [int(part) for part in arguments.layers_per_stage.split(",")]
    except ValueError:
        message = f"--layers-per-stage {arguments.layers_per_stage}: must be 'auto' or whole numbers between commas"
        raise InputError(message) from None
    return check_layers_per_stage(layers, num_layers, virtual, "--layers-per-stage")


def read_samples(arguments: argparse.Namespace) -> list[TrainingSample]:
    """Return the trained part of the file's sequences."""
    rollouts = load_chosen_rollouts(arguments)
    return [TrainingSample(*parts) for parts in zip(*trained_parts(rollouts), strict=True)]


def figures(step: StepPlan, shape: PipelineShape, send_seconds: float) -> tuple[dict[str, object], Timeline]:
    """Simulate the planned training pass; return the figures of ``--json`` by key, and the timeline."""
    segments, schedule, stages = step.segments, step.training.schedule, shape.num_stages
    parents, lengths = segments.segment_parent, segments.lengths
    counts = lengths, attention_pairs(segments), np.diff(step.segment_edges)
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers, ~step.training.kept)
    timeline = simulate(schedule, parents, costs, send_seconds)
    on_ranks = PipelineCosts(
        *(
            seconds.reshape(shape.num_model_chunks, stages, -1).sum(axis=0)
            for seconds in (costs.forward, costs.backward)
        )
    )
    static = tree_1f1b(parents, stages)
    limit = max(in_flight_limits(parents, lengths, stages, shape.max_in_flight_tokens))
    bound = makespan_bound(parents, lengths, costs, stages, shape.num_model_chunks, limit)
    ideal, busy = ideal_utilisation(segments.num_segments, stages), np.asarray(timeline.busy)
    values = {
        "segments": segments.num_segments,
        "segment_tokens": segments.segment_tokens,
        "fill": float(segments.fill),
        "segment_depth": segments.depth,
        "unique_tokens": segments.tree.num_tokens,
        "makespan": timeline.makespan,
        "utilisation": timeline.utilisation,
        "ideal_utilisation": ideal,
        "share_of_ideal": timeline.utilisation / ideal,
        "bound_utilisation": float(busy.sum()) / (stages * bound) if bound else 1.0,
        "static_utilisation": simulate(static, parents, on_ranks, send_seconds).utilisation,
        "busy_per_stage": busy.tolist(),
        "busiest_over_mean": float(busy.max() / busy.mean()) if busy.any() else 1.0,
        "peak_in_flight_tokens": [math.ceil(peak) for peak in peak_in_flight(schedule, lengths)],
        "static_peak_in_flight_tokens": [int(peak) for peak in peak_in_flight(static, lengths)],
        "depth_first_in_flight_tokens": segments.peak_in_flight_tokens,
        "in_flight_limit": limit,
        "layers_per_stage": list(shape.layers),
        "num_stages": stages,
        "num_model_chunks": shape.num_model_chunks,
        "digest": schedule.digest(),
    }
    return values, timeline


def print_table(values: dict, title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    peak, alone = max(values["peak_in_flight_tokens"]), values["depth_first_in_flight_tokens"]
    rows = {
        "segments": f"{values['segments']:,} of at most {values['segment_tokens']:,} tokens, {values['fill']:.0%} full",
        "makespan (seconds)": f"{values['makespan']:,.4g}",
        "utilisation": f"{values['utilisation']:.4f} ({values['share_of_ideal']:.1%} of the ideal)",
        "ideal N / (N + P - 1)": f"{values['ideal_utilisation']:.4f}",
        "upper bound of any schedule": f"{values['bound_utilisation']:.4f}",
        "static 1F1B": f"{values['static_utilisation']:.4f}",
        "busiest stage / mean": f"{values['busiest_over_mean']:.4f}",
        "peak in-flight tokens": f"{peak:,} ({peak / max(1, alone):.2f} x {alone:,} on one stage)",
        "of static 1F1B": f"{max(values['static_peak_in_flight_tokens']):,}",
        "planning (seconds)": f"{values['seconds']:.3f}",
        "digest": values["digest"][:16],
    }
    for label, value in rows.items():
        table.add_row(label, value)
    stages = Table(title="stages", title_justify="left")
    for column in ("stage", "layers", "busy", "peak in-flight tokens"):
        stages.add_column(column, justify="right", no_wrap=True)
    for stage, tokens in enumerate(values["peak_in_flight_tokens"]):
        layers = " + ".join(map(str, values["layers_per_stage"][stage :: values["num_stages"]]))
        busy = values["busy_per_stage"][stage] / values["makespan"] if values["makespan"] else 1.0
        stages.add_row(str(stage), layers, f"{busy:.1%}", f"{tokens:,}")
    console = Console()
    console.print(table)
    console.print(stages)


def main() -> None:
    arguments = parse_arguments()
    (model, source), samples = read_costs(arguments), read_samples(arguments)
    shape = PipelineShape(
        arguments.pipeline_model_parallel_size,
        arguments.num_virtual_stages_per_pipeline_rank,
        tuple(layers_of(arguments, model)),
        model,
        arguments.pipeline_in_flight_tokens,
    )
    begin = time.perf_counter()
    budget = StepBudget(arguments.tree_segment_tokens, arguments.tree_memory_tokens, arguments.tree_activation_tokens)
    step = plan_step(samples, arguments.tree_mode, budget, shape)
    seconds = time.perf_counter() - begin
    check_schedule(step.training.schedule, step.segments.segment_parent)
    values, timeline = figures(step, shape, arguments.send_seconds)
    values |= {"seconds": seconds, "costs": source}
    title = f"{Path(arguments.file).name}, one sequence per {arguments.sample_granularity}, {shape.num_stages} stages"
    print_table(values, title)
    print(f"seconds: {source}")
    events = timeline_events(step.training.schedule, timeline)
    if arguments.plot:
        from megatron_dta.extras.report.plots.figures import write_figure  # matplotlib takes a second to import.
        from megatron_dta.extras.report.plots.timeline import timeline_figure

        write_figure(timeline_figure({"simulated": events}, shape.num_stages, title), arguments.plot)
        print(f"picture: {arguments.plot}")
    if arguments.trace:
        write_timelines(arguments.trace, {title: events})
        print(f"trace: {arguments.trace}")
    if arguments.json:
        print_json(values)
