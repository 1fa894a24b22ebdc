"""Sends requests to several equal inference servers: balancing, retries and failover over ``common.http``.

    failure                                       reaction
    one that may pass (``common.http.session``)   retried after a growing, jittered pause; after the second failure of
                                                  a request on one server, on another server
    ... and the server fails its health check     the server is left out
    another status                                the request is wrong: raised at once, not retried
    a server has other weights than it should     left out (it was restarted, or another trainer uses it)

Requests with the same affinity go to the same server, which has their prefix in its cache; a new affinity goes to the
server with the fewest open requests. A request that finds all servers full waits for the next free slot of any.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_dta.common.http.replies import RefusedError, TimedOutError, TransientFailureError, parse_json
from megatron_dta.common.http.session import HttpSession, Limits, http_parts
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.sources.batch_source import RolloutError

API_KEY_VARIABLE = "ROLLOUT_SERVER_API_KEY"

Answer = TypeVar("Answer")


class ServerError(RolloutError):
    """The servers could not do what was asked; the line names server, request and reason."""


class WrongWeightsError(Exception):
    """A server replied with other weights than those it was given last."""


@dataclass(frozen=True)
class HttpSettings(Limits):
    """Timeouts and limits of requests; ``attempts`` are over all servers, and a health check takes at most
    ``connect_timeout_s``.

    Attributes:
        continues: running requests continue on new weights; see ``engine``.
        max_requests: maximum number of open requests per server.
        revisit_s: pause between visits to servers that are left out.
        long_tokens: requests for this number of tokens and more are sent by another process (``sender``); the reply to
            fewer is read in less time than it could be handed over.
    """

    max_requests: int = 256
    continues: bool = False
    revisit_s: float = 15.0
    long_tokens: int = 64


@dataclass(eq=False)
class Server:
    url: str
    client: HttpClient
    alive: bool = True
    problem: str = ""
    open_requests: int = 0

    def __str__(self) -> str:
        return self.url

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """See ``HttpClient.ask``."""
        return await self.client.ask(self, method, path, body, **options)


@dataclass
class Counts:
    retried: int = 0
    servers_lost: int = 0


class HttpClient:
    """Sends requests to servers of one kind. Coroutines run on its loop; other methods may be called from any thread.

    Attributes:
        servers: in the order of their URLs.
        counts: failures so far.
        closed: whether ``close`` was called.
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
        self.servers = [Server(url, self) for url in checked_urls(urls)]
        self.settings, self._health_path = settings or HttpSettings(), health_path
        self.counts, self.report = Counts(), report
        self.still_current: Callable[[Server], Awaitable[bool]] = _never
        self._homes: dict[Hashable, Server] = {}
        # Requests that wait until they may be sent, in their order.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_held, self._reviving = False, asyncio.Lock()
        self.http = HttpSession("rollout servers", self.settings, API_KEY_VARIABLE)
        self.closed = False

    @property
    def alive(self) -> list[Server]:
        """The servers that are not left out."""
        return [server for server in self.servers if server.alive]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a server."""
        return sum(not turn.done() for turn in tuple(self._waiting))

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Run a coroutine on the client's loop."""
        return self.http.start(work)

    def close(self) -> None:
        """Close all connections and cancel open requests. May be called twice."""
        self.closed = True
        self.http.close()

    def leave_out(self, server: Server, reason: str) -> None:
        """Send nothing more to a server; call on the client's loop."""
        if not server.alive:
            return
        server.alive, server.problem = False, reason
        self.counts.servers_lost += 1
        self._wake(len(self._waiting))
        self.report(f"rollout server {server} is left out: {reason}")

    def take_back(self, server: Server) -> None:
        """Let a server that was left out have requests again; call on the client's loop."""
        server.alive, server.problem = True, ""
        self._wake(len(self._waiting))

    async def anywhere(self, affinity: Hashable, exchange: Callable[[Server], Awaitable[Answer]], label: str) -> Answer:
        """The result of ``exchange`` with the affinity's server, or with another one if that one fails.

        Args:
            exchange: raises ``TransientFailureError``, ``WrongWeightsError`` and ``ServerError``.
            label: names the request in errors.

        Raises:
            ServerError: no attempt succeeded.
        """
        failed_on: Counter[str] = Counter()
        for attempt in range(1, self.settings.attempts + 1):
            try:
                async with self._slot(affinity, failed_on) as server:
                    return await exchange(server)
            except TransientFailureError as error:
                reason = str(error)
                failed_on[server.url] += 1
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
        """``anywhere`` sends nothing inside, where servers get new weights; what is open stays open."""
        self._is_held = True
        # Servers clear their caches with new weights.
        self._homes.clear()
        try:
            yield
        finally:
            self._is_held = False
            self._wake(len(self._waiting))

    @asynccontextmanager
    async def _slot(self, affinity: Hashable, failed_on: Mapping[str, int]) -> AsyncIterator[Server]:
        """Wait until a server may have another request, which it has inside."""
        while True:
            server = None if self._is_held else await self._free_server(affinity, failed_on)
            if server is not None and not self._is_held:
                break
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)
                raise
        server.open_requests += 1
        try:
            yield server
        finally:
            server.open_requests -= 1
            self._wake(1)

    def _wake(self, count: int) -> None:
        """Let waiting requests look for a server again."""
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    async def _free_server(self, affinity: Hashable, failed_on: Mapping[str, int]) -> Server | None:
        """The affinity's server if it may have another request and has not failed this one twice, else another one."""
        alive = self.alive or await self._revived()
        usable = [server for server in alive if failed_on.get(server.url, 0) < 2] or alive
        home = self._homes.get(affinity)
        if home not in usable:
            homes = Counter(self._homes.values())
            home = min(usable, key=lambda server: (server.open_requests, homes[server]))
            self._homes[affinity] = home
        # A full server's requests go to any other one rather than wait.
        others = sorted(usable, key=lambda server: server.open_requests) + alive
        return next((s for s in (home, *others) if s.open_requests < self.settings.max_requests), None)

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
                content = await self.http.send(method, server.url, path, body)
            except (TimedOutError, RefusedError) as error:
                raise ServerError(f"{server}: {error}") from error
            try:
                reply = parse_json(content)
            except TransientFailureError as error:
                raise TransientFailureError(f"{method} {path}: {error}") from error
            except ValueError:
                reply = content.decode(errors="replace")
            return read(reply)

        attempts = attempts or self.settings.attempts
        try:
            return await self.http.retried(attempt, attempts, self._count_retry)
        except TransientFailureError as error:
            raise ServerError(f"{server}: {method} {path} failed {attempts} times: {error}") from error

    def _count_retry(self) -> None:
        self.counts.retried += 1

    async def find_healthy(self) -> list[Server]:
        """Check all servers, including those left out. Returns the healthy ones."""
        healthy = await asyncio.gather(*(self.is_healthy(server) for server in self.servers))
        for server, is_healthy in zip(self.servers, healthy, strict=True):
            if not is_healthy:
                self.leave_out(server, server.problem or "fails its health check")
        return [server for server, is_healthy in zip(self.servers, healthy, strict=True) if is_healthy]

    async def is_healthy(self, server: Server) -> bool:
        """Whether a server answers its health check."""
        try:
            await self.http.send("GET", server.url, self._health_path, timeout_s=self.settings.connect_timeout_s)
            return True
        except (TransientFailureError, RefusedError) as error:
            server.problem = server.problem or str(error)
            return False

    async def _revived(self) -> list[Server]:
        """The servers that are healthy again with the current weights, after all of them were left out."""
        async with self._reviving:
            # Many requests may wait here; the first one tries for all.
            for attempt in range(1, self.settings.attempts + 1):
                if self.alive:
                    return self.alive
                if attempt > 1:
                    await self.http.pause(attempt - 1)
                for server in self.servers:
                    if await self.is_healthy(server) and await self._has_current_weights(server):
                        self.take_back(server)
        if not self.alive:
            problems = "; ".join(f"{server}: {server.problem}" for server in self.servers)
            raise ServerError(f"no rollout server is left ({problems})")
        return self.alive

    async def _has_current_weights(self, server: Server) -> bool:
        try:
            return await self.still_current(server)
        except ServerError as error:
            server.problem = str(error)
            return False


def checked_urls(urls: Sequence[str]) -> list[str]:
    """URLs without trailing slashes; ``InputError`` for none or a bad one."""
    checked = [url.rstrip("/") for url in urls]
    if not checked:
        raise InputError("--rollout-server-url: give at least one")
    for url in checked:
        parts = http_parts(url)
        if parts is None or parts.query:
            raise InputError(f"--rollout-server-url {url}: must be like http://HOST:PORT")
        if checked.count(url) > 1:
            raise InputError(f"--rollout-server-url {url}: is given twice")
    return checked


async def _never(server: Server) -> bool:
    return False
