"""Sends requests and reads the replies; those of many tokens in another process, so that Python has time for training.

    first rank  -- number, url, path, body, what is asked -->  sender (a process)  -- POST -->  server
                <-- number, piece or error -----------------                       <-- JSON --

The first rank decides which request goes where and when. The process starts with the first long request; a number alone
cancels a request. If the process dies, its requests fail as if their servers had, are sent again, and start another.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from megatron_dta.common.http.replies import RefusedError, TransientFailureError, message_in, parse_json
from megatron_dta.common.http.session import HttpSession
from megatron_dta.extras.servers.http_client import API_KEY_VARIABLE, HttpClient, ServerError
from megatron_dta.extras.servers.protocol import Asked, Piece, ServerProtocol


class Sender:
    """Sends the requests of one client; coroutines run on its loop."""

    def __init__(self, client: HttpClient, protocol: ServerProtocol) -> None:
        self._client, self._protocol = client, protocol
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Piece]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    async def exchange(self, url: str, body: Mapping[str, Any], asked: Asked) -> Piece:
        """The reply to one request.

        Raises:
            TransientFailureError: it failed or is of the wrong form.
            ServerError: the server refuses the request.
        """
        if asked.max_tokens < self._client.settings.long_tokens:
            return await exchange(self._client.http, self._protocol, url, body, asked)
        if self._process is None:
            self._start()
        number, connection = next(self._numbers), self._connection
        reply = self._open[number] = asyncio.get_running_loop().create_future()
        _send(connection, (number, url, body, asked))
        try:
            return await reply
        finally:
            self._open.pop(number, None)
            if reply.cancelled():
                _send(connection, number)

    def close(self) -> None:
        """End the process; call when the client's loop has ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        # A protocol may have functions that cannot be sent.
        _send(self._connection, (type(self._protocol), self._protocol.routing, self._client.settings))
        receive = partial(self._receive, self._connection, asyncio.get_running_loop())
        threading.Thread(target=receive, name="rollout replies", daemon=True).start()

    def _receive(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        # A closed loop (RuntimeError) has nobody who waits.
        with suppress(RuntimeError):
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._finish, *connection.recv())
            loop.call_soon_threadsafe(self._fail_all)

    def _finish(self, number: int, piece: Piece | None, error: Exception | None) -> None:
        reply = self._open.get(number)
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(piece)
        else:
            reply.set_exception(error)

    def _fail_all(self) -> None:
        self.close()
        self._process = None
        for number in tuple(self._open):
            self._finish(number, None, TransientFailureError("the process that sent the request has ended"))


async def exchange(
    http: HttpSession, protocol: ServerProtocol, url: str, body: Mapping[str, Any], asked: Asked
) -> Piece:
    """See ``Sender.exchange``."""
    try:
        content = await http.send("POST", url, protocol.generate_path, body, asked.most_reply_bytes)
    except RefusedError as error:
        raise ServerError(f"{url}: {error}") from error
    try:
        reply = parse_json(content)
    except ValueError as error:
        message = message_in(content)
        raise TransientFailureError(f"POST {protocol.generate_path}: the reply is not JSON: {message}") from error
    return protocol.read(reply, asked)


def main() -> None:
    """The process: send requests until the connection, whose descriptor is given, ends."""
    sys.stdout = sys.stderr
    connection = Connection(int(sys.argv[1]))
    kind, routing, settings = connection.recv()
    protocol, http = kind(routing), HttpSession("rollout servers", settings, API_KEY_VARIABLE)
    running: dict[int, Future[Piece]] = {}
    lock = threading.Lock()

    def answer(number: int, future: Future[Piece]) -> None:
        running.pop(number, None)
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, TransientFailureError | ServerError):
            error = ServerError(f"{type(error).__name__}: {error}")
        with lock:
            _send(connection, (number, None if error else future.result(), error))

    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, int):
                if message in running:
                    running[message].cancel()
                continue
            number, *request = message
            running[number] = http.start(exchange(http, protocol, *request))
            running[number].add_done_callback(partial(answer, number))
    http.close()


def _send(connection: Connection, message: Any) -> None:
    with suppress(OSError):  # who reads from the connection notices, too
        connection.send(message)
