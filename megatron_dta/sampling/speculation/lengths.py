"""Predicts from recent lengths how long samples become and which one of a batch ends last.

**Length classes.** Short, medium and long are terciles of recent lengths. Equal lengths belong to one class. The
longest samples are always long, so all samples that reached the length cap are long, however many there are. A
problem's first class is the most frequent one among its past samples, or medium if there are none. The class of a
running sample is the most frequent one among past samples of the same first class that became at least as long.

**The last sample.** A batch takes c_base x (forwards until the last sample ends) + c_tok x (tokens). An accepted draft
always saves the cost of one token. It saves a forward only if its sample is the last to end. ``completion_probability``
estimates how likely that is from each sample's possible lengths, its current length and its speed in tokens per
forward. The inverse of the probability is the number of samples that share the sample's forwards.
"""

from __future__ import annotations

from collections import defaultdict
from enum import IntEnum

import numpy as np

BUDGETS = ("straggler", "class")
"""How drafted tokens are valued. "straggler", the default: a sample's forwards are worth more, the likelier the sample
is the last one to end. "class", the paper's: short samples draft nothing, medium ones a few tokens, and the long
samples alone share the forwards."""
_MAX_SAMPLES, _MAX_SAMPLES_OF_PROBLEM = 4096, 64
"""Number of recent lengths that are kept, in all and for each problem."""
CANDIDATES = 12
"""Number of equally likely lengths that represent a sample's length distribution."""
_TIMES = 48
"""Points in time at which the end times are compared."""
_LINDY = 0.5
"""Assumed remaining length of a sample that exceeds all its candidates, as a share of its current length."""


class LengthClass(IntEnum):
    SHORT = 0
    MEDIUM = 1
    LONG = 2


class LengthHistory:
    """Lengths of recent samples by problem, and the length classes derived from them.

    The class bounds and counts change only in ``end_step``, so they do not depend on the order in which samples end.
    """

    def __init__(self) -> None:
        self._known_bounds: tuple[int, int] | None = None
        self._lengths = np.zeros(0, np.int64)
        self._first = np.zeros(0, np.int64)  # the first class of each sample
        self._problems: dict[str, list[int]] = {}
        self._new: dict[str, list[int]] = defaultdict(list)
        # Caches, cleared when the history changes.
        self._expected: dict[str, tuple[LengthClass, np.ndarray]] = {}
        self._first_classes: dict[str, LengthClass] = {}

    def expected(self, problem: str) -> tuple[LengthClass, np.ndarray]:
        """``first_class`` and ``candidates`` of a problem."""
        if problem not in self._expected:
            known = np.array(self._problems.get(problem, []), np.float64)
            self._expected[problem] = self.first_class(problem), candidate_lengths(known, self._lengths)
        return self._expected[problem]

    def first_class(self, problem: str) -> LengthClass:
        """The most frequent class of the problem's past samples; the longer class wins a tie."""
        if problem not in self._first_classes:
            lengths = self._problems.get(problem)
            if self._bounds is None or not lengths:
                return LengthClass.MEDIUM
            counts = np.bincount(self._classes(np.array(lengths)), minlength=3)
            self._first_classes[problem] = LengthClass(2 - int(counts[::-1].argmax()))
        return self._first_classes[problem]

    def classes(self, first: np.ndarray, so_far: np.ndarray) -> np.ndarray:
        """Classes of running samples by their first class and current length, int64 [n]."""
        if self._bounds is None:
            return first.astype(np.int64)
        reached = self._classes(so_far)
        result = np.maximum(first, reached)
        for began in set(first.tolist()):
            rows = np.flatnonzero(first == began)
            alike = self._lengths[self._first == began]
            if not len(alike):
                continue
            of_classes = [np.sort(alike[self._classes(alike) == c]) for c in range(3)]
            counts = np.stack([len(part) - np.searchsorted(part, so_far[rows]) for part in of_classes])
            predicted = 2 - counts[::-1].argmax(0)
            result[rows] = np.where(counts.any(0), predicted, result[rows])
        return np.maximum(result, reached)

    def add(self, problem: str, length: int) -> None:
        self._new[problem].append(length)

    def end_step(self) -> None:
        parts = [(problem, int(self.first_class(problem)), sorted(self._new[problem])) for problem in sorted(self._new)]
        for problem, _, lengths in parts:
            self._problems[problem] = (self._problems.get(problem, []) + lengths)[-_MAX_SAMPLES_OF_PROBLEM:]
        first = [first for _, first, lengths in parts for _ in lengths]
        lengths = [length for *_, lengths in parts for length in lengths]
        self._first = np.concatenate([self._first, np.array(first, np.int64)])[-_MAX_SAMPLES:]
        self._lengths = np.concatenate([self._lengths, np.array(lengths, np.int64)])[-_MAX_SAMPLES:]
        self._new.clear()
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._expected.clear()
        self._first_classes.clear()
        self._known_bounds = None

    @property
    def _bounds(self) -> tuple[int, int] | None:
        """Minimum lengths of medium and long samples."""
        if self._known_bounds is None and len(self._lengths) >= 6:
            self._known_bounds = class_bounds(self._lengths)
        return self._known_bounds

    def state_dict(self) -> dict[str, np.ndarray]:
        state = {"lengths": self._lengths.copy(), "first": self._first.copy()}
        for prefix, lengths in (("problem", self._problems), ("new", self._new)):
            names = sorted(lengths)
            state[f"{prefix}s"] = np.array(names, dtype=np.str_)
            state[f"{prefix}_counts"] = np.array([len(lengths[name]) for name in names], np.int64)
            state[f"{prefix}_lengths"] = np.array([n for name in names for n in lengths[name]], np.int64)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self._lengths, self._first = np.array(state["lengths"], np.int64), np.array(state["first"], np.int64)
        for prefix, lengths in (("problem", self._problems), ("new", self._new)):
            ends = np.cumsum(state[f"{prefix}_counts"])
            parts = np.split(np.asarray(state[f"{prefix}_lengths"], np.int64), ends[:-1]) if len(ends) else []
            lengths.clear()
            lengths.update((str(n), part.tolist()) for n, part in zip(state[f"{prefix}s"], parts, strict=True))
        self._clear_caches()

    def _classes(self, lengths: np.ndarray) -> np.ndarray:
        return np.searchsorted(np.array(self._bounds), lengths, side="right")


def class_bounds(lengths: np.ndarray) -> tuple[int, int]:
    """Minimum lengths of medium and of long samples, chosen so that each class has about a third of ``lengths``.

    Equal lengths are not split. If they cross a bound, they go to the side that keeps the outer class closer to a
    third. The longest samples are always long, since they decide when a rollout is done.
    """
    low, high = _quantiles(lengths, np.array([1 / 3, 2 / 3]))
    medium = min(np.ceil(low), np.floor(low) + 1, key=lambda begin: abs(np.mean(lengths < begin) - 1 / 3))
    above = [begin for begin in (np.ceil(high), np.floor(high) + 1) if begin <= lengths.max()]
    long = min(above, key=lambda begin: abs(np.mean(lengths >= begin) - 1 / 3))
    return int(min(medium, long)), int(long)


def candidate_lengths(problem_lengths: np.ndarray, others: np.ndarray) -> np.ndarray:
    """float64 [CANDIDATES]: equally likely total lengths, ascending; all zero if there are no past samples.

    Args:
        problem_lengths: lengths of the problem's past samples.
        others: lengths of all recent samples.
    """
    if not len(others):
        return np.zeros(CANDIDATES)
    share = len(problem_lengths) / (len(problem_lengths) + 2.0)
    count = round(share * CANDIDATES)
    parts = []
    if count:
        # A few samples underestimate the spread of the next one.
        spread = np.geomspace(0.8, 1.25, count) if count > 1 else np.ones(1)
        parts.append(_quantiles(problem_lengths, _midpoints(count)) * spread)
    parts.append(_quantiles(others, _midpoints(CANDIDATES - count)))
    return np.sort(np.concatenate(parts))


def _midpoints(count: int) -> np.ndarray:
    """The midpoints of ``count`` equal parts of [0, 1]."""
    return (np.arange(count) + 0.5) / count


def _quantiles(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """``numpy.quantile``, whose first call imports for 50 ms, as that of ``numpy.unique`` does."""
    return np.interp(levels * (values.size - 1), np.arange(values.size), np.sort(values, axis=None))


def completion_probability(candidates: np.ndarray, so_far: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """float64 [n], summing to 1: the probability that each sample is the last one to end.

    Args:
        candidates: float64 [n, CANDIDATES] from ``candidate_lengths``.
        so_far: [n], generated tokens.
        speed: [n], expected tokens per forward of each sample; positive.
    """
    if len(so_far) == 1 or not candidates.any():
        return np.full(len(so_far), 1 / len(so_far))
    steps = (np.arange(CANDIDATES) + 1) / CANDIDATES
    later = so_far[:, None] + 1 + _LINDY * (so_far[:, None] + 16.0) * steps
    total = np.where(candidates > so_far[:, None], candidates, later)
    ends = np.sort((total - so_far[:, None]) / speed[:, None], axis=1)
    times = _quantiles(ends, np.linspace(0.3, 1, _TIMES) ** 0.5)
    times = times[np.append(True, np.diff(times) > 0)]
    # Share of each sample's candidates that have ended by each time: [n, times].
    ended = (ends[:, :, None] <= times).mean(1)
    with np.errstate(divide="ignore"):
        logs = np.log(np.maximum(ended, 1e-3))
    others = np.exp(logs.sum(0) - logs)
    mass = np.diff(ended, axis=1, prepend=0.0)
    weights = (mass * others).sum(1) + 1e-9
    return weights / weights.sum()
