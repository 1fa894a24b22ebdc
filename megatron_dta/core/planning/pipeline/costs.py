"""Times of segments on each part of the model: the input of the pipeline's planner and simulation.

A virtual stage holds a share of the layers, and the last one computes logits and the loss. Times come from the counts
and coefficients of the cost model that also divides work over data-parallel ranks (``planning.costs.model``), segment
by segment:

    layers' share * (a * tokens + b * pairs)    on every virtual stage
    c * edges                                   on the last one

The time is at least the layers' share of the floor, and is split into forward and backward by the cost model's shares.
A segment whose activations are recomputed runs its forward again in its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel


@dataclass(frozen=True)
class PipelineCosts:
    """Times of all ops in an arbitrary unit. V virtual stages, N segments.

    Attributes:
        forward: float64 [V, N].
        backward: float64 [V, N].
    """

    forward: np.ndarray
    backward: np.ndarray

    def __post_init__(self) -> None:
        shape = np.shape(self.forward)
        if len(shape) != 2 or np.shape(self.backward) != shape:
            raise ValueError("forward and backward must be arrays of one shape [virtual stages, segments]")
        for values in (self.forward, self.backward):
            if not (np.isfinite(values).all() and (np.asarray(values) >= 0).all()):
                raise ValueError("forward and backward must be finite and not negative")

    @property
    def work(self) -> np.ndarray:
        """Time of the forwards and backwards of all segments on each virtual stage, float64 [V]."""
        return (np.asarray(self.forward) + np.asarray(self.backward)).sum(axis=1)

    @classmethod
    def of_segments(
        cls,
        model: CostModel,
        tokens: np.ndarray,
        pairs: np.ndarray,
        edges: np.ndarray,
        layers: Sequence[float],
        recomputed: np.ndarray | None = None,
    ) -> PipelineCosts:
        """Compute times from the counts of each segment.

        Args:
            model: coefficients of the whole model.
            tokens, pairs, edges: int64 [N], see ``CostModel``; an edge counts in the segment that computes its row
                of logits.
            layers: layers of each virtual stage, in any unit, as only the shares count.
            recomputed: bool [N] or [V, N], whether the forward runs again before the backward; None for no segment.
        """
        total = float(sum(layers))
        share = np.asarray(layers, dtype=np.float64)[:, None] / (total if total else 1.0)
        nothing = np.zeros(len(tokens))
        in_layers = model.linear_seconds(np.asarray(tokens), np.asarray(pairs), nothing)
        at_the_end = model.linear_seconds(nothing, nothing, np.asarray(edges))
        forward, backward = (share * seconds for seconds in in_layers)
        forward[-1] += at_the_end[0]
        backward[-1] += at_the_end[1]
        forward, backward = (
            np.maximum(seconds, share * floor) for seconds, floor in zip((forward, backward), model.floors, strict=True)
        )
        if recomputed is not None:
            backward = backward + forward * np.asarray(recomputed, dtype=bool)
        return cls(forward, backward)
