"""Combines losses per token to the loss of a step: one weight per sequence, one denominator for the whole step.

    token-mean      1 / (trained tokens of the step): every trained token counts equally
    sequence-mean   1 / (trained tokens of the sequence * sequences of the step): every sequence counts equally
    trajectory-mean 1 / (trained tokens of the trajectory * trajectories of the step): like sequence-mean, but
                    independent of the number of sequences into which a trajectory is cut
    sequence-sum    1 / (a constant length * sequences of the step): the length of a sequence does not change the
                    weight of its tokens (Dr. GRPO, arXiv 2503.20783)

The denominator is that of the step, across micro-batches, segments and ranks. Each part sums loss * weight, and the
parts are added, never averaged, so the result does not depend on how the step was cut. Sequences without a trained
token have no mean and are not counted.

Sequences may have their own weights (the leaves of sampled trees). The means are then weighted: sums of weight x loss
over sums of weight x trained tokens, or of weights. With trajectory-mean, the weight of a part of a trajectory is its
share of the trajectory's trained tokens (``trajectory_shares``); the shares of a trajectory sum to 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout

AGGREGATIONS = ("token-mean", "sequence-mean", "trajectory-mean", "sequence-sum")


@dataclass(frozen=True)
class TrainedCounts:
    """Counts of what a step trains; counts of its parts (ranks) are added with ``+``."""

    tokens: int
    """(sequence, token) pairs with ``loss_mask`` True; a token that k sequences train counts k times."""
    sequences: int
    """Sequences with at least one such token."""
    weighted_tokens: float | None = None
    """Sum of sequence weight x trained tokens; None if all weights are 1."""
    weighted_sequences: float | None = None
    """Sum of the weights of the counted sequences; None if all weights are 1."""

    def __add__(self, other: TrainedCounts) -> TrainedCounts:
        tokens, sequences = self.tokens + other.tokens, self.sequences + other.sequences
        if self.weighted_tokens is None and other.weighted_tokens is None:
            return TrainedCounts(tokens, sequences)
        pairs = [part.denominators() for part in (self, other)]
        return TrainedCounts(tokens, sequences, pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1])

    def denominators(self) -> tuple[float, float]:
        """(of token-mean, of sequence-mean and sequence-sum)."""
        if self.weighted_tokens is None or self.weighted_sequences is None:
            return self.tokens, self.sequences
        return self.weighted_tokens, self.weighted_sequences


def count_trained(trained_tokens: np.ndarray, sequence_weights: np.ndarray | None = None) -> TrainedCounts:
    """Counts from the number of trained tokens of each sequence, int [Q], and its weight, float [Q] (default: 1)."""
    trained_tokens = np.asarray(trained_tokens)
    tokens, sequences = int(trained_tokens.sum()), int(np.count_nonzero(trained_tokens))
    if sequence_weights is None:
        return TrainedCounts(tokens, sequences)
    weights = np.asarray(sequence_weights, np.float64)
    return TrainedCounts(
        tokens, sequences, float((weights * trained_tokens).sum()), float(weights[trained_tokens > 0].sum())
    )


def loss_weights(
    trained_tokens: np.ndarray,
    mode: str,
    counts: TrainedCounts | None = None,
    sequence_weights: np.ndarray | None = None,
    constant_length: float | None = None,
) -> np.ndarray:
    """float64 [Q]: the weight of each token's loss in sequence q, from the trained tokens of each sequence, int [Q].

    counts: of the whole step, if the arguments are only a part of its sequences (default: they are all).
    sequence_weights: float [Q], weight of each sequence (default: equal); with trajectory-mean its share. A sequence
        without trained tokens gets 0, and so do all sequences if all weights are 0.
    constant_length: the divisor of sequence-sum.
    """
    trained_tokens = np.asarray(trained_tokens, np.int64)
    counts = count_trained(trained_tokens, sequence_weights) if counts is None else counts
    tokens, sequences = counts.denominators()
    if mode == "token-mean":
        denominators = np.full(len(trained_tokens), tokens, np.float64)
    elif mode in ("sequence-mean", "trajectory-mean"):
        denominators = trained_tokens.astype(np.float64) * sequences
    elif mode == "sequence-sum":
        if constant_length is None or not constant_length > 0:
            raise InputError(f"--loss-aggregation sequence-sum needs a length above 0, got {constant_length}")
        denominators = np.full(len(trained_tokens), constant_length * sequences, np.float64)
    else:
        raise InputError(f"--loss-aggregation {mode}: choose from {', '.join(AGGREGATIONS)}")
    weights = np.ones(len(trained_tokens)) if sequence_weights is None else np.asarray(sequence_weights, np.float64)
    counted = (trained_tokens > 0) & (denominators > 0)
    return np.divide(weights, denominators, out=np.zeros(len(trained_tokens)), where=counted)


def trajectory_names(rollouts: Sequence[Rollout]) -> list[Hashable]:
    """A name for each rollout's trajectory, shared by its parts only."""
    return [(r.group_id, i if r.trajectory_id is None else r.trajectory_id) for i, r in enumerate(rollouts)]


def trajectory_shares(trained_tokens: np.ndarray, trajectories: Sequence[Hashable]) -> np.ndarray:
    """float64 [Q]: each sequence's share of its trajectory's trained tokens; 0 if there are none."""
    numbers: dict[Hashable, int] = {}
    trajectory = np.array([numbers.setdefault(name, len(numbers)) for name in trajectories], np.int64)
    trained = np.asarray(trained_tokens, np.float64)
    total = np.bincount(trajectory, trained, len(numbers))[trajectory]
    return np.divide(trained, total, out=np.zeros(len(trained)), where=total > 0)
