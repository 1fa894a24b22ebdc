"""Reads the bodies of requests within limits of size, time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from megatron_dta.extras.agents.gateway.errors import RequestError

SECONDS_TO_SEND = 60.0


@dataclass(eq=False)
class _Arriving:
    """A body that is being read.

    Attributes:
        size: bytes so far.
        limit: ends the reading when it is rescheduled.
    """

    owner: Any
    limit: asyncio.Timeout
    size: int = 0
    is_given_up: bool = False


class BodyBudget:
    """Memory for bodies that are being read, of all connections together.

    If there is too little, the body that has been arriving longest is given up, so that unfinished ones do not keep
    others out.

    Args:
        most: bytes of all.
        most_of_owner: bytes of those of one session; None: no limit of its own.
    """

    def __init__(self, most: int, most_of_owner: int | None = None) -> None:
        self._most, self._most_of_owner = most, most_of_owner
        self._arriving: list[_Arriving] = []

    @asynccontextmanager
    async def reading(self, owner: Any) -> AsyncIterator[_Arriving]:
        """A body of ``owner`` while it is read; ``RequestError`` 408 or 503 if it is given up."""
        body = None
        try:
            async with asyncio.timeout(SECONDS_TO_SEND) as limit:
                body = _Arriving(owner, limit)
                self._arriving.append(body)
                yield body
        except TimeoutError:
            if body.is_given_up:
                raise RequestError(503, "too many unfinished requests; send the body at once, and again") from None
            raise RequestError(408, f"the body did not come within {SECONDS_TO_SEND:g} s") from None
        finally:
            if body in self._arriving:
                self._arriving.remove(body)

    def take(self, body: _Arriving, size: int) -> None:
        """Count ``size`` more bytes of a body; ``RequestError`` 429 if its owner has too many."""
        if body.is_given_up:
            # Its task has not been told yet.
            return
        body.size += size
        of_owner = sum(other.size for other in self._arriving if other.owner is body.owner)
        if self._most_of_owner is not None and of_owner > self._most_of_owner:
            raise RequestError(429, f"the session sends more than {self._most_of_owner} bytes at once; send less")
        while sum(other.size for other in self._arriving) > self._most:
            oldest = self._arriving.pop(0)
            oldest.is_given_up = True
            oldest.limit.reschedule(asyncio.get_running_loop().time())


async def limited_body(request: Request, most: int, budget: BodyBudget, owner: Any = None) -> bytes:
    """The body of a request; ``RequestError`` 413 as soon as it is known to be longer than ``most`` bytes."""
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared[:20]) > most:
        raise RequestError(413, f"the body is longer than {most} bytes, the most that is read")
    pieces: list[bytes] = []
    async with budget.reading(owner) as body:
        async for piece in request.stream():
            if body.size + len(piece) > most:
                raise RequestError(413, f"the body is longer than {most} bytes, the most that is read")
            budget.take(body, len(piece))
            pieces.append(piece)
    return b"".join(pieces)
