"""Reads rows of JSONL, JSON and Parquet files as dictionaries with any fields: prompts, conversations, preferences.

A Parquet row gives the same dictionary as the equivalent JSONL row, but for null fields: Arrow gives every struct of a
column the fields that any of them has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.lines import numbered_lines
from megatron_dta.core.rollouts.record import row_error

_READ_ROWS = 1024


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row, fields); raises ``InputError`` at an invalid row.

    Rows are counted from 1: lines of JSONL, objects of a JSON array.
    """
    try:
        yield from (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def field_names(path: Path) -> set[str]:
    """Names of the first row's fields; empty if the file cannot be read, which ``read_rows`` reports."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return set(pyarrow.parquet.read_schema(path).names)
        return set(next(read_rows(path))[1])
    except Exception:  # Arrow raises many kinds
        return set()


def value_at(record: dict[str, Any], key: str) -> Any:
    """The field ``key``; if there is none, the nested field that ``key`` names with dots; otherwise None."""
    if key in record:
        return record[key]
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def named_value(record: dict[str, Any], key: str, flag: str) -> Any:
    """``value_at``; ``InputError`` if there is none."""
    value = value_at(record, key)
    if value is None:
        raise InputError(f"has no field '{key}', which {flag} names")
    return value


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one in each line, or of a JSON array."""
    lines = ((row, line) for row, line in numbered_lines(path) if not line.isspace())
    first = next(lines, None)
    if first is None:
        return
    if first[1].lstrip().startswith(b"["):
        content = b"".join([first[1], *(line for _, line in lines)])
        for row, value in enumerate(_parsed(path, first[0], content), start=1):
            yield row, _object(path, row, value)
        return
    for row, line in chain([first], lines):
        yield row, _object(path, row, _parsed(path, row, line))


def _parsed(path: Path, row: int, text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise row_error(path, row, f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        cut = "" if text.endswith(b"\n") else "; the file seems cut short here"
        raise row_error(path, row, f"not valid JSON: {error}{cut}") from None


def _object(path: Path, row: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise row_error(path, row, f"must be a JSON object, got {type(value).__name__}")
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    # Imported on use, because it takes half a second.
    import pyarrow.parquet

    from megatron_dta.core.rollouts.parquet import decode_parquet

    row = 0
    with decode_parquet(path, row, lambda: pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)) as file:
        batches = decode_parquet(path, row, lambda: file.iter_batches(batch_size=_READ_ROWS))
        while (batch := decode_parquet(path, row, lambda: next(batches, None))) is not None:
            for record in decode_parquet(path, row, batch.to_pylist):
                row += 1
                yield row, record
