"""Reports how much prefix sharing saves in a rollout file, and how its tree is cut into segments.

    megatron-dta inspect-tree FILE [--sample-granularity turn] [--json] [--plot tree.png]

FILE is a rollout file (.jsonl, .parquet or .npz). Token reuse is the number of tokens of all sequences over that of
unique tokens; attention reuse is the same ratio of (query, key) pairs of causal attention. Fill is the mean length of a
segment over the maximum. In-flight tokens are those of a segment and all its ancestors, which a training step holds in
memory together. Open forks are ends of runs in them that later segments continue: each is a state of every layer with
a recurrence, with its gradient. --model or --hf-config adds the size of both in GiB: of the states, and of what a step
keeps of in-flight tokens, keys and values or latents, with their gradients.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

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
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.costs.state_bytes import StateBytes
from megatron_dta.core.planning.segments.plan import SegmentPlan, plan_segments
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.rollouts.load import load_chosen_rollouts
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.tree import TreeStatistics, build_prefix_tree, tree_statistics
from megatron_dta.families.named_shapes import SHAPES

SEGMENT_TOKENS = 2048  # TreeConfig's default; importing it would import torch, which is slower than this command.


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    add_sample_granularity(parser)
    parser.add_argument(
        "--tree-segment-tokens",
        type=int,
        metavar="N",
        default=SEGMENT_TOKENS,
        help="maximum tokens of a segment (default: %(default)s)",
    )
    parser.add_argument(
        "--tree-memory-tokens",
        type=int,
        metavar="N",
        help="limit on in-flight tokens (default: the larger of 1.5 x the longest sequence and 8 segments)",
    )
    parser.add_argument("--max-sequences", type=int, metavar="N", help="only the first N sequences")
    parser.add_argument("--max-length", type=int, metavar="N", help="only the first N tokens of each sequence")
    parser.add_argument("--hf-config", metavar="DIR", help="count the bytes of this model (its config.json)")
    parser.add_argument("--model", choices=sorted(SHAPES), help="count the bytes of this model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--plot", metavar="PICTURE", help="draw the tree and its segments (.png, .pdf or .svg)")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "tree_segment_tokens", "tree_memory_tokens", "max_sequences", "max_length")
    check_picture(arguments.plot, "--plot")
    if arguments.model and arguments.hf_config:
        raise InputError("--hf-config and --model: give one model")
    return arguments


def read_shape(arguments: argparse.Namespace) -> DecoderShape | None:
    """Return the shape of the model that the flags name; None without a model."""
    if arguments.model is not None:
        return SHAPES[arguments.model]
    if arguments.hf_config is None:
        return None
    from megatron_dta.extras.capacity.settings import read_hf_config  # Importing torch takes seconds.

    return read_hf_config(arguments.hf_config)


def state_figures(plan: SegmentPlan, shape: DecoderShape | None) -> dict[str, int | float]:
    """Return the figures about states at forks; with ``shape``, also the bytes that a step in bfloat16 keeps."""
    runs = SegmentRuns.of(plan)
    most = int(runs.forks_in_flight.max(initial=0))
    values: dict[str, int | float] = {"peak_open_forks": most, "run_levels": int(runs.num_levels.max(initial=0))}
    if shape is None:
        return values
    slot = shape.num_attention_layers * shape.slot_width(1) * (2 + 4)
    values["peak_kv_gib"] = int(plan.peak_in_flight_tokens) * slot / GIB
    states = StateBytes.of_shape(shape, element_bytes=2)
    if states is not None:
        values["peak_state_gib"] = states.open_fork * most / GIB
    return values


def figures(statistics: TreeStatistics, plan: SegmentPlan, build_seconds: float) -> dict[str, int | float]:
    """Return the figures of ``--json`` by key."""
    return {
        **asdict(statistics),
        "segments": plan.num_segments,
        "fill": float(plan.fill),
        "segment_depth": int(plan.depth),
        "peak_in_flight_tokens": int(plan.peak_in_flight_tokens),
        "build_seconds": build_seconds,
    }


LABELS = {
    "sequences": "sequences",
    "tokens": "tokens of all sequences",
    "unique_tokens": "unique tokens",
    "token_reuse": "token reuse",
    "attention_reuse": "attention reuse",
    "trees": "trees (roots)",
    "nodes": "nodes",
    "leaves": "leaves",
    "depth": "depth (nodes)",
    "branching": "branching (mean)",
    "max_branching": "branching (most)",
    "longest_sequence": "longest sequence (tokens)",
    "segments": "segments",
    "fill": "fill",
    "segment_depth": "depth (segments)",
    "peak_in_flight_tokens": "peak in-flight tokens",
    "peak_open_forks": "peak open forks",
    "run_levels": "levels of a segment (most)",
    "peak_kv_gib": "keys and values, or latents (GiB, bfloat16 model)",
    "peak_state_gib": "states at forks (GiB, bfloat16 model)",
    "build_seconds": "tree build (seconds)",
}


def print_table(values: dict[str, int | float], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for key, value in values.items():
        if key in ("token_reuse", "attention_reuse", "branching"):
            shown = f"{value:.2f}" + (" x" if key.endswith("reuse") else "")
        elif isinstance(value, float):
            shown = f"{value:.3f}"
        else:
            shown = f"{value:,}"
        table.add_row(LABELS[key], shown, end_section=key in ("attention_reuse", "longest_sequence"))
    Console().print(table)


def main() -> None:
    arguments = parse_arguments()
    rollouts = load_chosen_rollouts(arguments)
    sequences = [rollout.token_ids for rollout in rollouts]
    begin = time.perf_counter()
    tree = build_prefix_tree(sequences)
    _ = tree.parent, tree.position, tree.subtree_end  # Computed on first use, so part of the build time.
    build_seconds = time.perf_counter() - begin
    plan = plan_segments(tree, arguments.tree_segment_tokens, arguments.tree_memory_tokens)
    title = f"{Path(arguments.file).name}, one sequence per {arguments.sample_granularity}"
    values = figures(tree_statistics(tree), plan, build_seconds)
    values |= state_figures(plan, read_shape(arguments))
    print_table(values, title)
    if arguments.plot:
        from megatron_dta.extras.report.plots.figures import write_figure  # matplotlib takes a second to import.
        from megatron_dta.extras.report.plots.tree import tree_figure

        write_figure(tree_figure(plan, title), arguments.plot)
        print(f"picture: {arguments.plot}")
    if arguments.json:
        print_json(values)
