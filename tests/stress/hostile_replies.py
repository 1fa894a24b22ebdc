"""Servers that mean harm: mutated replies, each of which is used or ends in one line that names its server.

    python tests/stress/hostile_replies.py [--count 5000] [--seed 0] [--kinds vllm sglang reward] [--bomb]

Good replies are changed by a few random edits of their values, their bytes, or the HTTP around them; all edits follow
from the seed. They go over the loopback to the clients of training:

    vllm, sglang    an update of weights, questions about logprobs and drafts, generation, counters, a corpus
    reward          ``--reward-function remote``

What comes out must be a result with as many tokens as asked for, all in the vocabulary, or an ``InputError`` of one
printable line that names the server; nothing may be logged, and memory may not grow by more than ``MOST_GROWTH`` bytes.
``--bomb`` adds a reply of 1.5 MB that decompresses to 1.5 GB. Anything else is printed and counted. Status 0 if there
is none.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import shared  # noqa: F401 (before the helpers)
from aiohttp import web

from hostile_edits import MEMBER, mutate
from http_engine_cases import PROTOCOLS, VOCABULARY
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.http_client import HttpSettings
from megatron_dta.extras.servers.speculation import ServerSpeculation
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.rewards.server_reward import RemoteReward
from rollout_server_base import RolloutServer
from rollout_servers import SERVERS

KINDS = ("vllm", "sglang", "reward")
MOST_GROWTH = 400 << 20
MOST_SHOWN = 10
SPECULATION = ServerSpeculation(draft_tokens=8, depth=16, max_tokens=1000, cached_requests=10)


class HostileServer:
    """Wraps one of the local servers: some of its replies are mutated.

    Attributes:
        mutated: how many were.
    """

    def __init__(self, inner: RolloutServer, rng: random.Random, share: float, edits: list[str]) -> None:
        self.inner, self.mutated, self._rng, self._share, self._edits = inner, 0, rng, share, edits
        self._lock = threading.Lock()
        self._answer = inner.answer
        inner.answer = self.answer

    async def answer(self, path: str, request: web.Request, body: Any) -> web.StreamResponse:
        good = await self._answer(path, request, body)
        with self._lock:
            if self._rng.random() >= self._share:
                return good
            self.mutated += 1
            return RawReply(list(mutate(good.body or b"", self._rng, self._edits)))


class RawReply(web.StreamResponse):
    """Bytes that are sent as they are; then the connection is closed."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self.body = b""

    async def prepare(self, request: web.BaseRequest) -> None:
        try:
            for part in self._parts:
                if request.transport is None or request.transport.is_closing():
                    break  # the client has had enough
                request.transport.write(part)
                await request._protocol._drain_helper()
        except ConnectionError:
            pass
        self._transport = request.transport

    async def write_eof(self, data: bytes = b"") -> None:
        if self._transport is not None:
            self._transport.close()


class Faults(logging.Handler):
    """What was answered wrongly, with what was logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        # What the servers' side has to say of clients that hang up is no fault.
        if not record.name.startswith("aiohttp.server") and "socket.send()" not in record.getMessage():
            self.add(f"logged: {record.getMessage()[:300]} {record.exc_info}")

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= MOST_SHOWN:
            print(line, flush=True)


def told_well(error: InputError, url: str) -> str:
    """What is wrong with a message; nothing if it is one line that names the server."""
    message = str(error)
    if not message.isprintable():
        return f"not one printable line: {message!r}"
    if url not in message:
        return f"the server is not named: {message}"
    return f"{len(message)} characters: {message[:300]}" if len(message) > 2000 else ""


def visit(kind: str, server: HostileServer, rng: random.Random, folder: Path) -> tuple[str, str]:
    """What training does with a server, once; returns the outcome, and what is wrong with it."""
    url = server.inner.url
    settings = HttpSettings(
        timeout_s=2, connect_timeout_s=1, attempts=rng.choice((1, 2)), backoff_s=0, backoff_limit_s=0
    )
    speculation = rng.choice((None, SPECULATION))
    engine = HttpEngine(PROTOCOLS[kind](), [url], settings, vocab_size=VOCABULARY, speculation=speculation)
    request = GenerationRequest(3, np.arange(6, 12, dtype=np.int32), rng.randrange(1, 12), key=3)
    try:
        if rng.random() < 0.3:
            engine.update_weights(rng.randrange(5), folder)
        temperature = rng.choice((1.0, 1.0, 1.0, 0.7)) if kind == "sglang" or server.inner.temperature_scaled else 1.0
        engine.start(SamplingParams(max_response_tokens=16, eos_id=5, temperature=temperature), 0)
        if speculation is not None and kind == "sglang":
            (folder / "corpus.jsonl").write_text('"a"\n')
            engine.load_corpus(folder / "corpus.jsonl")
        (result,) = generate(engine, [request])
        engine.join()
    except InputError as error:
        return "refused", told_well(error, url)
    finally:
        engine.close()
    good = 1 <= len(result.token_ids) <= request.max_tokens == max(request.max_tokens, len(result.logprobs))
    good = good and 0 <= result.token_ids.min() <= result.token_ids.max() < VOCABULARY
    return "used", "" if good and np.isfinite(result.logprobs).all() else f"used as {result}"


def write_weights(folder: Path) -> Path:
    """A checkpoint that the local servers load."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    table = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(0))
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def attack(kind: str, count: int, rng: random.Random, faults: Faults, edits: list[str]) -> tuple[int, Counter]:
    """Send mutated replies of rollout servers; return how many were sent, and the outcomes."""
    outcomes: Counter = Counter()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as temporary:
        folder = write_weights(Path(temporary) / "weights")
        table = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY))
        inner = SERVERS[kind](table, temperature_scaled=True)
        good = SPECULATION.vllm() if kind == "vllm" else SPECULATION.sglang()
        inner.speculation = good
        server = HostileServer(inner, rng, 0.5, edits)
        stack.enter_context(inner)
        while server.mutated < count:
            inner.paused = False
            inner.corpora = {}
            try:
                outcome, wrong = visit(kind, server, rng, folder)
            except Exception as error:
                outcome, wrong = "", f"{type(error).__name__}: {str(error)[:300]} at {_place(error)}"
            outcomes["wrong" if wrong else outcome] += 1
            if wrong:
                faults.add(f"{kind}: {wrong}")
        return server.mutated, outcomes


def _place(error: BaseException) -> str:
    trace, places = error.__traceback__, []
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(places[-3:])


class RewardAnswers(RolloutServer):
    """A reward server."""

    kind, generate_path = "reward", "/score"

    async def answer(self, path: str, request: web.Request, body: Any) -> web.Response:
        return web.json_response({"reward": 0.5, "detail": [1, {"a": "b"}]})


def attack_rewards(count: int, rng: random.Random, faults: Faults, edits: list[str]) -> tuple[int, Counter]:
    """Send mutated replies of a reward server."""
    outcomes: Counter = Counter()
    inner = RewardAnswers(np.zeros((1, 1)))
    server = HostileServer(inner, rng, 1.0, edits)
    with inner:
        reward = RemoteReward([f"{inner.url}/score"], timeout_s=1.0, attempts=1)
        while server.mutated < count:
            outcome, wrong = "used", ""
            try:
                value = reward({"id": 1}, "text", [1, 2])
                if not isinstance(value, float) or not np.isfinite(value):
                    wrong = f"used as {value}"
            except InputError as error:
                outcome, wrong = "refused", told_well(error, inner.url)
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error)[:300]} at {_place(error)}"
            outcomes["wrong" if wrong else outcome] += 1
            if wrong:
                faults.add(f"reward: {wrong}")
    return server.mutated, outcomes


def bomb(faults: Faults) -> None:
    """A reply that decompresses to 1.5 GB."""
    body = MEMBER * 15
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    inner = SERVERS["vllm"](np.zeros((VOCABULARY, VOCABULARY)))

    async def answer(path: str, request: web.Request, _: Any) -> web.StreamResponse:
        return RawReply([head, body])

    inner.answer = answer
    with inner:
        engine = HttpEngine(PROTOCOLS["vllm"](), [inner.url], HttpSettings(attempts=1), vocab_size=VOCABULARY)
        try:
            engine.start(SamplingParams(max_response_tokens=16, eos_id=5), 0)
            generate(engine, [GenerationRequest(3, np.array([1], dtype=np.int32), 4, key=3)])
            faults.add("the bomb was taken")
        except InputError as error:
            print(f"bomb: {error}")
        finally:
            engine.close()


def resident_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--edits", nargs="+", choices=("values", "bytes", "http"), default=["values", "bytes", "http"])
    parser.add_argument("--bomb", action="store_true")
    options = parser.parse_args()
    faults = Faults()
    logging.getLogger().addHandler(faults)
    before = resident_bytes()
    for number, kind in enumerate(options.kinds):
        rng = random.Random(f"{options.seed} {kind}")
        count = options.count // len(options.kinds) + (number < options.count % len(options.kinds))
        begin = time.monotonic()
        if kind == "reward":
            sent, outcomes = attack_rewards(count, rng, faults, options.edits)
        else:
            sent, outcomes = attack(kind, count, rng, faults, options.edits)
        print(f"{kind}: {sent} hostile replies, {dict(outcomes)}, {time.monotonic() - begin:.0f} s", flush=True)
    if options.bomb:
        bomb(faults)
    grown = resident_bytes() - before
    print(f"{faults.count} wrong; memory grew by {grown >> 20} MiB at most", flush=True)
    return 0 if not faults.count and grown < MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
