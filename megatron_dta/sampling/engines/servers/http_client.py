"""HTTP to several equal inference servers: pooled connections, time-outs, retries, and no more to a server that died.

The library is aiohttp, because many hundreds of long requests are open at once: 3,000 requests, 512 of them open, took
1.2 s of CPU time with it and 27 s with httpx; the standard library has no asynchronous client, and threads (urllib3)
need one for each open request. The event loop has a thread of its own, so callers need not be asynchronous.

    what fails                                    what happens
    connection, time-out, 408, 429, 5xx,          tried again after a growing, jittered pause; after the second failure
    a reply cut short, too long or of the wrong   of a request on one server by another server
    form
    ... and the server fails its health check     the server is left out; all its requests move at once
    another status                                the request is wrong: told at once, not tried again
    a server has other weights than it should     left out (it was restarted, or another trainer uses it)

There are no redirects, no cookies and no compressed replies: nothing is sent to an address that was not given, and what
a reply takes in memory is what was asked for at most.

A server that was left out comes back when its weights are next updated, or, where no other is left, if it proves to
have the current weights. Requests with the same ``affinity`` go to the same server while it lives, so that its prefix
cache serves them; a new affinity goes to the server with the least to do.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_dta.common.errors import InputError
from megatron_dta.rollouts.batch_source import RolloutError
from megatron_dta.sampling.engines.servers.http_settings import HttpSettings, checked_urls
from megatron_dta.sampling.engines.servers.replies import (
    MOST_ERROR_BYTES,
    MOST_REPLY_BYTES,
    TransientFailureError,
    message_in,
    parse_json,
    read_at_most,
    told,
)

API_KEY_VARIABLE = "ROLLOUT_SERVER_API_KEY"
_TRANSIENT = frozenset((408, 429))

Answer = TypeVar("Answer")


class ServerError(RolloutError):
    """The servers could not do what was asked; one line naming server, request and reason."""


class TimedOutError(TransientFailureError):
    """There was no reply within the time that one attempt has."""


class WrongWeightsError(Exception):
    """A server answered with other weights than it was given last."""


@dataclass
class Server:
    """One server and what is known of it."""

    url: str
    alive: bool = True
    problem: str = ""
    open_requests: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return self.url


@dataclass
class Counts:
    """What went wrong so far."""

    retried: int = 0
    moved: int = 0
    servers_lost: int = 0


class HttpClient:
    """Talks to servers of one kind.

    Attributes:
        servers: all of them, in the order given.
        counts: failures so far.
        still_current: asked before a server that was left out gets requests again while its weights are not updated.

    Args:
        urls: ``http://host:port``, each once.
        health_path: answers 200 to GET where the server can work.
        report: gets a line when a server is left out.

    Raises:
        InputError: a URL that is none, or the package aiohttp is missing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        health_path: str,
        settings: HttpSettings | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise InputError(
                "rollout servers need the package aiohttp; install it, or megatron_dta with its extra servers"
            ) from error
        self._aiohttp = aiohttp
        self.settings, self._health_path, self._report = settings or HttpSettings(), health_path, report
        self.servers = [Server(url) for url in checked_urls(urls)]
        for server in self.servers:
            server.slots = asyncio.Semaphore(self.settings.max_requests)
        self.counts = Counts()
        self.still_current: Callable[[Server], Awaitable[bool]] = _never
        # Not the global generator: its state belongs to checkpoints.
        self._random = random.Random()
        self._homes: dict[Hashable, Server] = {}
        self._reviving, self._is_lost = asyncio.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout servers", daemon=True)
        self._thread.start()
        self._session = self.start(self._open_session()).result()
        self._closed = False
        # What ends before it has closed its engine should not leave a page of warnings.
        atexit.register(self.close)

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Run a coroutine on the client's loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin_phase(self) -> None:
        """Requests to come choose their servers anew, and wait anew for lost ones; call while none is open."""
        self._homes.clear()
        self._is_lost = False

    def close(self) -> None:
        """Close all connections; what is open is cancelled. May be called twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.start(self._close_session()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def post_anywhere(
        self,
        affinity: Hashable,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Answer],
        label: str,
        most_bytes: int = MOST_REPLY_BYTES,
    ) -> Answer:
        """POST to the affinity's server, or to another if that one fails; what ``read`` makes of the JSON reply.

        Args:
            read: raises ``TransientFailureError`` for a reply of the wrong form and ``WrongWeightsError``.
            label: names the request in errors.
            most_bytes: a longer reply is of the wrong form.

        Raises:
            ServerError: no attempt succeeded.
        """
        failed_on: dict[str, int] = {}
        for attempt in range(1, self.settings.attempts + 1):
            try:
                server = await self._home(affinity, failed_on)
                async with server.slots:
                    server.open_requests += 1
                    try:
                        return read(await self._send(server, "POST", path, body, most_bytes))
                    finally:
                        server.open_requests -= 1
            except TransientFailureError as error:
                reason = str(error)
                failed_on[server.url] = failed_on.get(server.url, 0) + 1
                healthy = await self._is_healthy(server)
            except WrongWeightsError as error:
                reason, healthy = str(error), False
            except ServerError as error:
                raise ServerError(f"{label}: {error}") from error
            if not healthy:
                self._leave_out(server, reason)
            if attempt == self.settings.attempts:
                break
            self.counts.retried += 1
            if healthy:
                await self.pause(attempt)
        left = f"; {len(self._alive())} of {len(self.servers)} servers are left" if len(self.servers) > 1 else ""
        raise ServerError(f"{label}: failed {self.settings.attempts} times, the last time on {server}: {reason}{left}")

    async def ask(
        self,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        attempts: int | None = None,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        """One request to one server, tried again there if need be; what ``read`` makes of the JSON of its reply (of the
        text where it is no JSON). It raises ``TransientFailureError`` for a reply of the wrong form.

        What has timed out is not tried again: it would hold up all servers for as long once more.

        Raises:
            ServerError: it failed, or was refused.
        """
        attempts = attempts or self.settings.attempts
        for attempt in range(1, attempts + 1):
            try:
                return read(await self._send(server, method, path, body, any_form=True))
            except TimedOutError as error:
                raise ServerError(f"{server}: {error}") from error
            except TransientFailureError as error:
                reason = str(error)
            if attempt < attempts:
                self.counts.retried += 1
                await self.pause(attempt)
        raise ServerError(f"{server}: {method} {path} failed {attempts} times: {reason}")

    async def find_healthy(self) -> list[Server]:
        """Check all servers, also those left out before; the healthy ones."""
        healthy = await asyncio.gather(*(self._is_healthy(server) for server in self.servers))
        for server, is_healthy in zip(self.servers, healthy, strict=True):
            if not is_healthy:
                self._leave_out(server, server.problem or "fails its health check")
        return [server for server, is_healthy in zip(self.servers, healthy, strict=True) if is_healthy]

    def leave_out(self, server: Server, reason: str) -> None:
        """Send nothing more to a server; call on the client's loop."""
        self._leave_out(server, reason)

    def take_back(self, server: Server) -> None:
        """A server that was left out may have requests again."""
        server.alive, server.problem, self._is_lost = True, "", False

    def _alive(self) -> list[Server]:
        return [server for server in self.servers if server.alive]

    async def _home(self, affinity: Hashable, failed_on: Mapping[str, int]) -> Server:
        """The server for a request: its affinity's, unless that one is left out or failed it twice."""
        candidates = self._alive() or await self._revived()
        home = self._homes.get(affinity)
        usable = [server for server in candidates if failed_on.get(server.url, 0) < 2] or candidates
        if home in usable:
            return home
        if home is not None:
            self.counts.moved += 1
        chosen = min(usable, key=lambda server: (server.open_requests, self._number_of_homes(server)))
        if home is None or not home.alive:
            self._homes[affinity] = chosen
        return chosen

    def _number_of_homes(self, server: Server) -> int:
        return sum(home is server for home in self._homes.values())

    async def _revived(self) -> list[Server]:
        """All servers are left out: those that are healthy again with the current weights, within the attempts."""
        async with self._reviving:
            # Of the many requests that wait here the first one tries, for all.
            for attempt in range(1, self.settings.attempts + 1):
                if self._alive() or self._is_lost:
                    break
                if attempt > 1:
                    await self.pause(attempt - 1)
                for server in self.servers:
                    if not server.alive and await self._is_healthy(server) and await self._has_current_weights(server):
                        self.take_back(server)
            self._is_lost = not self._alive()
        if self._is_lost:
            problems = "; ".join(f"{server}: {server.problem}" for server in self.servers)
            raise ServerError(f"no rollout server is left ({problems})")
        return self._alive()

    async def _has_current_weights(self, server: Server) -> bool:
        try:
            return await self.still_current(server)
        except ServerError as error:
            server.problem = str(error)
            return False

    def _leave_out(self, server: Server, reason: str) -> None:
        if not server.alive:
            return
        server.alive, server.problem = False, reason
        self.counts.servers_lost += 1
        self._report(f"rollout server {server} is left out: {reason}")

    async def _is_healthy(self, server: Server) -> bool:
        async with server.checking:
            timeout = self._aiohttp.ClientTimeout(total=self.settings.connect_timeout_s)
            try:
                address = server.url + self._health_path
                async with (
                    asyncio.timeout(self.settings.connect_timeout_s),
                    self._session.get(address, timeout=timeout, allow_redirects=False) as reply,
                ):
                    if reply.status == 200:
                        return True
                    server.problem = server.problem or f"GET {self._health_path} gives {reply.status}"
            except (self._aiohttp.ClientError, TimeoutError, OSError) as error:
                server.problem = server.problem or f"GET {self._health_path}: {told(error)}"
            return False

    async def _send(
        self,
        server: Server,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        most_bytes: int = MOST_REPLY_BYTES,
        any_form: bool = False,
    ) -> Any:
        """One attempt; raises ``TransientFailureError`` or ``ServerError``."""
        request = f"{method} {path}"
        try:
            address = server.url + path
            # The library has a time-out of its own, which does not cover all that it waits for.
            async with (
                asyncio.timeout(self.settings.timeout_s),
                self._session.request(method, address, json=body, allow_redirects=False) as reply,
            ):
                status, coding = reply.status, reply.headers.get("Content-Encoding", "identity")
                parts = reply.content.iter_any()
                if status != 200:
                    content = await read_at_most(parts, MOST_ERROR_BYTES, cut=True)
                elif coding.lower() != "identity":
                    raise TransientFailureError("the reply is compressed, which was not asked for")
                else:
                    content = await read_at_most(parts, most_bytes)
        except TransientFailureError as error:
            raise TransientFailureError(f"{request}: {error}") from error
        except TimeoutError as error:
            if str(error):  # a connection that was not made
                raise TransientFailureError(f"{request}: {told(error)}") from error
            raise TimedOutError(f"{request}: no reply within {self.settings.timeout_s:g} s") from error
        except (self._aiohttp.ClientError, OSError) as error:
            raise TransientFailureError(f"{request}: {told(error)}") from error
        if status >= 500 or status in _TRANSIENT:
            raise TransientFailureError(f"{request} gives {status}: {message_in(content)}")
        if status != 200:
            raise ServerError(f"{server}: {request} is refused with {status}: {message_in(content)}")
        try:
            return parse_json(content)
        except TransientFailureError as error:
            raise TransientFailureError(f"{request}: {error}") from error
        except ValueError as error:
            if any_form:
                return content.decode(errors="replace")
            raise TransientFailureError(f"{request}: the reply is not JSON: {message_in(content)}") from error

    async def pause(self, attempt: int) -> None:
        """Wait before what follows attempt number ``attempt``."""
        longest = min(self.settings.backoff_s * 2 ** (attempt - 1), self.settings.backoff_limit_s)
        await asyncio.sleep(longest * (0.5 + 0.5 * self._random.random()))

    async def _open_session(self) -> Any:
        key = os.environ.get(API_KEY_VARIABLE)
        timeout = self._aiohttp.ClientTimeout(
            total=self.settings.timeout_s, sock_connect=self.settings.connect_timeout_s
        )
        return self._aiohttp.ClientSession(
            # How many are open at once is the servers' ``slots``' business.
            connector=self._aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            # A few bytes may decompress to any number of them.
            auto_decompress=False,
            cookie_jar=self._aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        )

    async def _close_session(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()


async def _never(server: Server) -> bool:
    return False
