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
_MOST_HEADER = 1 << 16


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The message with these arrays."""
    header = {"arrays": [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]}
    return b"".join([json.dumps(header).encode(), b"\n", *(np.ascontiguousarray(a).tobytes() for a in arrays.values())])


def unpack(message: bytes) -> dict[str, np.ndarray]:
    """The arrays of a message; ``ValueError`` says what is wrong with it."""
    end = message.find(b"\n", 0, _MOST_HEADER)
    try:
        entries = json.loads(message[: max(end, 0)])["arrays"]
        named = [(str(name), str(dtype), [int(size) for size in shape]) for name, dtype, shape in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("the message has no first line that describes its arrays") from None
    found, at = {}, end + 1
    for name, dtype, shape in named:
        if dtype not in _DTYPES or any(size < 0 for size in shape):
            raise ValueError(f"array {name[:40]!r}: dtype and shape must be one of {', '.join(_DTYPES)} and sizes")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > len(message) - at:
            raise ValueError(f"array {name[:40]!r}: the message ends before it does")
        found[name] = np.frombuffer(message, dtype, math.prod(shape), at).reshape(shape)
        at += size
    if at != len(message):
        raise ValueError("the message continues after its arrays")
    return found
