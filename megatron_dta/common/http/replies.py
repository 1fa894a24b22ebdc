"""Reads replies of servers, which may be bytes of any length and JSON of any form, and checks them before use.

A server may be broken, misconfigured or malicious. A reply takes a bounded amount of memory and becomes a checked value
or a ``TransientFailureError``, whose line names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

from megatron_dta.core.common.errors import one_line

# Enough for the metrics of a server with many engines, and for its settings.
MOST_REPLY_BYTES = 16 << 20
MOST_ERROR_BYTES = 1 << 16
_MESSAGE_LENGTH = 300
_KINDS: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a whole number",
    (int, float): "a number",
    (int, str): "a string or a whole number",
}


class TransientFailureError(Exception):
    """An attempt failed, and another one may succeed."""


class TimedOutError(TransientFailureError):
    """There was no reply within the timeout of one attempt."""


class RefusedError(Exception):
    """A server refused a request, which is wrong."""


async def read_at_most(parts: AsyncIterator[bytes], most_bytes: int, cut: bool = False) -> bytearray:
    """The body that arrives in ``parts``; a longer one is an error, or is cut."""
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) > most_bytes and not cut:
            raise TransientFailureError(f"the reply is longer than {most_bytes} bytes")
        if len(content) > most_bytes:
            break
    del content[most_bytes:]
    return content


def parse_json(content: bytes | bytearray) -> Any:
    """The value; ``ValueError`` if it is not JSON, ``TransientFailureError`` for NaN, infinities and deep nesting."""

    def refuse(name: str) -> None:
        raise TransientFailureError(f"the reply has {name}, which is not a number in JSON")

    try:
        return json.loads(content, parse_constant=refuse)
    except RecursionError as error:
        raise TransientFailureError("the reply is nested too deeply") from error


def field_of(reply: Any, *path: str | int, kind: Any = object, optional: bool = False) -> Any:
    """The value at a path of keys and indices of a reply.

    Args:
        kind: one of ``_KINDS``; booleans are not numbers.
        optional: return None if a key is missing or a value on the path is null.
    """
    value = reply
    for depth, key in enumerate(path):
        if value is None and optional:
            return None
        _check_kind(value, list if isinstance(key, int) else dict, path[:depth])
        missing = key >= len(value) if isinstance(key, int) else key not in value
        if missing and optional:
            return None
        if missing:
            raise TransientFailureError(f"the reply has no {_joined(path[: depth + 1])}")
        value = value[key]
    if kind is not object and not (value is None and optional):
        _check_kind(value, kind, path)
    return value


def list_of(values: Any, kind: Any, name: str) -> list[Any]:
    """Check that ``values`` is a list of items of one kind, and return it."""
    if not isinstance(values, list):
        raise TransientFailureError(f"the reply's {name} must be a list, got {shown(values)}")
    kinds = set(kind) if isinstance(kind, tuple) else {kind}
    if kinds.issuperset(map(type, values)):
        return values
    for index, value in enumerate(values):
        if not _is(value, kind):
            raise TransientFailureError(f"the reply's {name}.{index} must be {_KINDS[kind]}, got {shown(value)}")
    return values


def as_float(value: float) -> float:
    """A JSON number as a float; infinite beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shown(value: Any) -> str:
    """A value from a reply for a message: short, printable, on one line."""
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):  # ValueError: a number with too many digits
        text = f"{type(value).__name__} that is too large to show"
    return shortened(text)


def message_in(content: bytes | bytearray) -> str:
    """The message in an error reply of any form, on one line."""
    text = content.decode(errors="replace")
    try:
        parsed = json.loads(text)
        for key in ("error", "message", "detail"):
            while isinstance(parsed, dict) and key in parsed:
                parsed = parsed[key]
        text = parsed if isinstance(parsed, str) else json.dumps(parsed)
    except (ValueError, RecursionError):
        pass
    return shortened(text) or "(nothing)"


def format_error(error: BaseException) -> str:
    """The message of an error, or its type."""
    return shortened(str(error)) or type(error).__name__


def shortened(text: str) -> str:
    """The beginning of a text on one printable line."""
    # Cut first, so that a long text is not cleaned as a whole.
    line = one_line(text[: 4 * _MESSAGE_LENGTH])
    return line if len(line) <= _MESSAGE_LENGTH else line[:_MESSAGE_LENGTH] + "..."


def _check_kind(value: Any, kind: Any, path: tuple[str | int, ...]) -> None:
    if not _is(value, kind):
        name = f"the reply's {_joined(path)}" if path else "the reply"
        raise TransientFailureError(f"{name} must be {_KINDS[kind]}, got {shown(value)}")


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _joined(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)
