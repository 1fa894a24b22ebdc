"""Groups the sequences that complete in a segment, so that their losses are computed a rectangle at a time.

A loss is written for one sequence's trained tokens, last axis time; a batch of sequences is the same call with a
leading axis. Rectangles cost padding, so sequences of similar length go together and a rectangle's area is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Elements of one rectangle (a longer single sequence gets a rectangle of its own): 1 MiB a field in float32.
MAX_ELEMENTS = 1 << 18
# Below this area padding costs less than another launch of the loss.
FREE_ELEMENTS = 1 << 12


@dataclass(frozen=True)
class LossBatch:
    """Sequences whose loss is computed in one call.

    Attributes:
        sequences: int64 [B].
        pair_index: int64 [B, T], the pair of each token in sequence order; where a row has ended, the number of pairs
            P.
    """

    sequences: np.ndarray
    pair_index: np.ndarray


def make_loss_batches(sequence_pairs: np.ndarray, completed_in: np.ndarray, num_segments: int) -> list[list[LossBatch]]:
    """Loss batches of every segment.

    Args:
        sequence_pairs: int64 [Q + 1], each sequence's run of pairs.
        completed_in: int64 [Q], segment in which a sequence's last row lies.
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
    """Whether ``candidate`` may join the rectangle that ``first``, its longest sequence, opened."""
    if completed_in[first] != completed_in[candidate]:
        return False
    area = int(lengths[first]) * count
    return area <= FREE_ELEMENTS or (area <= MAX_ELEMENTS and 2 * lengths[candidate] >= lengths[first])
