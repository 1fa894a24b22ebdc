"""Keeps clients that neither send nor read from keeping others out; uvicorn limits neither by itself.

A connection waits while no request of it is at work: before the end of a request's head, between two requests, and
while the rest of a body comes whose request was answered already. It may wait for a limited time. If there are as many
connections as there may be, a new one ends the one that has waited longest, so only requests at work fill the server.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_TO_ASK = 30.0
SECONDS_TO_READ = 60.0


class WaitingConnections:
    """The connections of one server that wait, the one that began first in front.

    Args:
        most: the most connections of the server, those with requests included.
    """

    def __init__(self, most: int) -> None:
        self._most, self._timers = most, dict[PatientProtocol, asyncio.TimerHandle]()

    def begin(self, connection: PatientProtocol) -> None:
        """Let a connection wait; nothing changes if it does already."""
        if connection not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[connection] = loop.call_later(SECONDS_TO_ASK, self._give_up, connection)

    def end(self, connection: PatientProtocol) -> None:
        """A request of it is at work, or it is closed."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def make_way(self, connections: set[Any]) -> None:
        """Close waiting ones of ``connections``, which has a new one, until they are fewer than there may be."""
        while len(connections) >= self._most and len(self._timers) > 1:
            connections.discard(oldest := next(iter(self._timers)))
            self._give_up(oldest)

    def _give_up(self, connection: PatientProtocol) -> None:
        self.end(connection)
        connection.transport.abort()


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which gives up clients that wait too long or read nothing of their answer."""

    def __init__(self, *arguments: Any, waiting: WaitingConnections, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._waiting, self._unread = waiting, None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting.begin(self)
        self._waiting.make_way(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.end(self)
        self._is_read()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._wait_or_not()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_or_not()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_read()
        self._unread = self.loop.call_later(SECONDS_TO_READ, self.transport.abort)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_or_not(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._waiting.begin(self)
        else:
            self._waiting.end(self)
