"""From losses per token to the loss of a step: one weight per sequence, one denominator for the whole step.

    token-mean      1 / (trained tokens of the step): every trained token counts alike
    sequence-mean   1 / (trained tokens of the sequence * sequences of the step): every sequence counts alike

The denominator is of the step, across micro-batches, segments and ranks: each part sums loss * weight and the parts are
added up, never averaged, so the result does not depend on how the step was cut. Sequences without a trained token have
no mean of their own and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.errors import InputError

AGGREGATIONS = ("token-mean", "sequence-mean")


@dataclass(frozen=True)
class TrainedCounts:
    """What a step trains; counts of its parts (ranks) are added with ``+``."""

    tokens: int
    """(sequence, token) pairs with ``loss_mask`` True; a token that k sequences train counts k times."""
    sequences: int
    """Sequences with at least one such token."""

    def __add__(self, other: TrainedCounts) -> TrainedCounts:
        return TrainedCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def count_trained(trained_tokens: np.ndarray) -> TrainedCounts:
    """Counts from the number of trained tokens of each sequence, int [Q]."""
    trained_tokens = np.asarray(trained_tokens)
    return TrainedCounts(int(trained_tokens.sum()), int(np.count_nonzero(trained_tokens)))


def loss_weights(trained_tokens: np.ndarray, mode: str, counts: TrainedCounts | None = None) -> np.ndarray:
    """float64 [Q]: the weight of each token's loss in sequence q, from the trained tokens of each sequence, int [Q].

    counts: of the whole step, where these are only a part of its sequences (default: these are all). A sequence without
    trained tokens gets 0.
    """
    trained_tokens = np.asarray(trained_tokens, np.int64)
    counts = count_trained(trained_tokens) if counts is None else counts
    if mode == "token-mean":
        denominators = np.full(len(trained_tokens), counts.tokens, np.float64)
    elif mode == "sequence-mean":
        denominators = trained_tokens.astype(np.float64) * counts.sequences
    else:
        raise InputError(f"--loss-aggregation {mode}: choose from {', '.join(AGGREGATIONS)}")
    return np.divide(1.0, denominators, out=np.zeros(len(trained_tokens)), where=trained_tokens > 0)
