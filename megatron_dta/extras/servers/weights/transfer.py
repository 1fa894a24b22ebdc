"""Sends weights to servers through a process group that they share with the trainer.

1. Without a group, or if its members are not these servers or one of them has lost its weights: form a new group.
2. All servers pause and prepare for new weights.
3. The servers get the list of the tensors of as many buckets as their protocol and the group allow at once, and receive
   them while the trainer broadcasts bucket after bucket, or read a bucket from the trainer's buffer (CUDA IPC).
4. All servers finish, clear their prefix caches, take the label, and continue.

If a step fails for one server, the broadcast cannot be completed for the others either: the group is aborted, every
server is told to give up the update, and the caller decides which of them to try again with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from megatron_dta.common.futures import in_daemon_thread
from megatron_dta.extras.servers.http_client import HttpClient, Server, ServerError
from megatron_dta.extras.servers.protocol import ServerProtocol
from megatron_dta.extras.servers.weights.groups import Meeting, SharedGroup
from megatron_dta.sampling.host_weights import Bucket, HostWeights

Answer = TypeVar("Answer")


class TransferError(Exception):
    """An update has failed for these servers, and was given up for the others."""

    def __init__(self, failures: dict[Server, str]) -> None:
        super().__init__("; ".join(f"{server}: {reason}" for server, reason in failures.items()))
        self.failures = failures


@dataclass(frozen=True)
class Labels:
    """The labels of an update.

    Attributes:
        new, old: of the weights that are sent, and of those before; a server in the group with others was restarted.
        running: whether requests may be running, which the servers end.
    """

    new: str
    old: str
    running: bool = False


class GroupTransfer:
    """Sends weights to servers; all methods run on the client's loop, one at a time."""

    def __init__(self, client: HttpClient, protocol: ServerProtocol) -> None:
        self._client, self._protocol = client, protocol
        self._group: SharedGroup | None = None
        self._members: tuple[Server, ...] = ()
        # The last group that servers were told to join, also after it has failed.
        self._joined: tuple[Meeting | None, tuple[Server, ...]] = (None, ())

    async def send(self, servers: Sequence[Server], weights: HostWeights, labels: Labels) -> None:
        """Give ``servers`` the weights.

        Raises:
            TransferError: a server could not take them; none of ``servers`` has complete weights.
        """
        try:
            labels_held = set((await self._all(servers, self._protocol.weights_label)).values())
            if self._group is None or tuple(servers) != self._members or not labels_held <= {labels.old, None}:
                await self._form(servers, weights)
            await self._alone(servers, self._group.begin)
            await self._all(servers, lambda server: self._protocol.begin_update(server, labels.running))
            many = self._protocol.receives_many and self._group.sends_many
            for buckets in weights.runs if many else [(bucket,) for bucket in weights.buckets]:
                await self._send_buckets(servers, buckets)
            await self._all(servers, lambda server: self._protocol.end_update(server, labels.new))
        except (TransferError, asyncio.CancelledError):
            await self._give_up(servers)
            raise

    async def close(self) -> None:
        """Leave the group."""
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            await _in_thread(group.abort)

    async def _form(self, servers: Sequence[Server], weights: HostWeights) -> None:
        await self._leave()
        await self.close()
        sizes = await self._all(servers, self._protocol.world_size)
        *firsts, world_size = accumulate(sizes.values(), initial=1)
        offsets = dict(zip(sizes, firsts, strict=True))
        group = self._protocol.open_group(world_size, servers[0].url, self._client.settings.timeout_s)
        self._group, self._members = group, tuple(servers)
        self._joined = (group.meeting, self._members)
        await self._alone(servers, lambda: group.reserve(max(bucket.buffer.numel() for bucket in weights.buckets)))
        await self._together(
            servers,
            lambda server: self._protocol.join_group(server, group.meeting, offsets[server], weights.bucket_bytes),
            group.join,
        )

    async def _leave(self) -> None:
        """Let the servers leave the last group, which would keep its memory in addition to that of the next one."""
        (meeting, members), self._joined = self._joined, (None, ())
        await self._tell(members, lambda server: self._protocol.leave_group(server, meeting))

    async def _send_buckets(self, servers: Sequence[Server], buckets: Sequence[Bucket]) -> None:
        group = self._group
        if not group.sends_many:
            await self._alone(servers, lambda: group.stage(buckets[0].buffer))
        await self._together(
            servers,
            lambda server: self._protocol.receive(server, buckets, group.meeting),
            lambda: group.broadcast_all([bucket.buffer for bucket in buckets]),
        )

    async def _all(self, servers: Sequence[Server], act: Callable[[Server], Awaitable[Answer]]) -> dict[Server, Answer]:
        """``act`` for all servers at once."""
        results = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
        _raise_failures(servers, results)
        return dict(zip(servers, results, strict=True))

    async def _alone(self, servers: Sequence[Server], send: Callable[[], Answer]) -> Answer:
        """``send``, whose failure ends the update for all servers."""
        return await self._together(servers, lambda server: asyncio.sleep(0), send)

    async def _together(
        self, servers: Sequence[Server], act: Callable[[Server], Awaitable[None]], send: Callable[[], Answer]
    ) -> Answer:
        """``send`` in this process during ``act`` for all servers; the first failure ends all."""
        acts = [asyncio.ensure_future(act(server)) for server in servers]
        ours = _in_thread(send)
        await asyncio.wait([*acts, ours], return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in (*acts, ours) if task.done() and task.exception() is not None]
        if failed:
            await self.close()
            # The others end, too, since the group is gone.
            await asyncio.wait(acts, timeout=self._client.settings.connect_timeout_s)
            for task in acts:
                task.cancel()
        results = await asyncio.gather(*acts, return_exceptions=True)
        if not failed:
            return ours.result()
        healthy = await self._client.find_healthy()
        dead = {server: server.problem for server in servers if server not in healthy}
        if dead:
            # The others have failed because of these.
            raise TransferError(dead)
        first = failed[0].exception()
        waiting = ServerError(f"did not receive the weights ({first})")
        results = [waiting if isinstance(result, asyncio.CancelledError) else result for result in results]
        _raise_failures(servers, results)
        raise TransferError(dict.fromkeys(servers, f"the weights could not be sent: {first}"))

    async def _give_up(self, servers: Sequence[Server]) -> None:
        await self.close()
        await self._tell(servers, self._protocol.give_up_update)

    async def _tell(self, servers: Sequence[Server], act: Callable[[Server], Awaitable[None]]) -> None:
        """``act`` for servers that may be gone, or wait for a broadcast, some of them forever; errors are ignored."""

        async def tell(server: Server) -> None:
            async with asyncio.timeout(self._client.settings.connect_timeout_s):
                await act(server)

        await asyncio.gather(*(tell(server) for server in servers), return_exceptions=True)


def _raise_failures(servers: Sequence[Server], results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ServerError):
            raise result
    failures = {
        server: str(result) for server, result in zip(servers, results, strict=True) if isinstance(result, ServerError)
    }
    if failures:
        raise TransferError(failures)


def _in_thread(work: Callable[[], Answer]) -> asyncio.Future[Answer]:
    """Run ``work`` in a thread of its own, which does not keep the process from ending."""
    done = asyncio.wrap_future(in_daemon_thread(work, "rollout weights"))
    # Nobody may wait for it any more.
    done.add_done_callback(lambda future: future.cancelled() or future.exception())
    return done
