"""Groups the sequences that complete in a segment into rectangles, so that one call computes many losses.

A loss is written for the trained tokens of one sequence, with time as the last axis. A batch of sequences is the same
call with a leading axis. Rectangles cost padding, so each holds sequences of similar length and its area is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Maximum number of elements of a rectangle: 1 MiB per field in float32. A longer sequence gets a rectangle of its own.
MAX_ELEMENTS = 1 << 18
# Below this area, padding costs less than another launch of the loss.
FREE_ELEMENTS = 1 << 12


@dataclass(frozen=True)
class LossBatch:
    """The sequences whose losses are computed in one call.

    Attributes:
        sequences: int64 [B].
        pair_index: int64 [B, T], the pair of each token, in sequence order; P, the number of pairs, marks padding.
    """

    sequences: np.ndarray
    pair_index: np.ndarray


def make_loss_batches(sequence_pairs: np.ndarray, completed_in: np.ndarray, num_segments: int) -> list[list[LossBatch]]:
    """Make the loss batches of every segment.

    Args:
        sequence_pairs: int64 [Q + 1], offsets of each sequence's pairs.
        completed_in: int64 [Q], segment that holds each sequence's last row.
    """
    lengths = np.diff(sequence_pairs)
    batches: list[list[LossBatch]] = [[] for _ in range(num_segments)]
    order = np.lexsort((-lengths, completed_in))
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and _fits(lengths, completed_in, order[begin], order[end], end - begin + 1):
            continue
        chosen = order[begin:end]
        steps = np.arange(lengths[chosen[0]])
        index = sequence_pairs[chosen][:, None] + steps
        index[steps >= lengths[chosen][:, None]] = sequence_pairs[-1]
        batches[completed_in[chosen[0]]].append(LossBatch(chosen.astype(np.int64), index))
        begin = end
    return batches


def _fits(lengths: np.ndarray, completed_in: np.ndarray, first: int, candidate: int, count: int) -> bool:
    """Whether ``candidate`` may join the rectangle whose first and longest sequence is ``first``."""
    if completed_in[first] != completed_in[candidate]:
        return False
    area = int(lengths[first]) * count
    return area <= FREE_ELEMENTS or (area <= MAX_ELEMENTS and 2 * lengths[candidate] >= lengths[first])
