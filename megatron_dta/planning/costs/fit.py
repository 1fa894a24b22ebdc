"""Fits the cost model to measured segments: non-negative least squares, every op weighted by what it should take.

A pass takes its floor or what its counts need, whichever is more (``PassSeconds``). Which of the two it is for an op is
not known beforehand: ops are told apart, each part is fitted to its own ops, and the fit tells them apart anew, until
nothing changes; of several beginnings the best fit is taken. Forwards and backwards are fitted apart. A backward that
began with a second forward is a sum of both, and only a check. Every op is weighted by the inverse of its predicted
time, since a step may be made of long segments or of short ones (the measured time as the weight would favour ops that
happened to be fast). What a layer adds is told from what happens once by measuring models of different depths.

Bytes are fitted by least squares and then raised until nothing that was measured exceeds them: a plan must fit, so they
may only err on the high side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_dta.planning.costs.file import PassSeconds
from megatron_dta.planning.costs.segment_bytes import SegmentBytes

_TOLERANCE = 1e-10
_ALTERNATIONS = 20
_OUTLIER = 0.2  # Relative error from which an op counts as one.
_TELLING = 1 / 16  # Part of the most kept bytes from which an op tells what a token keeps.
_LINEAR = 4  # Coefficients of ``PassSeconds`` before those of the floor.


@dataclass(frozen=True)
class MeasuredOp:
    """One forward or backward of a segment.

    Attributes:
        kind: "forward", "backward", or "recompute" for a backward that runs its forward again first.
        layers: depth of the model.
        tokens, path_tokens, pairs, edges: of the segment; its root path with its own tokens, its (query, key) pairs,
            and the trained edges that need its rows of logits.
        seconds: of the op, the device idle before and after.
        kept_bytes: what a forward left allocated; None where that was not measured, or nothing was to be kept.
        peak_bytes: most that was allocated during the op above what was before; None where not measured.
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
    """x >= 0 that minimises |matrix x - target|: the active-set method of Lawson and Hanson (1974), chapter 23.

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
    """Coefficients of forward and backward. Ops of two depths are needed to tell layers from the rest."""
    return _fit_pass([op for op in ops if op.kind == "forward"]), _fit_pass([op for op in ops if op.kind == "backward"])


def _fit_pass(ops: Sequence[MeasuredOp]) -> PassSeconds:
    """The best of fits that begin with all ops of up to some number of tokens at the floor."""
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
    """Fit the ops at the floor and those above it in turn, each time told apart by the fit before."""
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
        # An op that something else on the machine held up counts less (Huber's weights).
        error = np.maximum(np.abs(seconds / expected - 1), _OUTLIER)
        weight = np.sqrt(_OUTLIER / error) / expected
        told = own < least
        if told.all():
            break
        at_floor = told
    return PassSeconds(*found.tolist())


def predicted(ops: Sequence[MeasuredOp], forward: PassSeconds, backward: PassSeconds) -> np.ndarray:
    """Seconds of each op by the coefficients, float64 [ops]; a recomputing one runs both passes."""
    kinds = np.asarray([op.kind for op in ops])
    return (kinds != "backward") * _seconds(ops, forward) + (kinds != "forward") * _seconds(ops, backward)


def _seconds(ops: Sequence[MeasuredOp], each: PassSeconds) -> np.ndarray:
    """Seconds of one pass over each op's segment, float64 [ops]."""
    columns = np.asarray([_counts(op) for op in ops]).reshape(len(ops), len(fields(PassSeconds)))
    parts = columns * np.asarray([getattr(each, field.name) for field in fields(each)])
    return np.maximum(parts[:, :_LINEAR].sum(axis=1), parts[:, _LINEAR:].sum(axis=1))


def fit_errors(ops: Sequence[MeasuredOp], forward: PassSeconds, backward: PassSeconds) -> dict[str, dict[str, float]]:
    """Of each kind of op: the mean and the largest relative error, and that of the sum over all ops."""
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


def fit_bytes(ops: Sequence[MeasuredOp], counted: SegmentBytes) -> SegmentBytes | None:
    """Bytes from the ops that measured them: what a token keeps is fitted, all else is as ``counted``, and where an op
    needed more room than that, ``fixed`` is more.

    None if nothing was measured. No measured op takes more than the result says, its work included.
    """
    kept = [op for op in ops if op.kept_bytes is not None]
    if not kept:
        return None
    columns = np.asarray([[op.layers * op.tokens, op.tokens] for op in kept], dtype=np.float64)
    left = np.asarray([op.kept_bytes for op in kept], dtype=np.float64)
    per_token = nonnegative_least_squares(columns, left)
    # Of small ops rounding by the allocator is a large part; it belongs to the fixed room.
    telling = left >= _TELLING * left.max()
    per_token *= max(1.0, float((left / np.maximum(columns @ per_token, 1.0))[telling].max()))
    found = replace(counted, kept_per_token_and_layer=float(per_token[0]), kept_per_token=float(per_token[1]))
    found = replace(found, work_fixed=max(counted.work_fixed, float((left - kept_bytes(kept, found)).max())))
    # What an op needs beyond the activations of its segment, which a backward of a kept one finds there.
    ran = [op for op in ops if op.peak_bytes is not None]
    built = [(op.kind != "backward" and _keeps(op)) * found.kept(op.layers) * op.tokens for op in ran]
    over = [
        op.peak_bytes - own - float(found.work(op.tokens, op.path_tokens)) for op, own in zip(ran, built, strict=True)
    ]
    return replace(found, fixed=max(counted.fixed, *over))


def kept_bytes(ops: Sequence[MeasuredOp], each: SegmentBytes) -> np.ndarray:
    """What the ops' segments keep by ``each``, float64 [ops]."""
    return np.asarray([each.kept(op.layers) * op.tokens for op in ops])


def _keeps(op: MeasuredOp) -> bool:
    """Whether the op builds its segment's activations while it runs."""
    return op.kind == "recompute" or op.kept_bytes is not None


def _counts(op: MeasuredOp) -> np.ndarray:
    """In the order of ``PassSeconds``."""
    return np.asarray(
        [op.layers * op.tokens, op.layers * op.pairs, op.tokens, op.edges, op.layers, 1.0], dtype=np.float64
    )
