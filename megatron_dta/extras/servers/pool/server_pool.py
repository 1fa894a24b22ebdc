"""The servers of a client, and which of them a request is sent to.

Requests with the same affinity go to the same server while it lives, so that they use its prefix cache; a new affinity
goes to the server with the fewest open requests. A request is given to a server only when it can be sent, so servers
that become idle, return or are new get requests that would otherwise wait for busy ones.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_dta.extras.servers.http_settings import checked_urls


@dataclass(eq=False)
class Server:
    url: str
    pool: ServerPool
    alive: bool = True
    problem: str = ""
    open_requests: int = 0
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return self.url

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """See ``HttpClient.ask``."""
        return await self.pool.ask(self, method, path, body, **options)


@dataclass
class Counts:
    retried: int = 0
    moved: int = 0
    servers_lost: int = 0


class ServerPool(ABC):
    """Servers of one kind. All methods but the constructor run on the client's loop.

    Attributes:
        servers: the listed servers, in their order.
        counts: failures so far.
        report: called with a line when a server is left out.

    Args:
        urls: ``http://host:port``, each once.
        most_requests: maximum number of open requests per server.

    Raises:
        InputError: a URL is invalid, or there are none.
    """

    def __init__(self, urls: Sequence[str], most_requests: int, report: Callable[[str], None]) -> None:
        self.servers = [Server(url, self) for url in checked_urls(urls)]
        self.counts, self.report, self._most_requests = Counts(), report, most_requests
        # Servers that are no longer listed.
        self._leaving: list[Server] = []
        self._homes: dict[Hashable, Server] = {}
        # Requests for which all servers are full, in their order.
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_lost = False

    def begin_phase(self) -> None:
        """Forget the servers of affinities and wait again for lost servers; call while no request is open, from any
        thread.
        """
        self._homes.clear()
        self._is_lost = False

    def leave_out(self, server: Server, reason: str) -> None:
        """Send nothing more to a server; call on the client's loop."""
        if not server.alive:
            return
        server.alive, server.problem = False, reason
        self.counts.servers_lost += 1
        self.wake(len(self._waiting))
        self.report(f"rollout server {server} is left out: {reason}")

    def take_back(self, server: Server) -> None:
        """Let a server that was left out have requests again."""
        server.alive, server.problem, self._is_lost = True, "", False
        if server in self.servers:
            # Servers that were waiting for a replacement have one now.
            self._leaving.clear()
        self.wake(len(self._waiting))

    def set_urls(self, urls: Sequence[str]) -> None:
        """Change the servers; call on the client's loop. New ones are left out until they are given weights.

        A server that is no longer listed gets no new requests once another one can have them; those that it has may
        finish.

        Raises:
            InputError: a URL is invalid, or there are none.
        """
        known = {server.url: server for server in self.servers}
        listed = checked_urls(urls)
        for url in listed:
            if url not in known:
                known[url] = Server(url, self, alive=False)
                self.report(f"rollout server {url} is new")
        for url, server in known.items():
            if url not in listed and server.alive:
                self._leaving.append(server)
                self.report(f"rollout server {url} is no longer listed")
        self.servers = [known[url] for url in listed]
        self._leaving = [server for server in self._leaving if server not in self.servers]
        self.wake(len(self._waiting))

    def forget_home(self, affinity: Hashable) -> None:
        """Forget the server of an affinity that no request has any more; may be called from any thread."""
        self._homes.pop(affinity, None)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a free place."""
        return sum(not turn.done() for turn in tuple(self._waiting))

    @property
    def alive(self) -> list[Server]:
        """The servers that are not left out; those that are leaving only while there is no other."""
        found = [server for server in self.servers if server.alive]
        return found or [server for server in self._leaving if server.alive]

    def has_place(self, server: Server) -> bool:
        """Whether a server may have another request."""
        return server.open_requests < self._most_requests

    async def free_server(self, affinity: Hashable, failed_on: Mapping[str, int]) -> Server:
        """Wait for a server with fewer open requests than it may have: the home, or another one if that is full."""
        while True:
            home = await self._home(affinity, failed_on)
            others = [server for server in self.alive if failed_on.get(server.url, 0) < 2]
            for server in (home, *sorted(others, key=lambda server: server.open_requests)):
                if self.has_place(server):
                    return server
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.wake(1)
                raise

    def wake(self, count: int) -> None:
        """Let waiting requests look for a server again."""
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    async def _home(self, affinity: Hashable, failed_on: Mapping[str, int]) -> Server:
        """The server for a request: that of its affinity, unless it is left out or failed the request twice."""
        candidates = self.alive or await self._revived()
        home = self._homes.get(affinity)
        usable = [server for server in candidates if failed_on.get(server.url, 0) < 2] or candidates
        if home in usable:
            return home
        if home is not None:
            self.counts.moved += 1
        homes = Counter(self._homes.copy().values())
        chosen = min(usable, key=lambda server: (server.open_requests, homes[server]))
        if home not in candidates:
            self._homes[affinity] = chosen
        return chosen

    @abstractmethod
    async def ask(self, server: Server, method: str, path: str, body: Mapping[str, Any] | None, **options: Any) -> Any:
        """Send one request to one server; returns what it replies."""

    @abstractmethod
    async def _revived(self) -> list[Server]:
        """The servers that can have requests again, after all of them were left out; raises if there are none."""
