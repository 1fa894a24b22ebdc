"""Gives the servers of an engine new weights, and knows which weights they have by the labels that it gave them.

Weights come as a folder, which each server loads by itself, or in host memory, from which they are sent to all servers
at once (``transfer``). A server that fails is left out. It gets the newest weights, all of them, when it is healthy
again: with the next update or, while requests are running, by ``keep_visiting``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from megatron_dta.extras.servers.http_client import HttpClient, Server, ServerError
from megatron_dta.extras.servers.protocol import ServerProtocol
from megatron_dta.extras.servers.weights.transfer import GroupTransfer, Labels, TransferError
from megatron_dta.sampling.host_weights import HostWeights


class ServerWeights:
    """The weights of the servers of one engine; coroutines run on the client's loop.

    Args:
        lost: called with a server that could not take new weights; it may return with other settings.
        check: called with a server that has returned; raises ``ServerError`` if it must not be used.

    Attributes:
        run: part of all labels.
        label, version: of the newest weights; "" and 0 before the first update.
    """

    def __init__(
        self,
        client: HttpClient,
        protocol: ServerProtocol,
        lost: Callable[[Server], None],
        check: Callable[[Server], Awaitable[None]],
    ) -> None:
        self._client, self._protocol, self._lost, self._check = client, protocol, lost, check
        self._transfer = GroupTransfer(client, protocol)
        # Weights of the same version from another trainer have another label.
        self.run = uuid.uuid4().hex[:8]
        self.label, self.version = "", 0
        self._versions: dict[str, int] = {}
        self._weights: Path | HostWeights | None = None
        self._updating = asyncio.Lock()

    def version_of(self, label: str) -> int | None:
        """The version of weights that were given to servers with this label; None for others."""
        return self._versions.get(label)

    async def update(self, version: int, weights: Path | HostWeights, running: bool = False) -> None:
        """Give all healthy servers new weights; those that fail are left out.

        Args:
            running: requests may be running; the servers end them, and no other is sent until the update is done.

        Raises:
            ServerError: no server has the new weights.
        """
        async with self._updating, self._client.sending_held():
            labels = Labels(f"{self.run}-{version}", self.label, running)
            self.label, self.version, self._weights = labels.new, version, weights
            self._versions[labels.new] = version
            for attempt in range(1, self._client.settings.attempts + 1):
                healthy = await self._client.find_healthy()
                if healthy and await self._give_all(healthy, labels):
                    return
                if healthy and not isinstance(weights, HostWeights):
                    break
                if attempt < self._client.settings.attempts:
                    # Servers may still be starting.
                    await self._client.http.pause(attempt)
            reasons = "; ".join(f"{server}: {server.problem}" for server in self._client.servers)
            raise ServerError(f"no rollout server could take the new weights ({reasons})")

    async def has_newest(self, server: Server) -> bool:
        """Whether a server reports the label of the newest weights."""
        return bool(self.label) and await self._protocol.weights_label(server) == self.label

    async def keep_visiting(self) -> None:
        """From time to time, give servers that have come back the newest weights."""
        while True:
            await asyncio.sleep(self._client.settings.revisit_s)
            if self._weights is not None:
                try:
                    async with self._updating:
                        await self._readmit()
                except (ServerError, OSError, RuntimeError) as error:
                    self._client.report(f"servers that are left out could not be visited: {error}")

    async def _readmit(self) -> None:
        labels = Labels(self.label, self.label)
        for server in [server for server in self._client.servers if not server.alive]:
            if not await self._client.is_healthy(server):
                continue
            # It is alone in this update: the others continue to sample.
            if await self._give_all([server], labels, returns=True):
                self._client.report(f"rollout server {server} has the newest weights and gets requests")

    async def close(self) -> None:
        """Leave the group with the servers."""
        await self._transfer.close()

    async def _give_all(self, servers: Sequence[Server], labels: Labels, returns: bool = False) -> bool:
        """Give the newest weights to servers. Returns whether at least one of them has them.

        Args:
            returns: they are back while requests run, and are checked before they get some.
        """
        if isinstance(self._weights, HostWeights):
            updated = await self._send(servers, labels)
        else:
            done = await asyncio.gather(*(self._load(server, labels) for server in servers))
            updated = [server for server, is_done in zip(servers, done, strict=True) if is_done]
        for server in updated:
            try:
                if returns:
                    await self._check(server)
            except ServerError as error:
                self._leave_out(server, str(error))
                return False
            self._client.take_back(server)
        return bool(updated)

    async def _load(self, server: Server, labels: Labels) -> bool:
        try:
            await self._protocol.update_weights(server, self._weights, labels.new, running=labels.running)
        except ServerError as error:
            self._leave_out(server, str(error))
            return False
        return True

    async def _send(self, servers: Sequence[Server], labels: Labels) -> Sequence[Server]:
        try:
            await self._transfer.send(servers, self._weights, labels)
        except TransferError as error:
            for server, reason in error.failures.items():
                self._leave_out(server, reason)
            others = [server for server in servers if server not in error.failures]
            # Each round leaves at least one server out.
            return await self._send(others, labels) if others else []
        return servers

    def _leave_out(self, server: Server, reason: str) -> None:
        self._client.leave_out(server, reason)
        server.problem = reason
        self._lost(server)
