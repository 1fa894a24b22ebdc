"""Reads and writes rollouts as Parquet with pyarrow, one row group in memory at a time.

``SCHEMA`` has the types that are written; on reading, any integer or float width, large lists and large strings are
accepted, too. Pages carry checksums, so a damaged file is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.core.rollouts.record import (
    FIELD_NAMES,
    REQUIRED_FIELDS,
    Rollout,
    check_field_names,
    field_error,
    printable,
    rollout_from_fields,
    row_error,
)

SCHEMA = pa.schema(
    [
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("trajectory_id", pa.string()),
        pa.field("policy_version", pa.int64()),
        pa.field("token_versions", pa.list_(pa.int64())),
        pa.field("routed_experts", pa.list_(pa.int16())),
        pa.field("segment_ends", pa.list_(pa.int32())),
        pa.field("branches", pa.list_(pa.int32())),
        pa.field("segment_rewards", pa.list_(pa.float32())),
        pa.field("leaf_weight", pa.float64()),
        pa.field("fallback", pa.bool_()),
        pa.field("teacher", pa.string()),
    ]
)
ROW_GROUP_TOKENS = 1 << 22
READ_ROWS = 256


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def _is_list(name: str) -> bool:
    return types.is_list(SCHEMA.field(name).type)


def _accepted(name: str) -> tuple[Callable[[pa.DataType], bool], str]:
    """The check of a field's type, or of the type of a list's entries, and the words for what it must be."""
    if name == "fallback":
        return types.is_boolean, "boolean"
    if name == "loss_mask":
        return (lambda kind: types.is_boolean(kind) or types.is_integer(kind)), "list of booleans"
    kind = SCHEMA.field(name).type
    entry = kind.value_type if _is_list(name) else kind
    check, word = (types.is_integer, "integer") if types.is_integer(entry) else (_is_text, "string")
    if types.is_floating(entry):
        check, word = (lambda kind: types.is_floating(kind) or types.is_integer(kind)), "number"
    return check, f"list of {word}s" if _is_list(name) else word


def read_parquet(path: Path) -> Iterator[tuple[int, Rollout]]:
    """Yield (row, rollout), with rows counted from 1; raises ``InputError`` at an invalid column, row or page."""
    row = 0
    file = decode_parquet(path, row, lambda: pq.ParquetFile(path, page_checksum_verification=True))
    with file:
        _check_schema(path, decode_parquet(path, row, lambda: file.schema_arrow))
        batches = decode_parquet(path, row, lambda: file.iter_batches(batch_size=READ_ROWS))
        while (batch := decode_parquet(path, row, lambda: next(batches, None))) is not None:
            columns = {
                name: decode_parquet(path, row, lambda name=name: _column(name, batch.column(name)))
                for name in batch.schema.names
            }
            for i in range(batch.num_rows):
                row += 1
                try:
                    rollout = rollout_from_fields({name: cell(i) for name, cell in columns.items()})
                except InputError as error:
                    raise row_error(path, row, error) from None
                yield row, rollout


def write_parquet(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write row groups of about ``ROW_GROUP_TOKENS`` tokens."""
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, compression="zstd", write_page_checksum=True) as writer,
    ):
        rows: list[Rollout] = []
        tokens = 0
        for rollout in rollouts:
            rows.append(rollout)
            tokens += len(rollout)
            if tokens >= ROW_GROUP_TOKENS:
                writer.write_table(_table(rows))
                rows, tokens = [], 0
        if rows:
            writer.write_table(_table(rows))


def decode_parquet(path: Path, rows_read: int, call: Callable[[], Any]) -> Any:
    """Return ``call()``; Arrow raises many types of errors on damaged files, and all become an ``InputError``."""
    try:
        return call()
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = printable(str(error).split("\n")[0], limit=160)
        message = f"{path}: cannot be read as Parquet after row {rows_read}"
        raise InputError(f"{message} (cut short or damaged): {reason}") from None


def _check_schema(path: Path, schema: pa.Schema) -> None:
    try:
        check_field_names(schema.names)
        for name in REQUIRED_FIELDS:
            if name not in schema.names:
                raise field_error(name, "missing; there is no such column")
        for name, kind in zip(schema.names, schema.types, strict=True):
            if schema.names.count(name) > 1:
                raise field_error(name, "given twice")
            (test, what), is_list, entry = _accepted(name), _is_list(name), kind
            if is_list and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
                entry = kind.value_type
            elif is_list and not types.is_null(kind):
                entry = None
            if not types.is_null(kind) and (entry is None or not test(entry)):
                raise field_error(name, f"the column has type {printable(str(kind), 80)}, not {what}")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _column(name: str, column: pa.Array) -> Callable[[int], Any]:
    """A function of the row in the batch: the cell as an array (lists), a Python value, or None.

    The function raises if its list holds a null, so that the error names the row.
    """
    if types.is_null(column.type):
        return lambda i: None
    if not _is_list(name):
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        return column.to_pylist().__getitem__
    if types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    entries = column.values
    has_null = None if entries.null_count == 0 else entries.is_null().to_numpy(zero_copy_only=False)
    values = entries.fill_null(False if types.is_boolean(entries.type) else 0).to_numpy(zero_copy_only=False)

    def cell(i: int) -> np.ndarray | None:
        if not valid[i]:
            return None
        begin, end = offsets[i], offsets[i + 1]
        if has_null is not None and has_null[begin:end].any():
            raise field_error(name, f"entry {int(np.argmax(has_null[begin:end]))} is null")
        return values[begin:end]

    return cell


def _lists(arrays: list[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """The list column of ``arrays``, with null for None, without a Python object per token."""
    lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    present = [array for array in arrays if array is not None]
    values = pa.array(np.concatenate(present) if present else np.zeros(0), type=kind.value_type)
    missing = np.array([array is None for array in arrays])
    return pa.ListArray.from_arrays(
        pa.array(offsets), values, type=kind, mask=pa.array(missing) if missing.any() else None
    )


def _table(rollouts: list[Rollout]) -> pa.Table:
    columns = []
    for name in FIELD_NAMES:
        values = [getattr(rollout, name) for rollout in rollouts]
        kind = SCHEMA.field(name).type
        columns.append(_lists(values, kind) if _is_list(name) else pa.array(values, type=kind))
    return pa.Table.from_arrays(columns, schema=SCHEMA)
