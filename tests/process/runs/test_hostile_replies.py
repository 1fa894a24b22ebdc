"""Invalid replies of rollout servers: the error names the server and the field, and memory stays bounded."""

import gzip
import json
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from http_engine_cases import KINDS, PARAMS, QUICK, Setup
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.sampling.interface import GenerationRequest, generate
from rollout_server_base import RolloutServer

MEMBER = 100 * gzip.compress(bytes(1 << 20))


class RawReply(web.StreamResponse):
    """Bytes that are sent as they are; then the connection is closed."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__()
        self._parts, self.body = parts, b""

    async def prepare(self, request: web.BaseRequest) -> None:
        self._transport = request.transport
        with suppress(ConnectionError):
            for part in self._parts:
                if request.transport.is_closing():
                    break  # the client has had enough
                request.transport.write(part)
                await request._protocol._drain_helper()

    async def write_eof(self, data: bytes = b"") -> None:
        self._transport.close()


def resident_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def answer_with(server: RolloutServer, change: Callable[[bytes], web.StreamResponse | bytes]) -> None:
    """Let a server change all its replies to generation requests."""
    answer = server.answer

    async def changed(path: str, request: web.Request, body: Any) -> web.StreamResponse:
        good = await answer(path, request, body)
        if path != server.generate_path:
            return good
        body = change(good.body)
        return web.Response(body=body, content_type="application/json") if isinstance(body, bytes) else body

    server.answer = changed


def put(reply: bytes, path: tuple[Any, ...], literal: str) -> bytes:
    """The reply with a literal of JSON at a path."""
    value = holder = json.loads(reply)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = "@"
    return json.dumps(value).replace('"@"', literal).encode()


TOKENS, LOGPROBS = ("choices", 0, "token_ids"), ("choices", 0, "logprobs", "token_logprobs")
DEEP = "[" * 3000 + "]" * 3000
FORMS = [
    # kind of server, path in the reply, literal to put there, part of the error
    ("vllm", (*TOKENS, 0), "23", "choices.0.token_ids have 23, outside of the vocabulary of 23"),
    ("vllm", (*TOKENS, 0), "9" * 5000, "is not JSON"),
    ("vllm", TOKENS, '"\\u001b[2J"', "choices.0.token_ids must be a list, got "),
    ("vllm", ("usage", "prompt_tokens"), "4", "another prompt: its usage.prompt_tokens are 4, but 3 were sent"),
    ("vllm", (*LOGPROBS, 0), "NaN", "the reply has NaN, which is not a number in JSON"),
    ("vllm", ("usage", "more"), DEEP, "the reply is nested too deeply"),
    ("vllm", ("usage", "more"), '"' + "a" * (2 << 20) + '"', "the reply is longer than"),
    ("sglang", ("output_ids", 0), "23", "output_ids are not those of its"),
    ("sglang", ("meta_info", "output_token_logprobs"), "[[-1.0]]", "output_token_logprobs.0 must be a logprob and a"),
    ("sglang", ("meta_info", "weight_version"), "{}", "weight_versions.0 must be a string or a whole number"),
]


@pytest.mark.parametrize(("kind", "path", "literal", "told"), FORMS)
def test_malformed_replies_name_server_and_field(setup: Setup, path: tuple[Any, ...], literal: str, told: str) -> None:
    setup.add_servers(1)
    answer_with(setup.servers[0], lambda reply: put(reply, path, literal))
    engine = setup.started()
    with pytest.raises(ServerError) as caught:
        generate(engine, [GenerationRequest(1, np.array([1, 2, 3], np.int32), 5, key=0)])
    message = str(caught.value)
    assert told in message
    assert f"failed 4 times, the last time on {setup.servers[0].url}: " in message
    assert message.isprintable()
    assert len(message) < 700


@KINDS
def test_compressed_and_endless_replies_take_no_memory(setup: Setup) -> None:
    """1.5 GB in 1.5 MB; and a reply without an end."""
    setup.add_servers(1)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % (15 * len(MEMBER))
    replies = [RawReply([head, MEMBER * 15]), RawReply([b"HTTP/1.1 200 OK\r\n\r\n", *[b"[" * (1 << 20)] * 1500])]
    before = resident_bytes()
    for reply, told in zip(replies, ("compressed, which was not asked for", "is longer than"), strict=True):
        setup.servers[0].answer = answer_once(setup.servers[0], reply)
        engine = setup.engine(replace(QUICK, attempts=1))
        engine.start(PARAMS, 0)
        with pytest.raises(ServerError, match=told):
            generate(engine, setup.requests(1))
    assert resident_bytes() - before < 64 << 20


def answer_once(server: RolloutServer, reply: RawReply) -> Callable[..., Any]:
    answer = type(server).answer

    async def changed(path: str, request: web.Request, body: Any) -> web.StreamResponse:
        return reply if path == server.generate_path else await answer(server, path, request, body)

    return changed


@KINDS
def test_requests_go_nowhere_else(setup: Setup) -> None:
    """A redirect would take the prompt and the key of the API to an address that was not given."""
    setup.add_servers(2)
    elsewhere = setup.servers.pop()
    where = f"{elsewhere.url}{elsewhere.generate_path}".encode()
    reply = RawReply([b"HTTP/1.1 307 Moved\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % where])
    setup.servers[0].answer = answer_once(setup.servers[0], reply)
    engine = setup.started()
    with pytest.raises(ServerError, match="is refused with 307"):
        generate(engine, setup.requests(1))
    assert elsewhere.calls == []


@KINDS
def test_replies_to_questions_are_checked_too(setup: Setup) -> None:
    """Those before the first request are asked for again, and then the server is left out."""
    setup.add_servers(1, temperature_scaled=True)
    path = ("choices", 0, "token_ids") if setup.kind == "vllm" else ("meta_info", "output_token_ids_logprobs", 0, 0, 0)
    answer_with(setup.servers[0], lambda reply: put(reply, path, "7" if setup.kind == "vllm" else "1e999"))
    engine = setup.engine()
    params = replace(PARAMS, temperature=0.7)
    if setup.kind == "sglang":
        with pytest.raises(ServerError, match="gives no logprobs of named tokens") as caught:
            engine.start(params, 0)
        assert setup.servers[0].url in str(caught.value)
        return
    engine.start(params, 0)
    assert "choices.0.token_ids must be a list, got 7" in setup.lines[0]
    assert setup.servers[0].url in setup.lines[0]
