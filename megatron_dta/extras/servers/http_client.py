"""Sends requests to several equal inference servers: retries and failover over ``common.http``.

    failure                                       reaction
    one that may pass (``common.http.session``)   retried after a growing, jittered pause; after the second failure of
                                                  a request on one server, on another server
    ... and the server fails its health check     the server is left out; all its requests move at once
    another status                                the request is wrong: raised at once, not retried
    a server has other weights than it should     left out (it was restarted, or another trainer uses it)

A server that was left out returns when its weights are next updated or, if no other server is left, when it proves to
have the current weights. Which server gets a request: ``server_pool``.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_dta.common.http.replies import (
    MOST_REPLY_BYTES,
    RefusedError,
    TimedOutError,
    TransientFailureError,
    message_in,
    parse_json,
)
from megatron_dta.common.http.session import HttpSession
from megatron_dta.core.rollouts.batch_source import RolloutError
from megatron_dta.extras.servers.http_settings import HttpSettings
from megatron_dta.extras.servers.pool.server_pool import Server, ServerPool

API_KEY_VARIABLE = "ROLLOUT_SERVER_API_KEY"

Answer = TypeVar("Answer")


class ServerError(RolloutError):
    """The servers could not do what was asked; the line names server, request and reason."""


class WrongWeightsError(Exception):
    """A server replied with other weights than those it was given last."""


@dataclass(eq=False)
class Place:
    """Where a request runs: its server, since when, and its name there, which is new for each attempt.

    Attributes:
        most_bytes: maximum length of the reply.
        avoid: a server that is chosen only if there is no other.
    """

    server: Server | None = None
    sent_at: float = 0.0
    name: str = ""
    most_bytes: int = MOST_REPLY_BYTES
    avoid: Server | None = None


class HttpClient(ServerPool):
    """Sends requests to servers of one kind.

    Attributes:
        http: sends them.
        closed: whether ``close`` was called.
        on_close: is called by it first.
        still_current: whether a server that was left out has the current weights and may get requests again.

    Args:
        urls: ``http://host:port``, each once.
        health_path: returns 200 to GET if the server can work.
        report: called with a line when a server is left out.

    Raises:
        InputError: a URL is invalid, or the package aiohttp is missing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        health_path: str,
        settings: HttpSettings | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.settings, self._health_path = settings or HttpSettings(), health_path
        super().__init__(urls, self.settings.max_requests, report)
        self.still_current: Callable[[Server], Awaitable[bool]] = _never
        self._name, self._numbers = uuid.uuid4().hex[:8], itertools.count()
        self._reviving = asyncio.Lock()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self.http = HttpSession("rollout servers", self.settings, API_KEY_VARIABLE)
        self.closed, self.on_close = False, lambda: None
        # Programs that end without closing their engine should leave no process behind.
        atexit.register(self.close)

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Run a coroutine on the client's loop; may be called from any thread."""
        return self.http.start(work)

    def close(self) -> None:
        """Close all connections and cancel open requests. May be called twice."""
        if not self.closed:
            self.closed = True
            atexit.unregister(self.close)
            self.on_close()
            self.http.close()

    async def post_anywhere(
        self,
        affinity: Hashable,
        path: str,
        body: Callable[[str], Mapping[str, Any]],
        read: Callable[[Any], Answer],
        label: str,
        place: Place,
    ) -> Answer:
        """POST to the affinity's server, or to another one if that one fails. Returns ``read`` of the JSON reply.

        Args:
            body: makes the request from its name.
            read: raises ``TransientFailureError`` for a reply of the wrong form and ``WrongWeightsError``.
            label: names the request in errors.
            place: its server and name are kept up to date.

        Raises:
            ServerError: no attempt succeeded.
        """
        failed_on: dict[str, int] = {} if place.avoid is None else {place.avoid.url: 2}
        for attempt in range(1, self.settings.attempts + 1):
            try:
                server = await self._sendable_server(affinity, failed_on)
                server.open_requests += 1
                # No name begins with another one: SGLang ends all requests whose names begin with a given one.
                place.name = f"{self._name}-{next(self._numbers)}."
                place.server, place.sent_at = server, time.monotonic()
                try:
                    return read(await self.exchange(server, path, body(place.name), place))
                finally:
                    server.open_requests -= 1
                    self.wake(1)
            except TransientFailureError as error:
                reason = str(error)
                failed_on[server.url] = failed_on.get(server.url, 0) + 1
                healthy = await self.is_healthy(server)
            except WrongWeightsError as error:
                reason, healthy = str(error), False
            except ServerError as error:
                raise ServerError(f"{label}: {error}") from error
            if not healthy:
                self.leave_out(server, reason)
            if attempt == self.settings.attempts:
                break
            self.counts.retried += 1
            if healthy:
                await self.http.pause(attempt)
        left = f"; {len(self.alive)} of {len(self.servers)} servers are left" if len(self.servers) > 1 else ""
        raise ServerError(f"{label}: failed {self.settings.attempts} times, the last time on {server}: {reason}{left}")

    @asynccontextmanager
    async def sending_held(self) -> AsyncIterator[None]:
        """``post_anywhere`` sends nothing inside; what is open stays open."""
        self._may_send.clear()
        try:
            yield
        finally:
            self._may_send.set()

    async def _sendable_server(self, affinity: Hashable, failed_on: Mapping[str, int]) -> Server:
        while True:
            await self._may_send.wait()
            server = await self.free_server(affinity, failed_on)
            if self._may_send.is_set():
                return server
            # The place is left to another request, which also waits.
            self.wake(1)

    async def ask(
        self,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        attempts: int | None = None,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        """Send one request to one server, with retries. Returns ``read`` of its reply as JSON, or as text if it is not
        JSON; ``read`` raises ``TransientFailureError`` for a reply of the wrong form.

        A timeout is not retried, since all servers would wait for it again.

        Raises:
            ServerError: the request failed or was refused.
        """

        async def attempt(number: int) -> Any:
            del number
            try:
                return read(await self.send(server, method, path, body, any_form=True))
            except TimedOutError as error:
                raise ServerError(f"{server}: {error}") from error

        attempts = attempts or self.settings.attempts
        try:
            return await self.http.retried(attempt, attempts, self._count_retry)
        except TransientFailureError as error:
            raise ServerError(f"{server}: {method} {path} failed {attempts} times: {error}") from error

    def _count_retry(self) -> None:
        self.counts.retried += 1

    async def find_healthy(self) -> list[Server]:
        """Check all servers, including those left out. Returns the healthy ones."""
        # The list may change meanwhile.
        servers = tuple(self.servers)
        healthy = await asyncio.gather(*(self.is_healthy(server) for server in servers))
        for server, is_healthy in zip(servers, healthy, strict=True):
            if not is_healthy:
                self.leave_out(server, server.problem or "fails its health check")
        return [server for server, is_healthy in zip(servers, healthy, strict=True) if is_healthy]

    async def _revived(self) -> list[Server]:
        """The servers that are healthy again with the current weights, after all of them were left out."""
        async with self._reviving:
            # Many requests may wait here; the first one tries for all.
            for attempt in range(1, self.settings.attempts + 1):
                if self.alive or self._is_lost:
                    break
                if attempt > 1:
                    await self.http.pause(attempt - 1)
                for server in self.servers:
                    if not server.alive and await self.is_healthy(server) and await self._has_current_weights(server):
                        self.take_back(server)
            self._is_lost = not self.alive
        if self._is_lost:
            problems = "; ".join(f"{server}: {server.problem}" for server in self.servers)
            raise ServerError(f"no rollout server is left ({problems})")
        return self.alive

    async def _has_current_weights(self, server: Server) -> bool:
        try:
            return await self.still_current(server)
        except ServerError as error:
            server.problem = str(error)
            return False

    async def is_healthy(self, server: Server) -> bool:
        """Whether a server answers its health check."""
        async with server.checking:
            try:
                await self.http.send("GET", server.url, self._health_path, timeout_s=self.settings.connect_timeout_s)
                return True
            except (TransientFailureError, RefusedError) as error:
                server.problem = server.problem or str(error)
                return False

    async def exchange(self, server: Server, path: str, body: Mapping[str, Any], place: Place) -> Any:
        """One attempt of ``post_anywhere``; returns what its ``read`` takes."""
        return await self.send(server, "POST", path, body, place.most_bytes)

    async def send(
        self,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        most_bytes: int = MOST_REPLY_BYTES,
        any_form: bool = False,
    ) -> Any:
        """Send one request once; returns its reply. Raises ``TransientFailureError`` or ``ServerError``."""
        try:
            content = await self.http.send(method, server.url, path, body, most_bytes)
        except RefusedError as error:
            raise ServerError(f"{server}: {error}") from error
        try:
            return parse_json(content)
        except TransientFailureError as error:
            raise TransientFailureError(f"{method} {path}: {error}") from error
        except ValueError as error:
            if any_form:
                return content.decode(errors="replace")
            raise TransientFailureError(f"{method} {path}: the reply is not JSON: {message_in(content)}") from error


async def _never(server: Server) -> bool:
    return False
