"""Handles servers that draft: checks their settings, counts their drafts, and gives them corpora.

Drafts do not change samples. So a server that cannot take a corpus or report its counters is used without them. A
server whose settings contradict the flags is refused before the first request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from megatron_dta.extras.servers.http_client import HttpClient, Server, ServerError
from megatron_dta.extras.servers.protocol import Piece, ServerProtocol, SpeculationError
from megatron_dta.extras.servers.speculation import DraftCounts, ServerSpeculation


class ServerDrafts:
    """The drafts of all servers of one engine. The coroutines and ``add`` run on the client's loop.

    Attributes:
        counts: tokens so far, and how many of them the servers had drafted and accepted.

    Args:
        report: called with a line if a server is used without a corpus.
    """

    def __init__(
        self,
        client: HttpClient,
        protocol: ServerProtocol,
        speculation: ServerSpeculation,
        report: Callable[[str], None],
    ) -> None:
        self._client, self._protocol, self._speculation, self._report = client, protocol, speculation, report
        self.counts = DraftCounts()
        self._before: dict[str, DraftCounts] = {}
        self._asked: set[str] = set()
        self._corpus: str | None = None

    def forget(self, server: Server) -> None:
        """Check the server again when it returns; its settings may have changed."""
        self._asked.discard(server.url)

    def add(self, piece: Piece) -> None:
        """Count one reply."""
        self.counts += DraftCounts(len(piece.token_ids), piece.drafted, piece.accepted)

    async def begin(self) -> None:
        """Check new servers before a phase.

        Raises:
            SpeculationError: a server drafts otherwise than the flags say.
        """
        for server in self._client.alive:
            if server.url in self._asked:
                continue
            try:
                different = await self._protocol.speculation_differs(server, self._speculation)
            except ServerError as error:
                self._client.leave_out(server, str(error))
                continue
            if different is not None:
                raise SpeculationError(
                    f"{server}: {different}, as --rollout-speculation das and --das-* want it; start the server with "
                    "the command that megatron-dta rollout-server-command prints, or change the flags"
                )
            self._asked.add(server.url)
        self._before = await self._server_counts()

    async def end(self) -> None:
        """After a phase, count what servers report only for all requests together."""
        for url, now in (await self._server_counts()).items():
            gained = now - self._before.get(url, now)
            if gained.drafted >= gained.accepted >= 0:  # otherwise the server was restarted
                self.counts += gained

    async def load_corpus(self, path: Path, name: str) -> None:
        """Let all servers draft from a corpus instead of the previous one."""
        old, self._corpus = self._corpus, name
        work = (self._protocol.load_corpus(server, path, name, old) for server in self._client.alive)
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, ServerError):
                self._report(f"a rollout server continues without the corpus of past rollouts: {error}")
            elif error is not None:
                raise error

    async def _server_counts(self) -> dict[str, DraftCounts]:
        servers = self._client.alive
        work = (self._protocol.draft_counts(server) for server in servers)
        found = await asyncio.gather(*work, return_exceptions=True)
        for counts in found:
            if isinstance(counts, BaseException) and not isinstance(counts, ServerError):
                raise counts
        pairs = zip(servers, found, strict=True)
        return {server.url: counts for server, counts in pairs if isinstance(counts, DraftCounts)}
