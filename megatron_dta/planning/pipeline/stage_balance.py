"""Divides the layers of a model over pipeline stages by the times that the stages' ops really take.

A first division counts what layers and the output layer compute (``pipeline_layers``). It is not the best where ops
wait for the host: what the last stage computes for logits then hides in the time of its launches, and it can take more
layers than the count says. So the division is corrected by the ops' own times: parts of layers until all ranks are
equally busy, or whole layers, moved from the busiest rank, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# Corrections of a division into parts, and how nearly equal the ranks are to be.
CORRECTIONS = 200
NEARLY = 1e-6


def balance_shares(
    work: Callable[[Sequence[float]], np.ndarray], shares: Sequence[float], num_stages: int
) -> list[float]:
    """Shares of the layers with which all ranks are equally busy, as far as layers can make them so.

    Args:
        work: times of the virtual stages, float64 [V], when they have given shares of the layers; more with more.
        shares: where to start, V numbers of sum 1. Parts of one rank keep their ratios.
        num_stages: ranks; virtual stage v is on rank v modulo num_stages.

    Returns:
        The best division found, by its busiest rank.
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
    """Whole layers with which the busiest rank is as fast as single moves of a layer make it.

    Args:
        work: times of the virtual stages, float64 [V], with so many layers each.
        layers: where to start.
        num_stages: ranks, as in ``balance_shares``.
        least: fewest layers of a virtual stage.
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
    """Times of the ranks, float64 [P], of those of the virtual stages."""
    return np.asarray(work, dtype=np.float64).reshape(-1, num_stages).sum(axis=0)
