"""Fits the cost model to measured segments by nonnegative least squares with relative weights.

A pass takes its floor or the time of its counts, whichever is larger (``PassSeconds``). Which of the two applies to an
op is not known beforehand. The fit therefore alternates: it assigns the ops to one of the two, fits each part to its
own ops, and repeats until the assignment is stable. It starts from several assignments and keeps the best fit.

Forwards and backwards are fitted separately. A backward that first repeats its forward is the sum of both and only
serves as a check. Every op is weighted by the inverse of its predicted time, since a step may consist of long or of
short segments; weighting by measured time would favour ops that happened to be fast. Models of different depths are
measured to separate the cost of a layer from the cost of a pass.

Bytes are fitted by least squares and then raised until no measurement exceeds them. A plan must fit into memory, so
errors may only be on the high side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_dta.planning.costs.file import PassSeconds
from megatron_dta.planning.costs.segment_bytes import SegmentBytes

_TOLERANCE = 1e-10
_ALTERNATIONS = 20
_OUTLIER = 0.2  # Relative error above which an op counts as an outlier.
_TELLING = 1 / 16  # Ops that keep at least this share of the largest kept bytes determine the bytes of a token.
_LINEAR = 4  # Number of coefficients of ``PassSeconds`` before those of the floor.


@dataclass(frozen=True)
class MeasuredOp:
    """One forward or backward of a segment.

    Attributes:
        kind: "forward", "backward", or "recompute" for a backward that runs its forward again first.
        layers: number of layers of the model.
        tokens, path_tokens, pairs, edges: numbers of the segment's tokens, of the tokens on its root path including its
            own, of its (query, key) pairs, and of the trained edges that need its rows of logits.
        seconds: time of the op; the device is idle before and after.
        kept_bytes: bytes that a forward left allocated; None if not measured, or if nothing was kept.
        peak_bytes: peak of the bytes allocated during the op, above those before it; None if not measured.
    """

    kind: str
    layers: int
    tokens: int
    path_tokens: int
    pairs: int
    edges: int
    seconds: float
    kept_bytes: float | None = None
    peak_bytes: float | None = None


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Find x >= 0 that minimizes |matrix x - target| by the active-set method of Lawson and Hanson (1974), chapter 23.

    Args:
        matrix: float64 [rows, columns].
        target: float64 [rows].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= _TOLERANCE * max(1.0, float(np.abs(target).sum())):
            break
        free[int(gradient.argmax())] = True
        while free.any():
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                x = trial
                break
            bad = free & (trial <= 0)
            step = float(np.min(x[bad] / np.maximum(x[bad] - trial[bad], np.finfo(float).tiny)))
            x = x + step * (trial - x)
            free &= x > _TOLERANCE * max(1.0, float(x.max()))
            x[~free] = 0.0
    return x / scale


def fit_seconds(ops: Sequence[MeasuredOp]) -> tuple[PassSeconds, PassSeconds]:
    """Fit forward and backward. Ops of two depths are needed to separate the cost per layer from the cost per pass."""
    return _fit_pass([op for op in ops if op.kind == "forward"]), _fit_pass([op for op in ops if op.kind == "backward"])


def _fit_pass(ops: Sequence[MeasuredOp]) -> PassSeconds:
    """The best of several fits; each starts with all ops of up to some number of tokens at the floor."""
    best, least = PassSeconds(), np.inf
    seconds = np.asarray([op.seconds for op in ops])
    sizes = np.asarray([op.tokens for op in ops])
    for size in [0, *np.unique(sizes)[:-1].tolist()]:
        found = _alternate(ops, seconds, sizes <= size)
        if found.token_and_layer + found.token <= 0 and best.token_and_layer + best.token > 0:
            continue
        error = np.abs(np.log(_seconds(ops, found) / seconds))
        loss = float(np.where(error < _OUTLIER, error**2, _OUTLIER * (2 * error - _OUTLIER)).sum())
        if loss < least:
            best, least = found, loss
    return best


def _alternate(ops: Sequence[MeasuredOp], seconds: np.ndarray, at_floor: np.ndarray) -> PassSeconds:
    """Fit the ops at the floor and those above it separately, and reassign them by the fit, until it is stable."""
    columns = np.asarray([_counts(op) for op in ops])
    linear, floor = columns[:, :_LINEAR], columns[:, _LINEAR:]
    weight, found = 1 / seconds, np.zeros(columns.shape[1])
    for _ in range(_ALTERNATIONS):
        above = ~at_floor
        found[:_LINEAR] = nonnegative_least_squares(linear[above] * weight[above, None], (seconds * weight)[above])
        found[_LINEAR:] = 0.0
        if at_floor.any():
            found[_LINEAR:] = nonnegative_least_squares(
                floor[at_floor] * weight[at_floor, None], (seconds * weight)[at_floor]
            )
        own, least = linear @ found[:_LINEAR], floor @ found[_LINEAR:]
        expected = np.maximum(np.maximum(own, least), 1e-3 * seconds)
        # Outliers, such as ops delayed by other work on the machine, count less (Huber's weights).
        error = np.maximum(np.abs(seconds / expected - 1), _OUTLIER)
        weight = np.sqrt(_OUTLIER / error) / expected
        reassigned = own < least
        if reassigned.all():
            break
        at_floor = reassigned
    return PassSeconds(*found.tolist())


def predicted(ops: Sequence[MeasuredOp], forward: PassSeconds, backward: PassSeconds) -> np.ndarray:
    """Predicted seconds of each op, float64 [ops]; an op of kind "recompute" runs both passes."""
    kinds = np.asarray([op.kind for op in ops])
    return (kinds != "backward") * _seconds(ops, forward) + (kinds != "forward") * _seconds(ops, backward)


def _seconds(ops: Sequence[MeasuredOp], each: PassSeconds) -> np.ndarray:
    """Predicted seconds of one pass over each op's segment, float64 [ops]."""
    columns = np.asarray([_counts(op) for op in ops]).reshape(len(ops), len(fields(PassSeconds)))
    parts = columns * np.asarray([getattr(each, field.name) for field in fields(each)])
    return np.maximum(parts[:, :_LINEAR].sum(axis=1), parts[:, _LINEAR:].sum(axis=1))


def fit_errors(ops: Sequence[MeasuredOp], forward: PassSeconds, backward: PassSeconds) -> dict[str, dict[str, float]]:
    """For each kind of op, the mean and largest relative error, and the relative error of the sum over all ops."""
    seconds, guess = np.asarray([op.seconds for op in ops]), predicted(ops, forward, backward)
    errors = {}
    for kind in ("forward", "backward", "recompute"):
        own = np.asarray([op.kind == kind for op in ops])
        if own.any():
            relative = np.abs(guess[own] / seconds[own] - 1)
            errors[kind] = {
                "mean": float(relative.mean()),
                "largest": float(relative.max()),
                "of_sum": float(guess[own].sum() / seconds[own].sum() - 1),
            }
    return errors


def fit_bytes(ops: Sequence[MeasuredOp], counted: SegmentBytes | None) -> SegmentBytes | None:
    """Fit the bytes that a token keeps; all other bytes are those of ``counted``, which is None without measured bytes.

    ``work_fixed`` and ``fixed`` are raised so that no measured op exceeds the result. Returns None if no op measured
    bytes.
    """
    kept = [op for op in ops if op.kept_bytes is not None]
    if not kept:
        return None
    columns = np.asarray([[op.layers * op.tokens, op.tokens] for op in kept], dtype=np.float64)
    left = np.asarray([op.kept_bytes for op in kept], dtype=np.float64)
    per_token = nonnegative_least_squares(columns, left)
    # The allocator's rounding is a large part of small ops; it belongs to the fixed bytes.
    telling = left >= _TELLING * left.max()
    per_token *= max(1.0, float((left / np.maximum(columns @ per_token, 1.0))[telling].max()))
    found = replace(counted, kept_per_token_and_layer=float(per_token[0]), kept_per_token=float(per_token[1]))
    found = replace(found, work_fixed=max(counted.work_fixed, float((left - kept_bytes(kept, found)).max())))
    # Bytes that an op needs beyond its segment's activations, which exist before the backward of a kept segment.
    ran = [op for op in ops if op.peak_bytes is not None]
    built = [(op.kind != "backward" and _keeps(op)) * found.kept(op.layers) * op.tokens for op in ran]
    over = [
        op.peak_bytes - own - float(found.work(op.tokens, op.path_tokens)) for op, own in zip(ran, built, strict=True)
    ]
    return replace(found, fixed=max(counted.fixed, *over))


def kept_bytes(ops: Sequence[MeasuredOp], each: SegmentBytes) -> np.ndarray:
    """Predicted bytes that the ops' segments keep, float64 [ops]."""
    return np.asarray([each.kept(op.layers) * op.tokens for op in ops])


def _keeps(op: MeasuredOp) -> bool:
    """Whether the op creates its segment's activations."""
    return op.kind == "recompute" or op.kept_bytes is not None


def _counts(op: MeasuredOp) -> np.ndarray:
    """The counts of an op, in the order of ``PassSeconds``."""
    return np.asarray(
        [op.layers * op.tokens, op.layers * op.pairs, op.tokens, op.edges, op.layers, 1.0], dtype=np.float64
    )
