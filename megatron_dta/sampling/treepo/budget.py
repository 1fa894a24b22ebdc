"""Computes the number of branches of a round and divides them among its paths.

A round is a set of n paths that each decode one segment. With w leaves wanted, F finished in earlier rounds, f of the
round's paths finished and A = n - f alive, the paper's budget (arXiv 2508.17445, as released) is

    max(A, min(w - F - f, N f + N A))

where N is the branching factor: finished paths transfer their N branches to those alive. The
budget is at least A, so no living path is cut off, and at most w - F - f, so the tree has at most w leaves; w - F >= n
holds from round to round. The released code gives the whole remainder of an even division to the last path; here it is
spread over paths drawn by key, one branch each.

Example: w = 8, F = 0, N = 2, and one of n = 4 paths has finished, so f = 1 and A = 3. The budget is
max(3, min(7, 2 + 6)) = 7: two paths get 2 children and one gets 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.sampling.treepo.settings import TreeSettings


def branch_budget(settings: TreeSettings, finished_before: int, members: int, finished: int) -> int:
    """Branches after a round of ``members`` paths, of which ``finished`` have finished; see the module's docstring."""
    alive = members - finished
    return max(alive, min(settings.width - finished_before - finished, settings.branching_factor * members))


def certain_branches(settings: TreeSettings, finished_before: int, members: int, finished: int) -> int:
    """Lower bound on the branches of every living path in an even division, before all paths of the round are decoded.

    ``finished`` counts the paths known to have finished. As more paths finish, the budget per living path only grows:
    (w - F - f) / (n - f) rises with f since w - F >= n, and so does N n / (n - f).
    """
    return branch_budget(settings, finished_before, members, finished) // (members - finished)


def divide_evenly(budget: int, order: Sequence[int]) -> np.ndarray:
    """Branches of each of A paths, int [A]: equal shares, with the remainder given to the first paths in ``order``."""
    count = len(order)
    branches = np.full(count, budget // count)
    branches[np.asarray(order)[: budget % count]] += 1
    return branches


def divide_by_logprob(
    budget: int, scores: Sequence[float], temperature: float, prefer_low: bool, order: Sequence[int]
) -> np.ndarray:
    """One branch per path, and the rest by largest remainder over softmax(+-score / temperature), int [A].

    Ties between remainders are broken by ``order``.
    """
    values = np.asarray(scores, np.float64)
    values = (-values if prefer_low else values) / temperature
    shares = np.exp(values - values.max())
    extra = budget - len(values)
    quotas = extra * shares / shares.sum()
    branches = np.floor(quotas)
    rank = np.empty(len(values))
    rank[np.asarray(order)] = np.arange(len(values))
    missing = extra - int(branches.sum())
    branches[np.lexsort((rank, -(quotas - branches)))[:missing]] += 1
    return branches.astype(np.int64) + 1
