"""Random edits of the replies of servers: of their values, their bytes, and of HTTP around them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

from rollouts_fuzz_cases import VALUES, damage

# JSON that no value of Python writes.
LITERALS = [
    "NaN", "-Infinity", "1e999", "-1e999", "-1" + "0" * 400, "1" + "0" * 400, "9" * 5000, "[" * 3000 + "]" * 3000,
    "[" * 300 + "]" * 300, '{"a":' * 2000 + "1" + "}" * 2000, "[" * 200_000, '"\\u0000\\u001b[2J"', "0x10", "{,}", "",
    "[" + "[]," * 100_000 + "[]]", '{"version": ["a"]}', '[{"version": null}]', "[7]", "1e-320", "-0.0",
    '"' + "a" * 100_000 + '"',
]  # fmt: skip
CODINGS = (b"br", b"zstd", b"deflate", b"x")
STATUSES = (201, 206, 304, 400, 401, 404, 418, 429, 500, 503)
MEMBER = gzip.compress(bytes(100 << 20))


def mutate(content: bytes, rng: random.Random, edits: list[str]) -> Iterator[bytes]:
    """What is sent in the place of a good reply with this body."""
    edit = rng.choice(edits)
    status, headers = b"HTTP/1.1 200 OK", [b"Content-Type: application/json"]
    if edit == "values":
        content = changed_values(content, rng)
    elif edit == "bytes":
        for _ in range(rng.randrange(1, 4)):
            content = damage(content or b"{}", rng)
    elif edit == "http":
        yield from changed_http(content, rng)
        return
    yield b"\r\n".join([status, *headers, b"Content-Length: %d" % len(content), b"", content])


def changed_values(content: bytes, rng: random.Random) -> bytes:
    """One or two values of a JSON body replaced, deleted, doubled or moved."""
    try:
        value = json.loads(content)
    except ValueError:
        value = {"reward": 0.5}
    literals = {}
    for edit in range(rng.randrange(1, 3)):
        literals |= _change_one(value, rng, f"@{edit}@")
    text = json.dumps(value)
    for name, literal in literals.items():
        text = text.replace(f'"{name}"', literal)
    return text.encode("utf-8", "surrogatepass")


def _change_one(value: Any, rng: random.Random, name: str) -> dict[str, str]:
    places = [(holder, key) for holder, key in _places(value)]
    if not places:
        return {}
    holder, key = rng.choice(places)
    edit = rng.randrange(6)
    if edit == 0:
        del holder[key]
    elif edit == 1:
        holder[key] = [holder[key]] * rng.choice((1, 2, 50))
    elif edit == 2:
        other, place = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[place])) if _has(other, place) else None
    elif edit == 3 and isinstance(holder[key], int | float):
        holder[key] = rng.choice((-1, 1, 2, 10, 2**31, 2**63, -(2**40), 0.5, 1e-3)) + holder[key]
    elif edit == 4:
        holder[key] = rng.choice(VALUES)
    else:
        holder[key] = name
        return {name: rng.choice(LITERALS)}
    return {}


def _has(holder: Any, key: Any) -> bool:
    return key in holder if isinstance(holder, dict) else key < len(holder)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def changed_http(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """A reply with a fault around its body."""
    length = b"Content-Length: %d\r\n" % len(content)
    ok = b"HTTP/1.1 200 OK\r\n"
    choices = [
        lambda: [ok, b"Content-Length: 999\r\n\r\n", content],
        lambda: [ok, b"Content-Length: 1%s\r\n\r\n" % (b"0" * 30), content],
        lambda: [ok, b"Content-Length: -5\r\n\r\n", content],
        lambda: [ok, b"Content-Length: x\r\n\r\n", content],
        lambda: [ok, length, length, b"Content-Length: 3\r\n\r\n", content],
        lambda: [ok, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", content],
        lambda: [ok, b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", content],
        lambda: [ok, b"Transfer-Encoding: chunked\r\n\r\n%s\r\n" % (b"f" * 40), content],
        lambda: [ok, b"Transfer-Encoding: chunked\r\n\r\n", *(b"1\r\n \r\n" for _ in range(3000)), b"0\r\n\r\n"],
        lambda: [ok, b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(MEMBER), MEMBER],
        lambda: [ok, b"Content-Encoding: %s\r\n" % rng.choice(CODINGS), length, b"\r\n", content],
        lambda: [ok, b"X: %s\r\n\r\n" % (b"a" * 100_000)],
        lambda: [ok, *(b"X-%d: 1\r\n" % i for i in range(20_000)), b"\r\n"],
        lambda: [b"HTTP/1.1 100 Continue\r\n\r\n" for _ in range(200)] + [ok, length, b"\r\n", content],
        lambda: [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", content],
        lambda: [b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"],
        lambda: [b"HTTP/1.1 204 No Content\r\n\r\n"],
        lambda: [b"HTTP/1.1 %d Odd\r\n" % rng.choice(STATUSES), length, b"\r\n", content],
        lambda: [b"HTTP/1.1 500 \x1b[2J\x00\r\nContent-Length: 6\r\n\r\n\x1b[31m\n"],
        lambda: [b"HTTP/1.1 99999 What\r\n\r\n"],
        lambda: [b"HTTP/9.9 200 OK\r\n", length, b"\r\n", content],
        lambda: [b"ICY 200 OK\r\n\r\n", content],
        lambda: [rng.randbytes(200)],
        lambda: [b"\r\n" * 2000],
        lambda: [b""],
        lambda: [ok, length, b"Set-Cookie: a=b; Domain=.\r\n\r\n", content, ok, length, b"\r\n", content],
        lambda: [ok, b"Content-Length: %d\r\n\r\n" % (17 << 20), *([b"[" * (1 << 20)] * 17)],
        lambda: [b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n" % (8 << 20), *([b"[" * (1 << 20)] * 8)],
        lambda: [ok, b"Content-Type: text/html; charset=\xff\xfe\r\n", length, b"\r\n", content],
        lambda: [ok, length, b"\r\n", content.decode("latin-1").encode("utf-16")],
    ]  # fmt: skip
    yield from rng.choice(choices)()
