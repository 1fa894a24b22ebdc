"""Fits the cost model to measured segments: non-negative least squares, every op weighted by what it should take.

Each measured op is a sum of coefficients times counts (``PassSeconds``): a forward's, a backward's, or both where a
backward began with a second forward. All are fitted together, every op weighted by the inverse of its predicted time,
since a step may be made of long segments or of short ones (the measured time as the weight would favour ops that
happened to be fast). What a layer adds is told from what happens once by measuring models
of different depths. Bytes are fitted in the same way and then raised until nothing that was measured exceeds them: a
plan must fit, so they may only err on the high side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_dta.planning.cost_file import PassSeconds
from megatron_dta.planning.segment_bytes import SegmentBytes

_TOLERANCE = 1e-10
_REWEIGHTED = 6
_OUTLIER = 0.2  # Relative error from which an op counts as one.


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
    half = len(fields(PassSeconds))
    rows = np.zeros((len(ops), 2 * half))
    for row, op in zip(rows, ops, strict=True):
        if op.kind != "backward":
            row[:half] = _counts(op)
        if op.kind != "forward":
            row[half:] = _counts(op)
    seconds = np.asarray([op.seconds for op in ops])
    weight = 1 / seconds
    for _ in range(_REWEIGHTED):
        found = nonnegative_least_squares(rows * weight[:, None], seconds * weight)
        expected = np.maximum(rows @ found, 1e-3 * seconds)
        # An op that something else on the machine held up counts less (Huber's weights).
        error = np.maximum(np.abs(seconds / expected - 1), _OUTLIER)
        weight = np.sqrt(_OUTLIER / error) / expected
    return PassSeconds(*found[:half].tolist()), PassSeconds(*found[half:].tolist())


def predicted(ops: Sequence[MeasuredOp], forward: PassSeconds, backward: PassSeconds) -> np.ndarray:
    """Seconds of each op by the coefficients, float64 [ops]."""
    of_pass = [np.asarray([getattr(each, field.name) for field in fields(each)]) for each in (forward, backward)]
    passes = {"forward": of_pass[:1], "backward": of_pass[1:], "recompute": of_pass}
    return np.asarray([sum(float(_counts(op) @ each) for each in passes[op.kind]) for op in ops])


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
    """Bytes from the ops that measured them; K, V and inputs, which are known exactly, are those ``counted``.

    None if nothing was measured. No measured op takes more than the result says.
    """
    kept = [op for op in ops if op.kept_bytes is not None]
    if not kept:
        return None
    columns = np.asarray([[op.layers * op.tokens, op.tokens] for op in kept], dtype=np.float64)
    left = np.asarray([op.kept_bytes for op in kept], dtype=np.float64)
    weight = 1 / np.maximum(left, 1.0)
    per_token = nonnegative_least_squares(columns * weight[:, None], left * weight)
    per_token *= max(1.0, float((left / np.maximum(columns @ per_token, 1.0)).max()))
    found = replace(counted, kept_per_token_and_layer=float(per_token[0]), kept_per_token=float(per_token[1]))
    # What an op needs beyond the activations of its segment, which a backward of a kept one finds there.
    ran = [op for op in ops if op.peak_bytes is not None]
    room = np.asarray(
        [op.peak_bytes - (op.kind != "backward" and _keeps(op)) * found.kept(op.layers) * op.tokens for op in ran]
    )
    columns = np.asarray([[op.tokens, op.path_tokens, 1] for op in ran], dtype=np.float64)
    work = nonnegative_least_squares(columns, np.maximum(room, 0.0))
    work[2] += max(0.0, float((room - columns @ work).max()))
    return replace(found, work_per_token=float(work[0]), work_per_path_token=float(work[1]), work_fixed=float(work[2]))


def _keeps(op: MeasuredOp) -> bool:
    """Whether the op builds its segment's activations while it runs."""
    return op.kind == "recompute" or op.kept_bytes is not None


def _counts(op: MeasuredOp) -> np.ndarray:
    """In the order of ``PassSeconds``."""
    return np.asarray(
        [op.layers * op.tokens, op.layers * op.pairs, op.layers, op.tokens, op.edges, 1.0], dtype=np.float64
    )
