"""Predicts the seconds of a planned step, for comparison with the measured time."""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.simulation import simulate
from megatron_dta.planning.step.passes import PipelineShape, attention_pairs
from megatron_dta.planning.step.plan import StepPlan


def predicted_seconds(step: StepPlan, shape: PipelineShape) -> float:
    """Predicted seconds of forward and backward on one replica, recomputation included.

    Work after the last backward (gradient reduction, optimizer) is not included.
    """
    segments = step.segments
    costs = PipelineCosts.of_segments(
        shape.cost_model,
        segments.lengths,
        attention_pairs(segments),
        np.diff(step.segment_edges),
        shape.layers,
        ~step.training.kept,
    )
    if shape.num_stages == 1:
        return float(costs.work.sum())
    return float(simulate(step.training.schedule, segments.segment_parent, costs).makespan)
