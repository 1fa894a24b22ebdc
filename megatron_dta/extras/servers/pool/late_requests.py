"""Moves requests away from slow servers that are healthy: ends them there and continues them elsewhere.

The speed of a server is tokens per second of one of its requests, a moving average over its replies. A request is late
if its server is slower, by the factor ``slower_by``, than another one that has free places. Before a server's first
reply, a request is late if even at that lower speed all of its tokens would have been sampled by now. Servers reply to
a request that is ended with the tokens so far, which are kept. A request is moved once at most, and only while no other
one waits for a free place.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from megatron_dta.extras.servers.http_client import HttpClient, Place, Server, ServerError
from megatron_dta.extras.servers.protocol import Asked, ServerProtocol

_NEWEST = 0.2  # share of the newest reply in the average


@dataclass(eq=False, kw_only=True)
class Running(Place):
    """A request on a server.

    Attributes:
        asked: what its reply must belong to.
        label: of the newest weights when it was made.
        is_ended: whether it was ended, to be continued elsewhere.
        may_move: whether it may be, which it was not before.
        tokens: of its reply.
    """

    asked: Asked
    label: str
    is_ended: bool = False
    may_move: bool = True
    tokens: int = 0


class LateRequests:
    """Finds and ends late requests; all methods run on the client's loop."""

    def __init__(self, client: HttpClient, protocol: ServerProtocol) -> None:
        self._client, self._protocol = client, protocol
        self._running: set[Running] = set()
        self._speeds: dict[Server, float] = {}
        self._is_refused = False

    def begin(self, asked: Asked, label: str, before: Running | None) -> Running:
        """A request that is about to be sent; it continues ``before``, whose server it avoids if that is slow."""
        request = Running(asked=asked, label=label, most_bytes=asked.most_reply_bytes)
        if before is not None:
            request.may_move = before.may_move and not before.is_ended
            if before.is_ended or self.is_slow(before.server):
                request.avoid = before.server
        self._running.add(request)
        return request

    def end(self, request: Running) -> None:
        """Its reply has come, or it has failed for good."""
        self._running.discard(request)
        if request.tokens:
            speed = request.tokens / max(time.monotonic() - request.sent_at, 1e-6)
            before = self._speeds.get(request.server, speed)
            self._speeds[request.server] = before + _NEWEST * (speed - before)

    def is_slow(self, server: Server) -> bool:
        """Whether another server, which has a free place, is faster by the factor ``slower_by``."""
        best = self._best()
        return best is not None and self._speeds.get(server, best) * self._client.settings.slower_by < best

    def _best(self) -> float | None:
        """The highest speed of a server with free places; None if requests wait for one."""
        if self._client.num_waiting:
            return None
        free = [server for server in self._client.alive if self._client.has_place(server)]
        return max((self._speeds[server] for server in free if server in self._speeds), default=None)

    async def keep_moving(self) -> None:
        """From time to time, end late requests."""
        while True:
            await asyncio.sleep(self._client.settings.move_s)
            await self.move()

    async def move(self) -> None:
        """End the late requests of each server, the oldest half of its own at once."""
        best = self._best()
        if best is None or self._is_refused:
            return
        now, youngest = time.monotonic(), self._client.settings.move_s
        by_server: dict[Server, list[Running]] = {}
        for request in sorted(self._running, key=lambda request: request.sent_at):
            if request.server is not None and request.may_move and not request.is_ended:
                by_server.setdefault(request.server, []).append(request)
        for server, requests in by_server.items():
            slow = self.is_slow(server)
            longest = self._client.settings.slower_by / best
            needed = {each: youngest if slow else each.asked.max_tokens * longest for each in requests}
            late = [each for each in requests if now - each.sent_at > needed[each]]
            if server not in self._speeds or slow:
                await asyncio.gather(*(self._end(each) for each in late[: -(-len(requests) // 2)]))

    async def _end(self, request: Running) -> None:
        request.is_ended = True
        try:
            await self._protocol.end_request(request.server, request.name)
        except ServerError as error:
            request.is_ended = False
            if not self._is_refused:
                self._client.report(f"late requests stay where they are: {error}")
            self._is_refused = True
