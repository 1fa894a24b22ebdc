"""Random sessions of agents (tools, retries, compactions, sub-agents, choices), and a training step on their trees."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine
from session_checks import check_sessions, gradient_error

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MOST_CHARACTERS = 900
SESSIONS, CALLS = 4, 60  # 64 and 10,000 in benchmarks/results/gateway_sessions.json


def answer_text(key: int) -> str:
    """The scripted answer of a key: text, reasoning, or calls of a tool in three spellings."""
    random = np.random.default_rng(key)
    words = " ".join(f"w{value}" for value in random.integers(50, size=int(random.integers(1, 6))))
    thought = f"<think>\nso {words}\n</think>\n\n" if random.random() < 0.3 else ""
    kind = int(random.integers(5))
    if kind == 0:
        return thought + f'<tool_call>{{"name":"add","arguments":{{"a":{key % 9},"b":2}}}}</tool_call>'
    if kind == 1:
        return thought + f'{words}\n<tool_call>\n{{"name": "add", "arguments": {{"a": {key % 7}}}}}\n</tool_call>'
    return thought + words


class ScriptedAgent(threading.Thread):
    """One session's client."""

    def __init__(self, gateway: OpenGateway, number: int, calls: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.session, key = gateway.open(f"group {number % 8}", number)
        self._random, self._left = np.random.default_rng([seed, number]), calls
        host = gateway.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=120)
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._system = {"role": "system", "content": f"system {number}: be short"}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            messages = self._begin("task")
            while self._left > 0:
                messages = self._step(messages)
        except BaseException as error:
            self.error = error

    def _begin(self, what: str) -> list[dict]:
        return [self._system, {"role": "user", "content": f"{what} {self._random.integers(10**6)}"}]

    def _step(self, messages: list[dict]) -> list[dict]:
        draw = self._random.random()
        if sum(len(str(message.get("content"))) for message in messages) > MOST_CHARACTERS or draw < 0.04:
            return self._begin("summary")
        if draw < 0.12:
            self._ask(messages)
        if 0.12 < draw < 0.2:
            return [*messages, *self._sub_agent()]
        reply = self._ask(messages, 2 if draw > 0.95 else 1)
        if reply.get("tool_calls"):
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": str(self._random.integers(100))}
                for call in reply["tool_calls"]
            ]
            return [*messages, reply, *results]
        return [*messages, reply, {"role": "user", "content": f"next {self._random.integers(10**6)}"}]

    def _sub_agent(self) -> list[dict]:
        messages = [
            {"role": "system", "content": "a sub-agent"},
            {"role": "user", "content": f"{self._random.integers(10**6)}"},
        ]
        for _ in range(int(self._random.integers(1, 4))):
            messages += [self._ask(messages), {"role": "user", "content": f"more {self._random.integers(10**6)}"}]
        return [{"role": "user", "content": f"the sub-agent says {self._random.integers(10**6)}"}]

    def _ask(self, messages: list[dict], choices: int = 1) -> dict:
        self._left -= choices
        body = {"model": "m", "messages": messages, "tools": TOOLS, "n": choices}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        reply = self._connection.getresponse()
        content = json.loads(reply.read())
        assert reply.status == 200, content
        return content["choices"][-1]["message"]


def test_sessions_are_trained_as_they_were_sampled(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(
        lambda prompt, key: [*tokenizer.encode(answer_text(key)).tolist(), tokenizer.eos_id], tokenizer.vocab_size
    )
    flags = {"gateway_max_calls": 10**6, "gateway_piece_tokens": 64}
    with open_gateway(engine, tokenizer, tmp_path / "model", **flags) as gateway:
        agents = [ScriptedAgent(gateway, i, CALLS // SESSIONS, seed=0) for i in range(SESSIONS)]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join()
    assert [agent.error for agent in agents] == [None] * SESSIONS
    sessions = [agent.session for agent in agents]
    check_sessions(sessions, engine)
    assert gradient_error(sessions, tokenizer.vocab_size) <= 1e-12
