"""What the local servers of ``rollout_servers`` have in common: listening, faults on demand, sampling from a table.

The logits of the next token depend on the last one only, so a test can compute any logprob. Loading a checkpoint makes
the table from its embedding.
"""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from rollout_server_forms import BadRequestError, log_softmax, nucleus_logprobs, shared
from weight_receiver import WeightReceiver


class RolloutServer:
    """One server on the loopback interface; ``with`` runs it in a thread.

    Attributes:
        url: where it listens.
        faults: what goes wrong with the next requests to a path, in order: a status, "drop", "truncate", "hang",
            "garbage", "short" (one logprob too few), "long" (one token too many), "abort", "die" (now and for good).
        calls: paths of all requests, in order, and bodies of those to the generating path in ``bodies``.
        violations: weights changed under running requests, old K/V used with new weights.
    """

    kind: str
    generate_path: str

    def __init__(
        self,
        table: np.ndarray,
        model_eos: int | None = None,
        delay_s: float = 0.0,
        temperature_scaled: bool | None = None,
        port: int = 0,
        processes: int = 1,
    ) -> None:
        self.table, self.model_eos, self.delay_s = np.asarray(table, dtype=np.float64), model_eos, delay_s
        # Whether logprobs are after temperature and nucleus (vLLM), or after temperature (SGLang).
        self.temperature_scaled = temperature_scaled
        self.faults: dict[str, list[Any]] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.folders: list[str] = []
        self.loaded: list[dict[str, Tensor]] = []
        self.violations: list[str] = []
        # The table of each label that it was given.
        self.tables: dict[str, np.ndarray] = {}
        self.label = "default"
        self.paused, self.running, self.most_running = False, 0, 0
        # Seconds for each token, beside those for each request; how often all running requests were ended.
        self.token_delay_s, self.aborts = 0.0, 0
        self.receiver, self.bucket_bytes = WeightReceiver(processes), 0
        # Layers and experts of each token that the server returns, if it was started for that.
        self.routing: tuple[int, int] | None = None
        self._cache: list[tuple[int, ...]] = []
        self._cache_is_old = False
        self._loop, self._port, self._stopped = asyncio.new_event_loop(), port, False

    def __enter__(self) -> "RolloutServer":
        ready = threading.Event()

        async def start() -> None:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", self._serve)
            self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", self._port)
            await site.start()
            self._port = site._server.sockets[0].getsockname()[1]
            ready.set()

        def work() -> None:
            self._loop.create_task(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        assert ready.wait(120)
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def stop(self) -> None:
        """No longer listen; what is open is dropped."""
        self.receiver.leave()
        if not self._stopped:
            self._stopped = True
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)

    @property
    def label(self) -> str:
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label, self.tables[label] = label, self.table

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        self.calls.append(path)
        fault = self.faults[path].pop(0) if self.faults.get(path) else None
        raw = await request.read()
        if fault == "die":
            self._stopped = True
            self.receiver.leave()
            self._loop.create_task(self._runner.cleanup())
            request.transport.abort()
        elif fault == "drop":
            request.transport.abort()
        elif fault == "hang":
            await asyncio.sleep(60)
        elif fault == "garbage":
            return web.Response(text="<html>Bad gateway</html>")
        elif isinstance(fault, int):
            return web.json_response({"error": {"message": "injected"}}, status=fault)
        try:
            body = json.loads(raw) if raw else None
            response = await self.answer(path, request, body)
        except BadRequestError as error:
            return web.json_response(self.refusal(str(error)), status=400)
        except json.JSONDecodeError as error:
            return web.json_response(self.refusal(f"JSON decode error: {error}"), status=400)
        if fault in ("short", "long", "abort"):
            response = web.json_response(self.damaged(json.loads(response.body), fault))
        if fault == "truncate":
            cut = web.StreamResponse(headers={"Content-Length": str(len(response.body))})
            await cut.prepare(request)
            await cut.write(response.body[: len(response.body) // 2])
            request.transport.close()
            return cut
        return response

    async def answer(self, path: str, request: web.Request, body: Any) -> web.Response:
        raise NotImplementedError

    def refusal(self, message: str) -> dict[str, Any]:
        raise NotImplementedError

    def damaged(self, reply: dict[str, Any], fault: str) -> dict[str, Any]:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        if self.running:
            self.violations.append("weights changed under running requests")
        self.folders.append(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        if not (Path(folder) / "config.json").is_file() or not files:
            raise BadRequestError(f"{folder} is no checkpoint")
        self.use({name: values for file in files for name, values in load_file(file).items()})

    def use(self, weights: dict[str, Tensor]) -> None:
        self.loaded.append(weights)
        embedding = self.loaded[-1]["model.embed_tokens.weight"].double().numpy()
        self.table = embedding @ embedding.T * 20
        self._cache_is_old = bool(self._cache)

    def begin_transfer(self) -> None:
        if self.running:
            self.violations.append("weights changed under running requests")
        if not self.paused:
            self.violations.append("weights changed without a pause")
        self.receiver.received = {}

    def end_transfer(self) -> None:
        weights, self.receiver.received = self.receiver.received, None
        if "model.embed_tokens.weight" in weights:
            self.use(weights)

    async def in_thread(self, work: Any, *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(None, work, *arguments)

    def flush(self) -> None:
        self._cache, self._cache_is_old = [], False

    async def sample(
        self, context: list[int], most: int, temperature: float, top_p: float, seed: int, stops: set[int],
        allowed: list[int] | None,
    ) -> tuple[list[int], list[float], str, int]:  # fmt: skip
        """Tokens, logprobs, the reason of the end ("stop", "length" or "abort"), context tokens in the cache."""
        if max(context) >= len(self.table) or min(context) < 0:
            raise BadRequestError(f"Token id {max(context)} is out of vocabulary")
        if self._cache_is_old:
            self.violations.append("K/V of old weights used")
        table, aborts = self.table, self.aborts
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        begin = time.monotonic()
        try:
            end = begin + self.delay_s + most * self.token_delay_s
            await asyncio.sleep(0)
            while aborts == self.aborts and time.monotonic() < end:
                await asyncio.sleep(min(max(0.0, end - time.monotonic()), 0.01))
        finally:
            self.running -= 1
        is_aborted = aborts != self.aborts
        if is_aborted:
            most = min(most, int(max(0.0, time.monotonic() - begin - self.delay_s) / (self.token_delay_s or 1e9)))
        cached = max((shared(context, known) for known in self._cache), default=0)
        random, tokens, logprobs = np.random.default_rng(seed), list(context), []
        stopped = False
        while len(logprobs) < most and not stopped:
            raw = log_softmax(table[tokens[-1]])
            drawn = table[tokens[-1]] / (temperature or 1.0)
            if allowed is not None:
                drawn = np.where(np.isin(np.arange(len(drawn)), allowed), drawn, -np.inf)
            scaled = log_softmax(drawn)
            kept = nucleus_logprobs(scaled, top_p)
            token = int(np.argmax(kept)) if temperature == 0 else int(random.choice(len(kept), p=np.exp(kept)))
            tokens.append(token)
            logprobs.append(float(self.returned(raw, scaled, kept)[token]))
            stopped = token in stops
        self._cache.append(tuple(tokens))
        reason = "stop" if stopped else "abort" if is_aborted else "length"
        return tokens[len(context) :], logprobs, reason, min(cached, len(context) - 1)

    async def abort_running(self) -> None:
        self.aborts += 1
        while self.running:
            await asyncio.sleep(0.001)

    def returned(self, raw: np.ndarray, scaled: np.ndarray, kept: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def experts_of(context: list[int], tokens: list[int], layers: int, topk: int) -> np.ndarray:
    """Experts [T - 1, layers, topk] of all tokens but the last: different ones, by token and layer."""
    ids = np.array([*context, *tokens])[:-1]
    return (ids[:, None, None] + np.arange(layers)[None, :, None] + np.arange(topk)) % 8
