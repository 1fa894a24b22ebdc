"""Fits a cost file again from the measurements that it holds, after the form of the cost model has changed.

The measurements and their hardware, software, date, command and commit stay unchanged. Coefficients, bytes and errors
are replaced, and ``refitted`` holds the date and commit of the new fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.file import CostFile, CostShape, read_measured, read_part, read_shape
from megatron_dta.planning.costs.fit import MeasuredOp, fit_bytes, fit_errors, fit_seconds
from megatron_dta.planning.costs.segment_bytes import RankTensors, SegmentBytes

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
KINDS = ("forward", "backward", "recompute")


def refit(path: str | Path, when: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the file at ``path`` with new coefficients.

    Args:
        when: contents of the field ``refitted``.

    Raises:
        InputError: one line that names the file and the fault.
    """
    values = read_measured(path)
    ops = _measurements(path, values)
    forward, backward = fit_seconds(ops)
    shape = read_shape(path, values)
    bytes_ = fit_bytes(ops, _counted(path, shape))
    found = CostFile(str(path), shape, values["num_layers"], forward, backward, bytes_)
    return values | found.as_json() | {"errors": fit_errors(ops, forward, backward), "refitted": dict(when)}


def _counted(path: str | Path, shape: CostShape) -> SegmentBytes:
    if shape.dtype not in ELEMENT_BYTES:
        raise InputError(f"{path}: shape.dtype must be one of {', '.join(ELEMENT_BYTES)}, not {shape.dtype}")
    rank = RankTensors(
        ELEMENT_BYTES[shape.dtype],
        shape.tensor_model_parallel_size,
        shape.sequence_parallel,
        expert_ranks=shape.expert_model_parallel_size,
        expert_tensor_size=shape.expert_tensor_parallel_size,
    )
    return SegmentBytes.of_shape(shape.decoder(), rank)


def _measurements(path: str | Path, values: Mapping[str, Any]) -> list[MeasuredOp]:
    """Read the file's measured ops; raises InputError unless they have the two depths of each pass that a fit needs."""
    given = values.get("measurements")
    if not isinstance(given, list) or not given:
        raise InputError(f"{path}: has no measurements to fit again; measure with megatron-dta fit-cost-model")
    ops = []
    for number, each in enumerate(given):
        # Bytes that were not measured are null.
        missing = {name for name in ("kept_bytes", "peak_bytes") if isinstance(each, dict) and each.get(name) is None}
        named = {"measurements": each | dict.fromkeys(missing, 0)} if isinstance(each, dict) else {}
        try:
            op = read_part(path, named, "measurements", MeasuredOp)
        except InputError as error:
            raise InputError(f"{error} (measurement {number})") from None
        if op.kind not in KINDS or not op.seconds or not op.tokens or not op.layers:
            raise InputError(f"{path}: measurement {number} is not a forward, backward or recompute that took time")
        ops.append(MeasuredOp(**asdict(op) | dict.fromkeys(missing)))
    for kind in KINDS[:2]:
        if len({op.layers for op in ops if op.kind == kind}) < 2:
            raise InputError(f"{path}: its measurements have no {kind}s of two depths; measure again")
    return ops
