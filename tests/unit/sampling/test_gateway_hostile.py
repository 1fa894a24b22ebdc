"""Hostile and careless clients of the gateway: nothing leaks between sessions, nothing crashes, memory is bounded."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from megatron_dta.common.errors import InputError
from megatron_dta.sampling.gateway.http import application
from megatron_dta.sampling.gateway.session_log import SessionLog
from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

MOST_CALLS = 6
LIMITS = {
    "gateway_max_body_mib": 20_000 / 2**20, "gateway_max_calls": MOST_CALLS, "gateway_max_session_tokens": 4000,
    "gateway_call_timeout": 20.0, "max_concurrent": 3,
}  # fmt: skip
ASK = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[OpenGateway, ScriptedEngine]]:
    tokenizer = chat_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(lambda prompt, key: [65 + key % 7] * 60 + [tokenizer.eos_id], tokenizer.vocab_size, 0.002)
    with open_gateway(engine, tokenizer, tmp_path / "model", **LIMITS) as gateway:
        yield gateway, engine


def post(gateway: OpenGateway, key: str | None, path: str, body: object) -> tuple[int, dict]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(gateway.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def connection(gateway: OpenGateway) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(key: str, length: object, path: str = "/v1/chat/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n".encode()
    )


def settled(gateway: OpenGateway, engine: ScriptedEngine, session: object) -> None:
    """Wait until nothing runs for the session any more."""
    end = time.monotonic() + 20

    def is_settled() -> bool:
        held = sum(len(each.held) for each in gateway.gateway.sessions._open.values())
        return not session.running and not engine._running and len(engine.held) == held

    while time.monotonic() < end and not is_settled():
        time.sleep(0.01)
    assert is_settled()


def test_keys(served) -> None:
    """Wrong, foreign, altered and closed keys all get the same answer; other sessions' calls do not exist."""
    gateway, _ = served
    one, key = gateway.open(number=1)
    other, other_key = gateway.open(number=2)
    assert post(gateway, other_key, "/v1/chat/completions", ASK)[0] == 200
    call = other.calls[0].call_id
    messages = set()
    altered = key[:-1] + ("a" if key[-1] != "a" else "b")
    mixed = f"sk-{one.session_id}-{other.secret}"
    for wrong in (None, "", "sk-", "admin", altered, mixed, key + "x", f"sk-{one.session_id}-", "sk-é-ü", "x" * 5000):
        if wrong is not None:
            wrong = wrong.encode("utf-8").decode("latin-1")
        status, found = post(gateway, wrong, "/v1/chat/completions", ASK)
        assert status == 401
        messages.add(found["error"]["message"])
    assert len(messages) == 1
    assert post(gateway, key, "/v1/session/reward", {"reward": 1.0, "call": f"chatcmpl-{call}"})[0] == 404
    assert post(gateway, key, "/v1/session/reward", {"reward": 1.0, "call": other.session_id})[0] == 404
    assert post(gateway, key, "/v1/session/reward", b'{"reward": NaN}')[0] == 400
    assert post(gateway, key, "/v1/session/reward", {"reward": "1"})[0] in (200, 400)
    assert post(gateway, key, "/v1/sessions", {})[0] == 401
    assert not other.rewards
    assert other.reward is None
    assert not one.calls
    assert post(gateway, key, "/v1/session/close", {})[0] == 200
    assert post(gateway, key, "/v1/chat/completions", ASK)[0] == 401
    assert gateway.closed == [(one, False)]
    status, opened = post(gateway, gateway.admin_key, "/v1/sessions", {"group_id": "g"})
    assert status == 200
    assert post(gateway, opened["key"], "/v1/models", {})[0] in (404, 405)
    assert post(gateway, gateway.admin_key, "/v1/chat/completions", ASK)[0] == 401


def test_the_same_text_in_two_sessions_shares_nothing(served) -> None:
    gateway, _ = served
    (one, key), (other, other_key) = gateway.open(number=1), gateway.open(number=2)
    secret = {"messages": [{"role": "user", "content": "the secret is 42"}]}
    assert post(gateway, key, "/v1/chat/completions", secret)[0] == 200
    status, found = post(gateway, other_key, "/v1/chat/completions", secret)
    assert status == 200
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other.calls[0].base.base is None
    assert one.calls[0].output.tolist() != other.calls[0].output.tolist()


def test_huge_and_lying_bodies(served) -> None:
    """Refused by the declared length, or as soon as more comes than may; nothing is kept."""
    gateway, engine = served
    session, key = gateway.open()
    with connection(gateway) as client:
        client.sendall(head(key, 10**12))
        assert b"413" in client.recv(4096)
    for length in ("-5", "9" * 5000, "1e9", "0x10"):
        with connection(gateway) as client:
            client.sendall(head(key, length))
            assert client.recv(4096).split(b" ")[1] in (b"400", b"413")
    with connection(gateway) as client:
        start = head(key, 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
        client.sendall(start)
        sent = 0
        try:
            while sent < 10**8:
                client.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
                sent += 4096
        except OSError:
            pass
        assert sent < 10**7
    with connection(gateway) as client:
        try:
            for _ in range(200):
                client.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 60_000)
        except OSError:
            pass
        else:
            pytest.fail("headers without an end were read")
    deep = b'{"messages":' + b"[" * 9000 + b"]" * 9000 + b"}"
    assert post(gateway, key, "/v1/chat/completions", deep)[0] == 400
    assert post(gateway, key, "/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]})[0] == 400
    assert not session.calls
    settled(gateway, engine, session)
    assert post(gateway, key, "/v1/chat/completions", ASK)[0] == 200


def test_bodies_of_all_connections_together_are_bounded(served) -> None:
    """Clients that stop in the middle of long bodies hold a bounded number of bytes; then all is free again."""
    gateway, _ = served
    _, key = gateway.open()
    clients = [connection(gateway) for _ in range(9)]
    for client in clients:
        client.sendall(head(key, 19_999) + b" " * 19_000)
    found = select.select(clients, [], [], 20)[0]
    assert len(found) == 1
    assert b" 503 " in found[0].recv(4096)
    for client in clients:
        client.close()
    deadline = time.monotonic() + 20
    long = ASK | {"user": "x" * 15_000}
    while post(gateway, key, "/v1/chat/completions", long)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_closed_sockets_end_their_calls(served) -> None:
    """A client that goes away before its answer: the answer is dropped, counted, and its K/V released."""
    gateway, engine = served
    session, key = gateway.open()
    for stream in (False, True):
        body = json.dumps(ASK | {"stream": stream}).encode()
        client = connection(gateway)
        client.sendall(head(key, len(body)) + body)
        if stream:
            client.recv(10)
        client.close()
        settled(gateway, engine, session)
    assert session.counts.abandoned_calls == 2
    assert not session.calls
    # Half a body, and then nothing.
    client = connection(gateway)
    client.sendall(head(key, 500) + b'{"mess')
    client.close()
    assert post(gateway, key, "/v1/chat/completions", ASK)[0] == 200
    settled(gateway, engine, session)


def test_slow_readers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing more: the stream ends, and what samples for it is closed."""
    monkeypatch.setattr(application, "_SECONDS_TO_READ", 0.05)
    ends: list[str] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 1000
        finally:
            ends.append("closed")

    async def send(message: dict) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(30)

    async def serve() -> None:
        await application.PatientResponse(pieces()).stream_response(send)

    began = time.monotonic()
    asyncio.run(serve())
    assert time.monotonic() - began < 25
    assert ends == ["closed"]


def test_limits_of_a_session(served) -> None:
    gateway, engine = served
    session, key = gateway.open()
    found: list[int] = []

    def ask() -> None:
        found.append(post(gateway, key, "/v1/chat/completions", ASK)[0])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) <= {200, 429}
    assert found.count(200) >= 3
    while len(session.calls) < MOST_CALLS:
        ask()
    status, error = post(gateway, key, "/v1/chat/completions", ASK)
    assert (status, "calls" in error["error"]["message"]) == (429, True)
    assert len(session.calls) == MOST_CALLS
    settled(gateway, engine, session)


def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(lambda prompt, key: [65] * 60 + [tokenizer.eos_id], tokenizer.vocab_size, 0.3)
    with open_gateway(engine, tokenizer, tmp_path / "model", gateway_call_timeout=0.5) as gateway:
        session, key = gateway.open()
        status, error = post(gateway, key, "/v1/chat/completions", ASK)
        assert (status, "--gateway-call-timeout" in error["error"]["message"]) == (504, True)
        settled(gateway, engine, session)
        assert session.counts.abandoned_calls == 1


def test_a_log_below_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file / "log.jsonl", file / "folder" / "log.jsonl"):
        with pytest.raises(InputError) as refusal:
            SessionLog(path)
        assert str(refusal.value) == f"--output {path}: cannot be written ({file} is a file, not a folder)"
