"""Decides how many tokens to draft for each sample: the token gate, length classes and the optimal budget.

**The gate.** Verifying one more drafted token costs c_tok. If it is accepted, its sample needs one forward fewer. That
saves the token of that forward, c_tok, and the sample's share of the forward's fixed cost, c_base / S, where S samples
share a forward. A token is drafted only if its probability of being accepted, given the draft before it, is at least

    c_tok / (c_tok + c_base / S)

If the forward's cost is flat up to a knee, the tokens below the knee are free and the most probable ones fill it. S is
the live batch or, better, the inverse of the probability that the sample is the last to end
(``completion_probability.py``), since only the last sample's forwards delay the end of the batch. Apart from rare,
short explorations that update the acceptance estimates, no sample drafts more than the gate allows.

Example: c_base = 8 ms, c_tok = 0.03 ms. With S = 100 samples the threshold is 0.03 / (0.03 + 0.08) = 0.27. A sample
that is certain to end last (S = 1) drafts every token with a probability of at least 0.03 / 8.03 = 0.0037.

**Length classes.** Short, medium and long are terciles of recent lengths. Equal lengths belong to one class. The
longest samples are always long, so all samples that reached the length cap are long, however many there are. A
problem's first class is the most frequent one among its past samples, or medium if there are none. The class of a
running sample is the most frequent one among past samples of the same first class that became at least as long.

**The optimal budget** (after DAS, arXiv 2511.13841, corrected). Drafting p tokens for a sample of length l saves
A(p) = k l (1 - exp(-a p / l)) forwards, so the sample ends within N forwards with

    p = -(l / a) ln(1 - (1 - N / l) / k),  feasible for N > l (1 - k),  0 for N >= l

(The paper's closed form has k in the wrong place and inverts A only for k = 1.) The cost c_base N + c_tok sum p is
convex in N and minimal where c_base = c_tok sum over l > N of 1 / (a (k - 1 + N / l)).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megatron_dta.speculation.completion_probability import candidate_lengths
from megatron_dta.speculation.forward_cost import ForwardCost

NEVER = 2.0
"""A threshold above every probability."""

BUDGETS = ("straggler", "gate", "class", "optimal", "always")


@dataclass(frozen=True)
class BudgetParams:
    """Attributes:
    budget: how drafted tokens are valued. "straggler": a sample's forwards are worth more, the likelier the sample is
        the last one to end. "gate": all samples share the forwards equally. "class": short samples draft nothing,
        medium ones a few tokens, and the long samples alone share the forwards. "optimal": the optimal budget for
        the expected lengths, spread over the expected forwards. "always": verify every draft, without the gate
        (for comparison).
    exploration: share of drafts that are verified against the gate's decision, a few tokens each.
    seed: seed of the exploration.
    """

    budget: str = "straggler"
    exploration: float = 0.003
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget not in BUDGETS:
            raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, not {self.budget!r}")
        if not 0 <= self.exploration <= 1:
            raise ValueError(f"exploration must be in [0, 1], got {self.exploration}")


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


def gate(
    accept: np.ndarray, allowed: np.ndarray, cost: ForwardCost, live: int, sharers: np.ndarray | None = None
) -> np.ndarray:
    """How many tokens of each draft to verify, int64 [n].

    Args:
        accept: float64 [n, width], the probability that positions 0 .. j are accepted; non-increasing along a row.
        allowed: int [n], maximum number of tokens to verify, at most the draft's length.
        live: sequences in the forward, including those without a draft.
        sharers: float [n], number of samples that share each sample's forwards; default ``live``.
    """
    accept = np.where(np.arange(accept.shape[1]) < allowed[:, None], accept, -1.0)
    share = np.full(len(accept), float(live)) if sharers is None else np.maximum(sharers, 1.0)
    worth = cost.per_token + cost.base / share
    above = cost.per_token / worth
    free = max(0, int(cost.knee) - live)
    if not free:
        return (accept >= above[:, None]).sum(1)
    # Tokens up to the knee are free: the most probable ones fill it. The gate decides about the others.
    lengths = (accept >= np.minimum(above, NEVER)[:, None]).sum(1)
    flat = np.flatnonzero(accept.reshape(-1) > 0)
    if len(flat) > free:
        # The stable sort breaks ties by row and position: all ranks choose alike, and a draft has no gaps.
        order = np.argsort(-accept.reshape(-1)[flat], kind="stable")
        flat = flat[order[:free]]
    within = np.bincount(flat // accept.shape[1], minlength=len(accept))
    return np.maximum(lengths, within)


class LengthClass(IntEnum):
    SHORT = 0
    MEDIUM = 1
    LONG = 2


class LengthHistory:
    """Lengths of recent samples by problem, and the length classes derived from them.

    The class bounds and counts change only in ``end_step``, so they do not depend on the order in which samples end.
    """

    def __init__(self, max_samples: int = 4096) -> None:
        self.max_samples = max_samples
        self._bounds: tuple[int, int] | None = None  # minimum lengths of medium and long samples
        self._lengths = np.zeros(0, np.int64)
        self._first = np.zeros(0, np.int64)  # the first class of each sample
        self._problems: dict[str, list[int]] = {}
        self._new: list[tuple[str, int, int]] = []
        self._expected: dict[str, tuple[LengthClass, np.ndarray]] = {}  # cache, cleared when the history changes

    def expected(self, problem: str) -> tuple[LengthClass, np.ndarray]:
        """``first_class`` and ``candidates`` of a problem."""
        if problem not in self._expected:
            self._expected[problem] = self.first_class(problem), self.candidates(problem)
        return self._expected[problem]

    def first_class(self, problem: str) -> LengthClass:
        """The most frequent class of the problem's past samples; the longer class wins a tie."""
        lengths = self._problems.get(problem)
        if self._bounds is None or not lengths:
            return LengthClass.MEDIUM
        counts = np.bincount(self._classes(np.array(lengths)), minlength=3)
        return LengthClass(2 - int(counts[::-1].argmax()))

    def candidates(self, problem: str) -> np.ndarray:
        """Equally likely lengths of a sample of the problem; see ``completion_probability.candidate_lengths``."""
        return candidate_lengths(np.array(self._problems.get(problem, []), np.float64), self._lengths)

    def classes(self, first: np.ndarray, so_far: np.ndarray) -> np.ndarray:
        """Classes of running samples by their first class and current length, int64 [n]."""
        if self._bounds is None:
            return first.astype(np.int64)
        own = self._classes(so_far)
        result = np.maximum(first, own)
        for began in np.unique(first):
            rows = np.flatnonzero(first == began)
            alike = self._lengths[self._first == began]
            if not len(alike):
                continue
            counts = np.stack([_longer(alike[self._classes(alike) == c], so_far[rows]) for c in range(3)])
            predicted = 2 - counts[::-1].argmax(0)
            result[rows] = np.where(counts.any(0), predicted, result[rows])
        return np.maximum(result, own)

    def add(self, problem: str, first: int, length: int) -> None:
        self._new.append((problem, int(first), int(length)))

    def end_step(self) -> None:
        for problem, _, length in sorted(self._new):
            self._problems.setdefault(problem, []).append(length)
            del self._problems[problem][:-64]
        new = np.array([(first, length) for _, first, length in sorted(self._new)], np.int64).reshape(-1, 2)
        self._first = np.concatenate([self._first, new[:, 0]])[-self.max_samples :]
        self._lengths = np.concatenate([self._lengths, new[:, 1]])[-self.max_samples :]
        self._new.clear()
        self._expected.clear()
        if len(self._lengths) >= 6:
            self._bounds = class_bounds(self._lengths)

    def state_dict(self) -> dict[str, np.ndarray]:
        names = sorted(self._problems)
        return {
            "lengths": self._lengths.copy(),
            "first": self._first.copy(),
            "problems": np.array(names, dtype=np.str_),
            "problem_counts": np.array([len(self._problems[name]) for name in names], np.int64),
            "problem_lengths": np.array([n for name in names for n in self._problems[name]], np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._lengths, self._first = np.array(state["lengths"], np.int64), np.array(state["first"], np.int64)
        ends = np.cumsum(state["problem_counts"])
        parts = np.split(np.asarray(state["problem_lengths"], np.int64), ends[:-1]) if len(ends) else []
        self._problems = {str(n): part.tolist() for n, part in zip(state["problems"], parts, strict=True)}
        self._new.clear()
        self._bounds = None
        self.end_step()

    def _classes(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.array(self._bounds), lengths, side="right")


def class_bounds(lengths: np.ndarray) -> tuple[int, int]:
    """Minimum lengths of medium and of long samples, chosen so that each class has about a third of ``lengths``.

    Equal lengths are not split. If they cross a bound, they go to the side that keeps the outer class closer to a
    third. The longest samples are always long, since they decide when a rollout is done.
    """
    low, high = np.quantile(lengths, [1 / 3, 2 / 3])
    medium = min(np.ceil(low), np.floor(low) + 1, key=lambda begin: abs(np.mean(lengths < begin) - 1 / 3))
    above = [begin for begin in (np.ceil(high), np.floor(high) + 1) if begin <= lengths.max()]
    long = min(above, key=lambda begin: abs(np.mean(lengths >= begin) - 1 / 3))
    return int(min(medium, long)), int(long)


def _longer(lengths: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Number of ``lengths`` that are at least each value of ``than``."""
    return len(lengths) - np.searchsorted(np.sort(lengths), than, side="left")
