"""Figures of the plan that training makes of a step, for ``simulate_pipeline.py``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.schedule import peak_in_flight
from megatron_dta.planning.pipeline.segments import ideal_utilisation
from megatron_dta.planning.pipeline.simulation import simulate
from megatron_dta.planning.step.passes import PipelineShape, attention_pairs
from megatron_dta.planning.step.plan import plan_step
from megatron_dta.planning.step.sample import TrainingSample


def training_figures(
    samples: Sequence[TrainingSample],
    shape: PipelineShape,
    tree_mode: str,
    segment_tokens: int | None,
    memory_tokens: int | None,
    activation_tokens: int | None,
    send_seconds: float,
) -> dict[str, object]:
    """Plan a step with ``plan_step`` and return its figures by their keys of ``--json``."""
    begin = time.perf_counter()
    step = plan_step(samples, tree_mode, segment_tokens, memory_tokens, activation_tokens, shape)
    seconds = time.perf_counter() - begin
    segments, schedule = step.segments, step.training.schedule
    counts = segments.lengths, attention_pairs(segments), np.diff(step.segment_edges)
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers, ~step.training.kept)
    timeline = simulate(schedule, segments.segment_parent, costs, send_seconds)
    ideal = ideal_utilisation(segments.num_segments, shape.num_stages)
    work = costs.work.reshape(shape.num_chunks, shape.num_stages).sum(axis=0)
    return {
        "segments": segments.num_segments,
        "segment_tokens": segments.segment_tokens,
        "makespan": timeline.makespan,
        "utilisation": timeline.utilisation,
        "ideal_utilisation": ideal,
        "share_of_ideal": timeline.utilisation / ideal,
        "busiest_over_mean": float(work.max() / work.mean()) if work.any() else 1.0,
        "peak_in_flight_tokens": [math.ceil(peak) for peak in peak_in_flight(schedule, segments.lengths)],
        "depth_first_in_flight_tokens": segments.peak_in_flight_tokens,
        "layers_per_stage": list(shape.layers),
        "seconds": seconds,
    }


def print_training(values: dict, title: str) -> None:
    """Print ``training_figures`` as a table."""
    peak, alone = max(values["peak_in_flight_tokens"]), values["depth_first_in_flight_tokens"]
    rows = {
        "segments": f"{values['segments']:,} of at most {values['segment_tokens']:,} tokens",
        "layers of each stage": " ".join(f"{layers:g}" for layers in values["layers_per_stage"]),
        "makespan (seconds)": f"{values['makespan']:,.4g}",
        "utilisation": f"{values['utilisation']:.4f} ({values['share_of_ideal']:.1%} of N / (N + P - 1))",
        "busiest stage / mean": f"{values['busiest_over_mean']:.4f}",
        "peak in-flight tokens": f"{peak:,} ({peak / max(1, alone):.2f} x {alone:,}, depth first on one stage)",
        "planning (seconds)": f"{values['seconds']:.3f}",
    }
    table = Table(title=escape(f"{title}: what training runs"), title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    for label, value in rows.items():
        table.add_row(label, value)
    Console().print(table)
