"""Measures what requests to servers cost the process that sends them: processor time for each response and token.

    python benchmarks/server_requests.py [--servers 64] [--requests-per-server 64] [--prompt-tokens 1000]
        [--response-tokens 2000] [--samples-per-prompt 8] [--seconds 2] [--responses 8192] [--one-process]
        [--output FILE.json]

All servers are one process, which replies after --seconds to every request with the same tokens, in vLLM's form, and
reads as little as it can. "responses_per_core_s" is what the sending process could finish in a second of one core,
however busy the machine is; "wall_responses_s" what it finished here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from common.report import Report
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import HttpSettings
from megatron_dta.extras.servers.vllm import VllmProtocol
from megatron_dta.sampling.interface import GenerationRequest
from megatron_dta.sampling.params import SamplingParams

VOCABULARY = 150_000


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--requests-per-server", type=int, default=64, help="open at once (--inference-max-requests)")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--response-tokens", type=int, default=2000)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a server takes for a response")
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--one-process", action="store_true", help="send long requests from this process, too")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    for name in ("servers", "requests_per_server", "prompt_tokens", "response_tokens", "samples_per_prompt"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    return arguments


def reply_parts(tokens: list[int]) -> tuple[bytes, bytes]:
    """A reply of vLLM before and after the ids of its prompt."""
    names = [f"token_id:{token}" for token in tokens]
    logprobs = [-1.2345678 - i % 7 for i in range(len(tokens))]
    choice = {
        "index": 0,
        "text": "",
        "logprobs": {
            "text_offset": [0] * len(tokens),
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": tokens,
        "prompt_logprobs": None,
        "prompt_token_ids": "HERE",
    }
    reply = json.dumps({"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})
    before, after = reply.encode().split(b'"HERE"')
    return before, after


class Replies(asyncio.Protocol):
    """Replies to POST with a prompt, one request at a time on each connection."""

    def __init__(self, parts: tuple[bytes, bytes], seconds: float) -> None:
        self._parts, self._seconds, self._received = parts, seconds, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET"):
            self._received = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) >= length:
            self._received = b""
            prompt = body[body.index(b"[") : body.index(b"]") + 1]
            asyncio.get_running_loop().call_later(self._seconds, self._reply, prompt)

    def _reply(self, prompt: bytes) -> None:
        content = self._parts[0] + prompt + self._parts[1]
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


def serve(pipe: Connection, servers: int, tokens: list[int], seconds: float) -> None:
    """Listen on as many ports until the process is ended; sends the ports."""

    async def listen() -> None:
        loop, parts = asyncio.get_running_loop(), reply_parts(tokens)
        listeners = [await loop.create_server(lambda: Replies(parts, seconds), "127.0.0.1", 0) for _ in range(servers)]
        pipe.send([server.sockets[0].getsockname()[1] for server in listeners])
        await asyncio.Event().wait()

    asyncio.run(listen())


def main() -> None:
    """Send all requests and count."""
    arguments = parse_arguments()
    rng = np.random.default_rng(0)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    tokens = rng.integers(10, VOCABULARY, arguments.response_tokens).tolist()
    process = context.Process(target=serve, args=(theirs, arguments.servers, tokens, arguments.seconds), daemon=True)
    process.start()
    urls = [f"http://127.0.0.1:{port}" for port in ours.recv()]
    sending = HttpSettings(max_requests=arguments.requests_per_server)
    if arguments.one_process:
        sending = replace(sending, long_tokens=sys.maxsize)
    engine = HttpEngine(VllmProtocol(), urls, sending, vocab_size=VOCABULARY)
    most = arguments.response_tokens
    engine.start(SamplingParams(max_response_tokens=most, eos_id=0, seed=1), 0)
    prompts = [
        rng.integers(10, VOCABULARY, arguments.prompt_tokens).astype(np.int32)
        for _ in range(-(-arguments.responses // arguments.samples_per_prompt))
    ]
    requests = [
        GenerationRequest(number, prompts[number // arguments.samples_per_prompt], most, key=number)
        for number in range(arguments.responses)
    ]
    wall, core = time.perf_counter(), time.process_time()
    engine.submit(requests)
    finished = 0
    while finished < len(requests):
        finished += len(engine.poll())
    wall, core = time.perf_counter() - wall, time.process_time() - core
    engine.close()
    process.kill()
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    report = Report("requests to servers", settings, torch.device("cpu"), arguments.output)
    report.add(
        {
            "responses": len(requests),
            "core_s": core,
            "wall_s": wall,
            "responses_per_core_s": len(requests) / core,
            "tokens_per_core_s": len(requests) * most / core,
            "wall_responses_s": len(requests) / wall,
        }
    )


if __name__ == "__main__":
    run_entry_point(main)
