"""Processes that send requests to servers and read the replies, so that the first rank's Python has time for training.

    first rank  -- number, url, path, body, asked -->  sender  -- POST -->  server
                <-- number, piece or error ----------          <-- JSON --

The first rank still decides which request goes where and when; a sender makes connections, JSON and checks. A number
alone cancels a request. If a sender dies, its requests fail as if their servers had, are sent again, and the next
request for it starts a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megatron_dta.common.futures import complete
from megatron_dta.common.http.replies import TransientFailureError
from megatron_dta.extras.servers.http_client import HttpClient, Server, ServerError
from megatron_dta.extras.servers.http_settings import HttpSettings
from megatron_dta.extras.servers.pool.late_requests import Running
from megatron_dta.extras.servers.protocol import Asked, Piece, ServerProtocol


@dataclass(eq=False)
class Channel:
    """The connection to one sender, and its open requests.

    Attributes:
        stop: ends the sender; may be called twice.
        has_ended: whether the sender has ended.
    """

    connection: Connection
    stop: Callable[[], None]
    open: dict[int, Future[Piece]] = field(default_factory=dict)
    has_ended: bool = False

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the reading thread notices, too
            self.connection.send(message)


class Senders:
    """The senders of one client; ``exchange`` runs on its loop.

    Args:
        count: of processes.
        start: starts one.
    """

    def __init__(
        self, protocol: ServerProtocol, settings: HttpSettings, count: int, start: Callable[[], Channel]
    ) -> None:
        self._start = start
        # A protocol may have functions that do not travel.
        self._first = type(protocol), protocol.routing, settings
        self._numbers, self._ending = itertools.count(), threading.Lock()
        self._channels = [self._begin() for _ in range(count)]

    async def exchange(self, server: Server, path: str, body: Mapping[str, Any], place: Running) -> Piece:
        """See ``HttpClient.exchange``; the reply is read."""
        number = next(self._numbers)
        with self._ending:
            chosen = min(range(len(self._channels)), key=lambda index: len(self._channels[index].open))
            if self._channels[chosen].has_ended:
                self._channels[chosen] = self._begin()
            channel = self._channels[chosen]
            future = channel.open[number] = Future()
        channel.send((number, server.url, path, body, place.asked))
        reply = asyncio.wrap_future(future)
        try:
            return await reply
        finally:
            del channel.open[number]
            if reply.cancelled():
                channel.send(number)

    def close(self) -> None:
        """End all senders."""
        for channel in self._channels:
            channel.stop()

    def _begin(self) -> Channel:
        channel = self._start()
        channel.send(self._first)
        threading.Thread(target=self._receive, args=(channel,), name="rollout senders", daemon=True).start()
        return channel

    def _receive(self, channel: Channel) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, piece, error = channel.connection.recv()
                # Nobody may wait for it any more.
                complete(channel.open.get(number) or Future(), piece, error)
        channel.stop()
        with self._ending:
            channel.has_ended, left = True, list(channel.open.values())
        for future in left:
            complete(future, error=TransientFailureError("the process that sent the request has ended"))


def add_senders(client: HttpClient, protocol: ServerProtocol) -> None:
    """Let the processes of a client's settings send its requests, if there are some."""
    if client.settings.processes:
        senders = Senders(protocol, client.settings, client.settings.processes, start_process)
        client.exchange, client.on_close = senders.exchange, senders.close


def start_process() -> Channel:
    """A sender in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ours, theirs = Pipe()
    command = [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()

    def stop() -> None:
        process.kill()
        process.wait()

    return Channel(ours, stop)


def main() -> None:
    """A sender on the connection whose descriptor is given; what it prints goes to standard error."""
    sys.stdout = sys.stderr
    serve(Connection(int(sys.argv[1])))


def serve(connection: Connection) -> None:
    """Be a sender until the connection ends."""
    kind, routing, settings = connection.recv()
    protocol: ServerProtocol = kind(routing)
    client = HttpClient(["http://unused:1"], protocol.health_path, replace(settings, processes=0))
    running: dict[int, Future[Piece]] = {}
    lock = threading.Lock()

    async def exchange(url: str, path: str, body: Mapping[str, Any], asked: Asked) -> Piece:
        reply = await client.send(Server(url, client), "POST", path, body, asked.most_reply_bytes)
        return protocol.read(reply, asked)

    def answer(number: int, future: Future[Piece]) -> None:
        running.pop(number, None)
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, TransientFailureError | ServerError):
            error = ServerError(f"{type(error).__name__}: {error}")
        with lock, suppress(OSError):
            connection.send((number, None if error else future.result(), error))

    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, int):
                if message in running:
                    running[message].cancel()
                continue
            number, *rest = message
            running[number] = client.start(exchange(*rest))
            running[number].add_done_callback(partial(answer, number))
    client.close()
