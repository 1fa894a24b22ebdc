"""The rules of ``--das-budget``, and the optimal budget of the DAS paper (arXiv 2511.13841, corrected).

Drafting p tokens for a sample of length l saves A(p) = k l (1 - exp(-a p / l)) forwards, so the sample ends within N
forwards with

    p = -(l / a) ln(1 - (1 - N / l) / k),  feasible for N > l (1 - k),  0 for N >= l

(The paper's closed form has k in the wrong place and inverts A only for k = 1.) The cost c_base N + c_tok sum p is
convex in N and minimal where c_base = c_tok sum over l > N of 1 / (a (k - 1 + N / l)).
"""

from __future__ import annotations

import numpy as np

BUDGETS = ("straggler", "gate", "class", "optimal", "always")
"""How drafted tokens are valued. "straggler", the default: a sample's forwards are worth more, the likelier the sample
is the last one to end. "gate": all samples share the forwards equally. For comparison: "class": short samples draft
nothing, medium ones a few tokens, and the long samples alone share the forwards. "optimal": the optimal budget for the
expected lengths, spread over the expected forwards. "always": verify every draft, without a gate."""


def optimal_budget(
    lengths: np.ndarray, k: np.ndarray, alpha: np.ndarray, c_base: float, c_tok: float
) -> tuple[float, np.ndarray]:
    """The number of forwards N with the lowest cost, and each sample's drafted tokens for it, float64 [n].

    Args:
        lengths: [n], expected lengths; positive.
        k: [n] in [0, 1], the share of tokens that unlimited drafting would have accepted.
        alpha: [n], how fast acceptance saturates; positive.
        c_base: seconds of a forward.
        c_tok: seconds of a drafted token.

    Raises:
        ValueError: an argument is out of its range.
    """
    lengths, k, alpha = (np.asarray(x, np.float64) for x in (lengths, k, alpha))
    if not (len(lengths) and (lengths > 0).all() and ((k >= 0) & (k <= 1)).all() and (alpha > 0).all()):
        raise ValueError("lengths and alpha must be positive, and k in [0, 1]")
    low, high = float((lengths * (1 - k)).max()), float(lengths.max())
    if c_tok > 0:
        for _ in range(200):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            longer = lengths > middle
            room = k[longer] - 1 + middle / lengths[longer]
            if (room <= 0).any() or c_tok * np.sum(1 / (alpha[longer] * room)) > c_base:
                low = middle
            else:
                high = middle
    else:
        high = np.nextafter(low, np.inf) if low < high else high
    return high, drafted_tokens(lengths, k, alpha, high)


def drafted_tokens(lengths: np.ndarray, k: np.ndarray, alpha: np.ndarray, forwards: float) -> np.ndarray:
    """Drafted tokens with which each sample is expected to end within ``forwards``, float64 [n]; inf if impossible."""
    share = np.maximum(0.0, 1 - forwards / lengths)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = 1 - np.where(share > 0, share / k, 0.0)
        tokens = np.where(left > 0, -(lengths / alpha) * np.log(left), np.inf)
    return np.where(share > 0, tokens, 0.0)


ASSUMED_ACCEPTANCE = (0.5, 1.0)
"""(k, alpha) until a draft has been verified."""


def fit_acceptance(
    lengths: np.ndarray,
    drafted: np.ndarray,
    accepted: np.ndarray,
    otherwise: tuple[float, float] = ASSUMED_ACCEPTANCE,
) -> tuple[float, float]:
    """Fits (k, alpha) by least squares of accepted / length; returns ``otherwise`` if nothing was drafted."""
    use = drafted > 0
    if not use.any():
        return otherwise
    share, gained = drafted[use] / lengths[use], accepted[use] / lengths[use]
    alphas = np.geomspace(0.05, 20, 60)
    rising = 1 - np.exp(-alphas[:, None] * share)
    k = np.clip((rising * gained).sum(1) / (rising**2).sum(1), 0.01, 0.99)
    best = int(((k[:, None] * rising - gained) ** 2).sum(1).argmin())
    return float(k[best]), float(alphas[best])
