"""Plans the segments of a rollout file as the microbatches of a pipeline and simulates the schedule.

    python tools/simulate_pipeline.py FILE --pipeline-model-parallel-size 4 [--json] [--plot t.png] [--trace t.json]

FILE is a rollout file (.jsonl, .parquet or .npz). Utilisation is computing time over the total time of all stages. The
ideal utilisation N / (N + P - 1) is that of N equal microbatches on P stages; the bound is an upper limit for any
schedule of these segments under this limit on in-flight tokens. A token is in flight on a stage from the forward to the
backward of its segment. Costs come from the cost model (megatron_dta/planning/costs/model.py): counted for Qwen3-32B on
H200 by default or for --model, or measured with --cost-model.

The first table shows the plan that training makes with these settings and costs, on equally many whole layers per stage
by default. The second table shows the result of a search that takes seconds, in which each stage has the same share of
the cost, with fractions of layers unless --layers-per-stage is given. Without --pipeline-segment-tokens, the search
takes the segment size with the shortest simulated step, with at most 1.5 times the in-flight tokens of one stage and at
least 0.95 of the ideal utilisation (--least-share-of-ideal). If launches are slow, larger segments can be faster at a
lower utilisation; the fastest size is shown too.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dta.capacity.predicted_costs import SHAPE, add_cost_flags, read_costs
from megatron_dta.capacity.simulated_training import print_training, training_figures
from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.segment_counts import segment_counts
from megatron_dta.planning.partition.divide import trained_parts
from megatron_dta.planning.pipeline.bounds import makespan_bound
from megatron_dta.planning.pipeline.choice import SIZES, PipelinePlan, choose_pipeline
from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.layers import balanced_shares, check_layers_per_stage, layers_per_stage
from megatron_dta.planning.pipeline.schedule import check_schedule, peak_in_flight, tree_1f1b
from megatron_dta.planning.pipeline.simulation import simulate
from megatron_dta.planning.pipeline.stage_balance import balance_layers, balance_shares
from megatron_dta.planning.pipeline.timeline import timeline_events, write_chrome_trace
from megatron_dta.planning.segments.plan import SegmentPlan
from megatron_dta.planning.segments.recompute import choose_kept_segments
from megatron_dta.planning.step.passes import PipelineShape
from megatron_dta.planning.step.sample import TrainingSample
from megatron_dta.rollouts import load_rollouts
from megatron_dta.tree import build_forest_without_sharing, build_prefix_tree

SEGMENT_TOKENS = 2048  # TreeConfig's default; importing it would import torch, which is slower than this command.
LEAST_SHARE = 0.95


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
        f"maximum tokens of a segment, on one stage (default: {SEGMENT_TOKENS}) and in the pipeline (default: chosen)",
    )
    number("--tree-memory-tokens", "limit on in-flight tokens when cutting segments (default: chosen by the planner)")
    number("--pipeline-segment-tokens", "maximum tokens of a segment in the pipeline (default: chosen)")
    number(
        "--pipeline-in-flight-tokens", "limit on in-flight tokens of a stage (default: 1.5 x those of a single stage)"
    )
    parser.add_argument(
        "--least-share-of-ideal",
        type=float,
        metavar="X",
        default=LEAST_SHARE,
        help="take the fastest segment size that reaches this share of N / (N + P - 1); 0 takes the fastest of all "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tree-activation-tokens",
        type=int,
        metavar="N",
        help="in-flight tokens whose activations are kept; others are recomputed (default: all are kept)",
    )
    parser.add_argument(
        "--split-backward", action="store_true", help="run gradients of inputs and of weights as separate ops"
    )
    parser.add_argument(
        "--layers-per-stage",
        metavar="LIST",
        help="whole layers: 'auto', or numbers such as 17,16,16,15 whose sum is --num-layers (default: equal costs)",
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
    if not 0 <= arguments.least_share_of_ideal <= 1:
        raise InputError(f"--least-share-of-ideal must be from 0 to 1, not {arguments.least_share_of_ideal}")
    return arguments


def layers_of(
    arguments: argparse.Namespace, model: CostModel, counts: Sequence[np.ndarray], recomputed: np.ndarray
) -> list[float]:
    """Return the layers (or shares) of each virtual stage that make ranks equally busy with segments of ``counts``."""
    stages, chunks = arguments.pipeline_model_parallel_size, arguments.num_virtual_stages_per_pipeline_rank
    tokens, pairs, edges = counts
    output = model.seconds_per_edge * float(edges.sum())
    layers_cost = float(sum(map(np.sum, model.segment_seconds(tokens, pairs, np.zeros_like(edges)))))

    def work(layers: Sequence[float]) -> np.ndarray:
        return PipelineCosts.of_segments(model, tokens, pairs, edges, layers, recomputed).work

    if arguments.layers_per_stage is None:
        return balance_shares(work, balanced_shares(stages, chunks, layers_cost, output_cost=output), stages)
    num_layers = arguments.num_layers or SHAPE["num_layers"]
    if arguments.layers_per_stage == "auto":
        counted = layers_per_stage(num_layers, stages * chunks, layers_cost / num_layers, 0.0, output, stages)
        return list(map(float, balance_layers(work, counted, stages)))
    try:
        given = [int(part) for part in arguments.layers_per_stage.split(",")]
    except ValueError:
        message = f"--layers-per-stage {arguments.layers_per_stage}: must be 'auto' or whole numbers between commas"
        raise InputError(message) from None
    return list(map(float, check_layers_per_stage(given, num_layers, stages * chunks, "--layers-per-stage")))


def sizes_of(arguments: argparse.Namespace) -> list[int]:
    """Return the segment sizes to try."""
    if arguments.pipeline_segment_tokens is not None:
        return [arguments.pipeline_segment_tokens]
    most = arguments.tree_segment_tokens
    if most is None:
        return list(SIZES)
    return sorted({most, *(most * part // 8 for part in (6, 4, 3, 2)), *(size for size in SIZES if size < most)} - {0})


def read_sequences(arguments: argparse.Namespace) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the trained part of the file's sequences, and their loss masks."""
    rollouts = load_rollouts(
        arguments.file,
        sample_granularity=arguments.sample_granularity,
        max_sequences=arguments.max_sequences,
        max_length=arguments.max_length,
    )
    return trained_parts(rollouts)


def plan_of_training(
    arguments: argparse.Namespace, model: CostModel, sequences: list[np.ndarray], masks: list[np.ndarray]
) -> dict[str, object]:
    """Return figures of training's plan with these settings; by default all stages have equally many layers."""
    stages, chunks = arguments.pipeline_model_parallel_size, arguments.num_virtual_stages_per_pipeline_rank
    num_layers = arguments.num_layers or SHAPE["num_layers"]
    layers = [float(num_layers // (stages * chunks))] * (stages * chunks)
    if arguments.layers_per_stage == "auto" or num_layers % (stages * chunks):
        # As --pipeline-model-parallel-layout auto: by the cost of a token, independent of the data.
        counted = model.seconds_per_token / num_layers, 0.0, model.seconds_per_edge
        layers = list(map(float, layers_per_stage(num_layers, stages * chunks, *counted, stages)))
    elif arguments.layers_per_stage is not None:
        layers = layers_of(arguments, model, (np.zeros(0),) * 3, np.zeros(0, dtype=bool))
    limit, is_measured = arguments.pipeline_in_flight_tokens, arguments.cost_model is not None
    return training_figures(
        [TrainingSample(*each) for each in zip(sequences, masks, strict=True)],
        PipelineShape(stages, chunks, tuple(layers), model, limit, is_measured=is_measured),
        arguments.tree_mode,
        arguments.tree_segment_tokens,
        arguments.tree_memory_tokens,
        arguments.tree_activation_tokens,
        arguments.send_seconds,
    )


def plan_file(
    arguments: argparse.Namespace, model: CostModel, sequences: list[np.ndarray], masks: list[np.ndarray]
) -> tuple[PipelinePlan, list[float], float]:
    """Return the plan found, the layers (or shares) of its virtual stages, and the seconds of the search."""
    begin = time.perf_counter()
    tree = (build_prefix_tree if arguments.tree_mode == "dta" else build_forest_without_sharing)(sequences)
    layers: list[float] = []

    def costs_of(plan: SegmentPlan) -> PipelineCosts:
        counts = segment_counts(plan, masks)
        recomputed = ~choose_kept_segments(
            plan, arguments.tree_activation_tokens, arguments.pipeline_model_parallel_size
        )
        layers[:] = layers_of(arguments, model, counts, recomputed)
        return PipelineCosts.of_segments(model, *counts, layers, recomputed)

    plan = choose_pipeline(
        tree,
        costs_of,
        arguments.pipeline_model_parallel_size,
        arguments.num_virtual_stages_per_pipeline_rank,
        arguments.tree_segment_tokens or SEGMENT_TOKENS,
        arguments.tree_memory_tokens,
        arguments.pipeline_in_flight_tokens,
        arguments.split_backward,
        arguments.send_seconds,
        sizes_of(arguments),
        arguments.least_share_of_ideal,
    )
    costs_of(plan.segments)  # Sets ``layers`` to those of the chosen plan.
    seconds = time.perf_counter() - begin
    check_schedule(plan.schedule, plan.segments.segment_parent)
    return plan, layers, seconds


def figures(
    plan: PipelinePlan, layers: list[float], seconds: float, arguments: argparse.Namespace
) -> dict[str, object]:
    """Return the figures of ``--json`` by key."""
    segments, schedule, costs = plan.segments, plan.schedule, plan.costs
    stages, parents = schedule.num_stages, segments.segment_parent
    on_ranks = PipelineCosts(
        *(np.stack([a[r::stages].sum(axis=0) for r in range(stages)]) for a in costs_arrays(costs))
    )
    static = tree_1f1b(parents, stages)
    bound = makespan_bound(
        parents, segments.lengths, costs, stages, schedule.num_chunks, plan.limit, arguments.split_backward
    )
    busy = plan.timeline.busy
    return {
        "segments": segments.num_segments,
        "utilisation": plan.timeline.utilisation,
        "ideal_utilisation": plan.ideal_utilisation,
        "bound_utilisation": sum(busy) / (stages * bound) if bound else 1.0,
        "static_utilisation": simulate(static, parents, on_ranks, arguments.send_seconds).utilisation,
        "peak_in_flight_tokens": [math.ceil(peak) for peak in peak_in_flight(schedule, segments.lengths)],
        "static_peak_in_flight_tokens": [int(peak) for peak in peak_in_flight(static, segments.lengths)],
        "one_stage_in_flight_tokens": plan.one_stage_tokens,
        "depth_first_in_flight_tokens": segments.peak_in_flight_tokens,
        "in_flight_limit": plan.limit,
        "makespan": plan.timeline.makespan,
        "fastest": of_fastest(plan.fastest or plan),
        "busy_per_stage": busy,
        "segment_tokens": segments.segment_tokens,
        "fill": float(segments.fill),
        "segment_depth": segments.depth,
        "unique_tokens": segments.tree.num_tokens,
        "layers_per_stage": layers,
        "num_stages": stages,
        "num_chunks": schedule.num_chunks,
        "digest": schedule.digest(),
        "seconds": seconds,
    }


def of_fastest(plan: PipelinePlan) -> dict[str, float]:
    """Return figures of the plan with the shortest step."""
    return {
        "makespan": plan.timeline.makespan,
        "segments": plan.segments.num_segments,
        "segment_tokens": plan.segments.segment_tokens,
        "utilisation": plan.timeline.utilisation,
        "ideal_utilisation": plan.ideal_utilisation,
    }


def costs_arrays(costs: PipelineCosts) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(costs.forward), np.asarray(costs.backward)


def print_table(values: dict, title: str) -> None:
    table = Table(title=escape(title), title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    peak, alone = max(values["peak_in_flight_tokens"]), values["one_stage_in_flight_tokens"]
    share, fastest = values["utilisation"] / values["ideal_utilisation"], values["fastest"]
    of_fastest = fastest["utilisation"] / fastest["ideal_utilisation"]
    fastest_size = f"{fastest['segment_tokens']:,} tokens: {fastest['makespan']:,.4g}, {of_fastest:.1%} of the ideal"
    rows = {
        "segments": f"{values['segments']:,} of at most {values['segment_tokens']:,} tokens, {values['fill']:.0%} full",
        "makespan (seconds)": f"{values['makespan']:,.4g}",
        "fastest size": fastest_size,
        "utilisation": f"{values['utilisation']:.4f} ({share:.1%} of the ideal)",
        "ideal N / (N + P - 1)": f"{values['ideal_utilisation']:.4f}",
        "no schedule has more than": f"{values['bound_utilisation']:.4f}",
        "static 1F1B": f"{values['static_utilisation']:.4f}",
        "peak in-flight tokens": f"{peak:,} ({peak / max(1, alone):.2f} x one stage's {alone:,})",
        "of static 1F1B": f"{max(values['static_peak_in_flight_tokens']):,}",
        "planning (seconds)": f"{values['seconds']:.3f}",
        "digest": values["digest"][:16],
    }
    for label, value in rows.items():
        table.add_row(label, value)
    stages = Table(title="stages", title_justify="left")
    for column in ("stage", "layers", "busy", "peak in-flight tokens"):
        stages.add_column(column, justify="right", no_wrap=True)
    whole = sum(values["layers_per_stage"]) > 1.5
    for stage, tokens in enumerate(values["peak_in_flight_tokens"]):
        own = values["layers_per_stage"][stage :: values["num_stages"]]
        shown = " + ".join(f"{each:.0f}" if whole else f"{each:.1%}" for each in own)
        busy = values["busy_per_stage"][stage] / values["makespan"] if values["makespan"] else 1.0
        stages.add_row(str(stage), shown, f"{busy:.1%}", f"{tokens:,}")
    console = Console()
    console.print(table)
    console.print(stages)


def main() -> None:
    arguments = parse_arguments()
    (model, source), step = read_costs(arguments), read_sequences(arguments)
    training = plan_of_training(arguments, model, *step)
    plan, layers, seconds = plan_file(arguments, model, *step)
    values = figures(plan, layers, seconds, arguments) | {"training": training, "costs": source}
    title = (
        f"{Path(arguments.file).name}, one sequence per {arguments.sample_granularity}, {values['num_stages']} stages"
    )
    print_training(training, title)
    print_table(values, "what a search finds, on stages of equal cost")
    print(f"seconds: {source}")
    events = timeline_events(plan.schedule, plan.timeline)
    if arguments.plot:
        from megatron_dta.plots import plot_timelines  # matplotlib takes a second to import.

        plot_timelines([("simulated", events)], arguments.plot, values["num_stages"], title)
        print(f"picture: {arguments.plot}")
    if arguments.trace:
        write_chrome_trace(arguments.trace, events, title)
        print(f"trace: {arguments.trace}")
    if arguments.json:
        print_json(values)
