"""Arrays as bytes for messages between processes: one line of JSON, then the arrays' bytes one after another.

    {"arrays": [["token_ids", "int32", [7]], ["mask", "bool", [7]]]}\n<28 bytes><7 bytes>

Nothing is executed and nothing expands: the bytes are exactly those that the first line announces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np

_DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64")
_MOST_HEADER, _MOST_DIMENSIONS, _LARGEST = 1 << 16, 8, 1 << 48


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The message with these arrays."""
    header = {"arrays": [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]}
    return b"".join([json.dumps(header).encode(), b"\n", *(np.ascontiguousarray(a).tobytes() for a in arrays.values())])


def unpack(message: bytes | bytearray) -> dict[str, np.ndarray]:
    """The arrays of a message; ``ValueError`` says what is wrong with it."""
    end = message.find(b"\n", 0, _MOST_HEADER)
    arrays: dict[str, np.ndarray] = {}
    at = end + 1
    for name, dtype, shape in _entries(message[: max(end, 0)]):
        if dtype not in _DTYPES or name in arrays:
            raise ValueError(f"array {name[:40]!r}: must come once and have a dtype of {', '.join(_DTYPES)}")
        count = math.prod(shape)
        size = count * np.dtype(dtype).itemsize
        if size > len(message) - at:
            raise ValueError(f"array {name[:40]!r}: the message ends before it does")
        array = np.frombuffer(message, dtype, count, at) if count else np.zeros(0, dtype)
        if dtype == "bool" and count and array.view(np.uint8).max() > 1:
            raise ValueError(f"array {name[:40]!r}: a bool must be 0 or 1")
        arrays[name] = array.reshape(shape)
        at += size
    if at != len(message):
        raise ValueError("the message continues after its arrays")
    return arrays


def _entries(header: bytes | bytearray) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each array that the first line announces."""
    try:
        entries = json.loads(header)["arrays"]
        for name, dtype, shape in entries:
            if type(name) is not str or type(dtype) is not str or len(shape) > _MOST_DIMENSIONS:
                raise ValueError
            if type(shape) is not list or not all(type(size) is int and 0 <= size <= _LARGEST for size in shape):
                raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("the message has no first line that describes its arrays") from None
    return [(name, dtype, shape) for name, dtype, shape in entries]
