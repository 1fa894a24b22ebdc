"""Balances the layers of a model over pipeline stages by the actual times of the stages' ops.

``planning.pipeline.layers`` divides by the computation of layers and output layer. That is not optimal if ops wait for
the host: the logits of the last stage are then hidden in the time of its launches, and it can take more layers. This
module corrects the division by the times of the ops. It adjusts fractions of layers until all ranks are equally busy,
or moves whole layers away from the busiest rank while that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# Maximum corrections of a division into fractions, and the tolerated relative difference between ranks.
CORRECTIONS = 200
NEARLY = 1e-6


def balance_shares(
    work: Callable[[Sequence[float]], np.ndarray], shares: Sequence[float], num_stages: int
) -> list[float]:
    """Return shares of the layers that make all ranks equally busy, as far as possible.

    Args:
        work: function from shares of the layers to times of the virtual stages, float64 [V]; increasing.
        shares: initial shares, V numbers with the sum 1. Shares on one rank keep their ratios.
        num_stages: ranks; virtual stage v is on rank v modulo num_stages.

    Returns:
        The division found whose busiest rank is fastest.
    """
    present = np.asarray(shares, dtype=np.float64)
    best, lowest = present, np.inf
    for _ in range(CORRECTIONS):
        busy = _of_ranks(work(present.tolist()), num_stages)
        if busy.max() < lowest:
            best, lowest = present, float(busy.max())
        if not busy.min() or busy.max() <= (1 + NEARLY) * busy.min():
            break
        factors = np.tile(busy.mean() / busy, len(present) // num_stages)
        present = present * factors / (present * factors).sum()
    return best.tolist()


def balance_layers(
    work: Callable[[Sequence[float]], np.ndarray], layers: Sequence[int], num_stages: int, least: int = 1
) -> list[int]:
    """Return numbers of whole layers such that moving a single layer makes the busiest rank no faster.

    Args:
        work: function from numbers of layers to times of the virtual stages, float64 [V].
        layers: initial numbers of layers.
        num_stages: ranks, as in ``balance_shares``.
        least: minimum layers of a virtual stage.
    """
    present = list(layers)
    slowest = float(_of_ranks(work(present), num_stages).max())
    while True:
        busiest = int(np.argmax(_of_ranks(work(present), num_stages)))
        moves = []
        for source in range(busiest, len(present), num_stages):
            for target in range(len(present)):
                if present[source] > least and target % num_stages != busiest:
                    moved = list(present)
                    moved[source] -= 1
                    moved[target] += 1
                    moves.append((float(_of_ranks(work(moved), num_stages).max()), moved))
        if not moves or min(moves)[0] >= slowest:
            return present
        slowest, present = min(moves)


def _of_ranks(work: np.ndarray, num_stages: int) -> np.ndarray:
    """Sum the times of virtual stages to those of ranks, float64 [P]."""
    return np.asarray(work, dtype=np.float64).reshape(-1, num_stages).sum(axis=0)
