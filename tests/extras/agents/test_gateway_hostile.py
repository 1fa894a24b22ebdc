"""Hostile and careless clients of the gateway: nothing leaks between sessions, nothing crashes, memory is bounded."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")


from megatron_dta.extras.agents.gateway.http import bodies
from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

MOST_CALLS = 6
LIMITS = {
    "gateway_max_body_mib": 20_000 / 2**20, "gateway_max_calls": MOST_CALLS, "gateway_max_session_tokens": 4000,
    "agent_timeout": 20.0, "max_concurrent": 3,
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
        held = sum(len(open_session.held) for open_session in gateway.gateway.sessions._open.values())
        return not session.running and not engine._running and len(engine.held) == held

    while time.monotonic() < end and not is_settled():
        time.sleep(0.01)
    assert is_settled()


def test_keys(served) -> None:
    """Wrong, foreign, altered and closed keys all get the same answer; other sessions' calls do not exist."""
    gateway, _ = served
    session, key = gateway.open(number=1)
    other, other_key = gateway.open(number=2)
    assert post(gateway, other_key, "/v1/chat/completions", ASK)[0] == 200
    call = other.calls[0].call_id
    messages = set()
    altered = key[:-1] + ("a" if key[-1] != "a" else "b")
    mixed = f"sk-{session.session_id}-{other.secret}"
    for wrong in (
        None,
        "",
        "sk-",
        "admin",
        altered,
        mixed,
        key + "x",
        f"sk-{session.session_id}-",
        "sk-é-ü",
        "x" * 5000,
    ):
        if wrong is not None:
            wrong = wrong.encode("utf-8").decode("latin-1")
        status, reply = post(gateway, wrong, "/v1/chat/completions", ASK)
        assert status == 401
        messages.add(reply["error"]["message"])
    assert len(messages) == 1
    assert post(gateway, key, "/v1/session/reward", {"reward": 1.0, "call": f"chatcmpl-{call}"})[0] == 404
    assert post(gateway, key, "/v1/session/reward", {"reward": 1.0, "call": other.session_id})[0] == 404
    assert post(gateway, key, "/v1/session/reward", b'{"reward": NaN}')[0] == 400
    assert post(gateway, key, "/v1/session/reward", {"reward": "1"})[0] in (200, 400)
    assert post(gateway, key, "/v1/sessions", {})[0] == 401
    assert not other.rewards
    assert other.reward is None
    assert not session.calls
    assert post(gateway, key, "/v1/session/close", {})[0] == 200
    assert post(gateway, key, "/v1/chat/completions", ASK)[0] == 401
    assert gateway.closed == [(session, False)]
    status, opened = post(gateway, gateway.admin_key, "/v1/sessions", {"group_id": "g"})
    assert status == 200
    assert post(gateway, opened["key"], "/v1/models", {})[0] in (404, 405)
    assert post(gateway, gateway.admin_key, "/v1/chat/completions", ASK)[0] == 401


def test_bodies_that_come_after_their_session_has_closed(served) -> None:
    """A session is closed once, whatever its unfinished requests ask for."""
    gateway, engine = served
    session, key = gateway.open()
    bodies = {"/v1/session/close": {}, "/v1/session/reward": {"reward": 5}, "/v1/chat/completions": ASK}
    with ExitStack() as stack:
        clients = []
        for path, body in bodies.items():
            data = json.dumps(body).encode()
            clients.append((stack.enter_context(connection(gateway)), data[-1:]))
            clients[-1][0].sendall(head(key, len(data), path) + data[:-1])
        # A request on the same event loop: the others' heads have been read.
        assert post(gateway, gateway.open()[1], "/v1/chat/completions", ASK)[0] == 200
        assert post(gateway, key, "/v1/session/close", {})[0] == 200
        for client, rest in clients:
            client.sendall(rest)
            assert b" 401 " in client.recv(4096).partition(b"\r\n")[0]
    assert gateway.closed == [(session, False)]
    assert session.reward is None
    assert not session.calls
    settled(gateway, engine, session)


def test_the_same_text_in_two_sessions_shares_nothing(served) -> None:
    gateway, _ = served
    (session, key), (other, other_key) = gateway.open(number=1), gateway.open(number=2)
    secret = {"messages": [{"role": "user", "content": "the secret is 42"}]}
    assert post(gateway, key, "/v1/chat/completions", secret)[0] == 200
    status, reply = post(gateway, other_key, "/v1/chat/completions", secret)
    assert status == 200
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other.calls[0].base.base is None
    assert session.calls[0].output.tolist() != other.calls[0].output.tolist()


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


def received(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    pieces = []
    with suppress(ConnectionResetError):
        while piece := client.recv(4096):
            pieces.append(piece)
    return b"".join(pieces)


def test_unfinished_bodies_keep_nobody_out(served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one session and of many: others are answered; unfinished bodies are given up in time."""
    gateway, engine = served
    session, key = gateway.open()
    with ExitStack() as stack:
        clients = [stack.enter_context(connection(gateway)) for _ in range(9)]
        for client in clients:
            client.sendall(head(key, 19_000) + b'{"x": "' + b"x" * 18_000)
        answers = [received(client) for client in clients[1:]]
        assert all(b" 429 " in answer and b"more than 20000 bytes at once" in answer for answer in answers)
        assert post(gateway, gateway.open()[1], "/v1/chat/completions", ASK)[0] == 200
        for _ in range(12):
            client = stack.enter_context(connection(gateway))
            client.sendall(head(gateway.open()[1], 19_500) + b'{"x": "' + b"x" * 19_000)
        assert b" 503 " in received(clients[0])
        for _ in range(3):
            long = {"messages": [{"role": "user", "content": "a" * 2000}]}
            assert post(gateway, gateway.open()[1], "/v1/chat/completions", long)[0] == 200
        monkeypatch.setattr(bodies, "SECONDS_TO_SEND", 0.2)
        last = stack.enter_context(connection(gateway))
        last.sendall(head(key, 500) + b'{"mess')
        assert b" 408 " in received(last)
    settled(gateway, engine, session)


def test_limits_of_a_session(served) -> None:
    gateway, engine = served
    session, key = gateway.open()
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(post(gateway, key, "/v1/chat/completions", ASK)[0])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 403, 429}
    assert statuses.count(200) >= 3
    while len(session.calls) < MOST_CALLS:
        ask()
    status, error = post(gateway, key, "/v1/chat/completions", ASK)
    assert (status, "calls" in error["error"]["message"]) == (403, True)
    assert len(session.calls) == MOST_CALLS
    settled(gateway, engine, session)


def test_counting_tokens_is_limited_too(served) -> None:
    gateway, _ = served
    session, key = gateway.open()
    talks = [{"messages": [{"role": "user", "content": letter * 1000}]} for letter in "abcdefgh"]
    replies = [post(gateway, key, "/v1/messages/count_tokens", body) for body in talks]
    assert [status for status, _ in replies[:3]] == [200] * 3
    assert replies[0][1]["input_tokens"] > 1000
    assert (replies[-1][0], session.num_tokens < 6000, session.calls) == (403, True, [])


def test_a_call_that_takes_too_long(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(lambda prompt, key: [65] * 60 + [tokenizer.eos_id], tokenizer.vocab_size, 0.3)
    with open_gateway(engine, tokenizer, tmp_path / "model", agent_timeout=0.5) as gateway:
        session, key = gateway.open()
        status, error = post(gateway, key, "/v1/chat/completions", ASK)
        assert (status, "--agent-timeout" in error["error"]["message"]) == (504, True)
        settled(gateway, engine, session)
        assert session.counts.abandoned_calls == 1


ODD_FIELDS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "0.text: "),
    ("/v1/chat/completions", {**ASK, "n": 10**30}, "n: a call may have 3 answers"),
    ("/v1/completions", {"prompt": [10**30]}, "prompt: token ids must be in [0, "),
    ("/v1/messages", {"content": [{"type": "text", "text": [1]}]}, "0.text: Input should be a valid string"),
    ("/v1/messages", {"role": "assistant", "content": [{"type": "tool_use"}]}, "of type 'tool_use' without a name"),
    ("/v1/session/reward", {"reward": 10**400}, "reward: "),
]


def test_odd_fields_are_refused_in_a_line(served) -> None:
    """Other types than the field's, at any depth: status 400, never 500."""
    gateway, _ = served
    _, key = gateway.open()
    for path, body, told in ODD_FIELDS:
        if path == "/v1/messages":
            body = {"max_tokens": 3, "messages": [{"role": "user", **body}]}
        status, reply = post(gateway, key, path, body)
        assert (status, told in reply["error"]["message"]) == (400, True), (body, reply)
