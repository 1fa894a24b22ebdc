"""Reads and writes rollouts as JSONL: one JSON object per line, whose keys are fields of the record.

Blank lines are skipped. float32 values are written with all digits of their double, so reading gives the same float32.
NaN and infinities, which JSON lacks, are neither written nor accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.core.rollouts.lines import numbered_lines
from megatron_dta.core.rollouts.record import (
    FIELD_NAMES,
    Rollout,
    check_field_names,
    field_error,
    rollout_from_fields,
    row_error,
)


def read_jsonl(path: Path) -> Iterator[tuple[int, Rollout]]:
    """Yield (line, rollout), with lines counted from 1; raises ``InputError`` at the first invalid line."""
    for row, line in numbered_lines(path):
        if line.isspace():
            continue
        try:
            rollout = rollout_from_fields(_parse(line))
        except InputError as error:
            raise row_error(path, row, error) from None
        yield row, rollout


def write_jsonl(path: Path, rollouts: Iterable[Rollout]) -> None:
    """Write one line per rollout, without the fields that are None."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            file.write(json.dumps(_fields(rollout), allow_nan=False, separators=(", ", ": ")) + "\n")


def _fields(rollout: Rollout) -> dict[str, Any]:
    values = {name: getattr(rollout, name) for name in FIELD_NAMES}
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in values.items()
        if value is not None
    }


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise field_error(next(name for name in names if names.count(name) > 1), "given twice")
    return values


def _parse(line: bytes) -> dict[str, Any]:
    """The JSON object of one line, with checked keys."""
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=_unique_keys)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else "; the file seems cut short here"
        raise InputError(f"is not JSON: {error.msg} at column {error.colno}{cut}") from None
    except RecursionError:
        raise InputError("is not a record: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"is not JSON that can be read: {str(error).splitlines()[0]}") from None
    if not isinstance(record, dict):
        raise InputError(f"is not a JSON object but {type(record).__name__}")
    check_field_names(record)
    return record
