"""Predicted seconds of a planned step, to stand beside the measured ones."""

from __future__ import annotations

import numpy as np

from megatron_dta.planning.pipeline.costs import PipelineCosts
from megatron_dta.planning.pipeline.simulation import simulate
from megatron_dta.planning.step.passes import PipelineShape, attention_pairs
from megatron_dta.planning.step.plan import StepPlan


def predicted_seconds(step: StepPlan, shape: PipelineShape) -> float:
    """Seconds of forward and backward on one replica by ``shape``'s cost model, second forwards with them.

    Not in it: what follows the last backward (reducing gradients, the optimizer).
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
