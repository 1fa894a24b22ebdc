"""Corrects a cost model by the measured ops of a step.

Measured ops of a step are too similar to fit every coefficient. Two factors for the forward and two for the backward
are fitted instead: one for the work (tokens, pairs and edges) and one for the floor, the time of the launches.

Example: a forward of work 4 ms and floor 1 ms took 5 ms, one of work 0.2 ms took 1.5 ms. The first is far above its
floor, so the factor of the work is 5 / 4 = 1.25. The second is far below it, so the factor of the floor is 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel

if TYPE_CHECKING:
    from megatron_dta.core.planning.pipeline.timeline import TimelineEvent

# An op counts for the factor of the work, or of the floor, if that part is at least this many times the other.
_CLEARLY = 1.5
# Fewest ops that decide a factor, and the largest factor; a single outlier must not change the plans.
_LEAST_OPS, _MOST = 3, 4.0


@dataclass(frozen=True)
class CostCorrection:
    """Factors on the predicted seconds of a forward and of a backward."""

    forward_work: float = 1.0
    forward_floor: float = 1.0
    backward_work: float = 1.0
    backward_floor: float = 1.0

    def apply(self, model: CostModel) -> CostModel:
        work, floor = (self.forward_work, self.backward_work), (self.forward_floor, self.backward_floor)
        parts = [
            (model.seconds_per_token, model.forward_token_share, work),
            (model.seconds_per_pair, model.forward_pair_share, work),
            (model.seconds_per_edge, model.forward_edge_share, work),
            (model.floor_seconds, model.forward_floor_share, floor),
        ]
        passes = [
            (seconds * share * factors[0], seconds * (1 - share) * factors[1]) for seconds, share, factors in parts
        ]
        return CostModel.of_passes(*passes, model.segment_tokens)

    @classmethod
    def mean(cls, corrections: Sequence[CostCorrection]) -> CostCorrection:
        """The geometric mean of the factors that several ranks found."""
        logs = np.log([[getattr(correction, field.name) for field in fields(cls)] for correction in corrections])
        return cls(*np.exp(logs.mean(axis=0)).tolist())


@dataclass(frozen=True)
class MeasuredPass:
    """A measured training pass. N segments, V virtual stages.

    Attributes:
        counts: tokens, attention pairs and trained edges of each segment, int64 [N] each.
        layers: number of layers of each virtual stage.
        num_stages: pipeline ranks.
        kept: bool [V, N], segments that keep their activations; the backward of others includes a forward.
        events: the measured ops.
    """

    counts: tuple[np.ndarray, np.ndarray, np.ndarray]
    layers: Sequence[int]
    num_stages: int
    kept: np.ndarray
    events: Sequence[TimelineEvent]


def fit_correction(model: CostModel, measured: MeasuredPass) -> CostCorrection:
    """The factors on ``model`` by which it predicts the measured ops; 1 where too few ops count for one."""
    from megatron_dta.core.planning.pipeline.costs import PipelineCosts

    work = PipelineCosts.of_segments(replace(model, floor_seconds=0.0), *measured.counts, measured.layers)
    share = np.asarray(measured.layers, dtype=np.float64) / max(1, sum(measured.layers))
    factors = []
    for kind, seconds, floor in (("F", work.forward, model.floors[0]), ("B", work.backward, model.floors[1])):
        rows = []
        for event in measured.events:
            stage = event.chunk * measured.num_stages + event.stage
            is_plain = kind == "F" or measured.kept[stage, event.segment]
            if event.kind == kind and is_plain and measured.counts[0][event.segment]:
                rows.append((event.end - event.start, seconds[stage, event.segment], share[stage] * floor))
        factors += _factors(np.array(rows, dtype=np.float64).reshape(-1, 3))
    return CostCorrection(*factors)


def _factors(rows: np.ndarray) -> tuple[float, float]:
    """Factors of work and floor for rows of measured seconds, predicted work and predicted floor."""
    took, work, floor = rows.T
    working = work >= _CLEARLY * floor
    factor = _factor(took[working], work[working])
    launching = floor >= _CLEARLY * factor * work
    return factor, _factor(took[launching], floor[launching])


def _factor(took: np.ndarray, predicted: np.ndarray) -> float:
    if len(took) < _LEAST_OPS or not predicted.sum():
        return 1.0
    # Weighted by time: long ops matter, and a single op that something held up does not.
    ratio = took / predicted
    order = np.argsort(ratio)
    heavy = np.cumsum(predicted[order])
    median = ratio[order][np.searchsorted(heavy, heavy[-1] / 2)]
    return float(np.clip(median, 1 / _MOST, _MOST))
