"""Clients of ``gateway_sessions.py``, which run in a process of their own."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

ADMIN_KEY = "the key of the gateway"
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@dataclass
class Seen:
    """What the clients of a wave saw.

    Attributes:
        ids: of the answers that were read to their end.
        cancelled: streams that were closed in the middle.
        seconds: of each answer that was read, by its number in the session.
    """

    ids: list[str] = field(default_factory=list)
    cancelled: int = 0
    seconds: list[tuple[int, float]] = field(default_factory=list)


class Client:
    """A session's client: it calls tools as it is told to, streams every other call, and misbehaves now and then."""

    def __init__(self, http: Any, number: int, arguments: argparse.Namespace, seen: Seen) -> None:
        self._http, self._random, self._seen = http, np.random.default_rng([7, number]), seen
        self._number, self._calls, self._share = number, arguments.calls, arguments.percent / 100
        self._headers: dict[str, str] = {}

    async def run(self) -> None:
        opened = await self._post("/v1/sessions", {"group_id": f"{self._number // 8}"}, f"Bearer {ADMIN_KEY}")
        self._headers = {"authorization": f"Bearer {opened['key']}"}
        messages = [
            {"role": "system", "content": "You look things up. " * 20},
            {"role": "user", "content": f"task {self._number}"},
        ]
        for turn in range(self._calls):
            messages = await self._turn(messages, turn)
        await self._post("/v1/session/reward", {"reward": float(self._number % 2)})
        await self._close()

    async def _close(self) -> None:
        """A stream that was closed may not have been noticed yet."""
        while "error" in await self._post("/v1/session/close", {}):
            await asyncio.sleep(0.02)

    async def _turn(self, messages: list[dict], turn: int) -> list[dict]:
        draw = self._random.random() / max(self._share, 1e-9)
        results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
        if draw < 1:
            await self._stream(messages, turn, cancel=True)
        elif draw < 2:
            await self._ask(messages, turn)
        elif draw < 3 and results:
            index = results[int(self._random.integers(len(results)))]
            messages = [
                *messages[:index],
                messages[index] | {"content": f"removed in turn {turn}"},
                *messages[index + 1 :],
            ]
        reply = await (self._stream if turn % 2 else self._ask)(messages, turn)
        content = {"content": " ".join(f"v{value}" for value in self._random.integers(10**4, size=30).tolist())}
        calls = reply.get("tool_calls") or []
        answers = [{"role": "tool", "tool_call_id": call["id"], **content} for call in calls]
        return [*messages, reply, *(answers or [{"role": "user", **content}])]

    async def _ask(self, messages: list[dict], turn: int) -> dict:
        began = time.perf_counter()
        reply = await self._post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        return self._done(reply["id"], turn, began, reply["choices"][0]["message"])

    async def _stream(self, messages: list[dict], turn: int, cancel: bool = False) -> dict:
        began, message = time.perf_counter(), {"role": "assistant", "content": ""}
        body = {"messages": messages, "tools": TOOLS, "stream": True}
        async with self._http.post("/v1/chat/completions", json=body, headers=self._headers) as reply:
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                delta = chunk["choices"][0]["delta"]
                message["content"] += delta.get("content") or ""
                if "tool_calls" in delta:
                    message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in delta["tool_calls"]]
                if cancel:
                    self._seen.cancelled += 1
                    reply.close()
                    return {}
        return self._done(chunk["id"], turn, began, message)

    def _done(self, call_id: str, turn: int, began: float, message: dict) -> dict:
        self._seen.ids.append(call_id.removeprefix("chatcmpl-"))
        self._seen.seconds.append((turn, time.perf_counter() - began))
        return message

    async def _post(self, path: str, body: dict, key: str | None = None) -> dict:
        headers = {"authorization": key} if key else self._headers
        async with self._http.post(path, json=body, headers=headers) as reply:
            return await reply.json()


def run_clients(pipe: Connection, arguments: argparse.Namespace) -> None:
    """Runs a wave for every (first, last) that the pipe gives after the gateway's address."""
    import aiohttp

    async def wave(first: int, last: int) -> Seen:
        seen, limits = Seen(), {"timeout": aiohttp.ClientTimeout(600), "connector": aiohttp.TCPConnector(limit=0)}
        async with aiohttp.ClientSession(url, **limits) as http:
            await asyncio.gather(*(Client(http, number, arguments, seen).run() for number in range(first, last)))
        return seen

    url = pipe.recv()
    pipe.send("ready")
    while (numbers := pipe.recv()) is not None:
        pipe.send(asyncio.run(wave(*numbers)))
