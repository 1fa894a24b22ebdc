"""A rollout engine behind inference servers: requests in, sampled tokens out, over HTTP, several servers at a time.

All requests are open at once, up to a limit for each server, whose own scheduler batches them. A request that fails is
sent again, here or to another server (``http_client``); it is whole or not there, so a server that dies costs time and
no tokens are mixed. What fails for good makes ``poll`` raise: the step that wanted it does not take place.

Requests of one prompt, and a request and its ``parent``, go to the same server, which then has their prefix in its
cache. ``hold`` and ``release`` have no meaning beyond that: the servers evict on their own.

What is done about servers that draft is in ``server_drafts``.
"""

from __future__ import annotations

import asyncio
import queue
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dta.sampling.engines.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.engines.servers.drafts import ServerDrafts
from megatron_dta.sampling.engines.servers.http_client import (
    HttpClient,
    HttpSettings,
    Server,
    ServerError,
    WrongWeightsError,
)
from megatron_dta.sampling.engines.servers.protocol import (
    Asked,
    LogprobsError,
    Piece,
    ServerProtocol,
    request_seed,
)
from megatron_dta.sampling.engines.servers.replies import shortened
from megatron_dta.sampling.engines.servers.speculation import ServerSpeculation
from megatron_dta.sampling.keyed_random import Domain
from megatron_dta.sampling.params import SamplingParams

_WAIT_S = 0.5


@dataclass
class _Held:
    """A finished request whose children go to the same server."""

    affinity: bytes


class HttpEngine(RolloutEngine):
    """Samples on the servers at ``urls``.

    Args:
        protocol: their kind.
        exact_logprobs: refuse servers whose logprobs are not the trainer's (False where they are not used).
        vocab_size: ids outside of it are refused; None checks nothing.
        report: gets a line when a server is left out.
        speculation: refuse servers that draft otherwise, and count what they accept; None: do neither.

    Attributes:
        drafts: what servers drafted for training; None without ``speculation``.
    """

    needs_checkpoint = True

    def __init__(
        self,
        protocol: ServerProtocol,
        urls: Sequence[str],
        settings: HttpSettings | None = None,
        exact_logprobs: bool = True,
        vocab_size: int | None = None,
        report: Callable[[str], None] = lambda line: None,
        speculation: ServerSpeculation | None = None,
    ) -> None:
        self._protocol, self._exact_logprobs, self._vocab_size = protocol, exact_logprobs, vocab_size
        self._client = HttpClient(urls, protocol.health_path, settings, report)
        self._client.still_current = self._has_label
        self.drafts = None if speculation is None else ServerDrafts(self._client, protocol, speculation, report)
        # Another trainer's weights of the same number are other weights.
        self._run, self._label = uuid.uuid4().hex[:8], ""
        self._policy_version, self._interrupted = 0, False
        self._params: SamplingParams | None = None
        self._iteration = 0
        self._checked: dict[str, tuple[float, float]] = {}
        self._running: dict[int, Future[GenerationResult]] = {}
        self._held: dict[int, _Held] = {}
        self._affinities: dict[int, tuple[bytes, bool]] = {}
        self._prompts: dict[int, set[bytes]] = {}
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._counts = dict.fromkeys(
            ("decoded_tokens", "prefilled_tokens", "reused_tokens", "requests", "seconds", "weight_updates"), 0.0
        )
        self._update_seconds = 0.0

    def start(self, params: SamplingParams, iteration: int) -> None:
        """See the interface; asks servers that have not been asked yet which logprobs they return."""
        self._refuse_running()
        self._params, self._iteration = params, iteration
        self._held.clear()
        self._affinities.clear()
        self._prompts.clear()
        self._client.begin_phase()
        # Nobody reads the logprobs of an evaluation.
        if self._exact_logprobs and params.domain is not Domain.EVALUATION:
            self._client.start(self._check_logprobs(params)).result()
        if self._counted_drafts is not None:
            self._client.start(self._counted_drafts.begin()).result()

    @property
    def _counted_drafts(self) -> ServerDrafts | None:
        """Those of the present phase, unless it is an evaluation."""
        return self.drafts if self._params.domain is not Domain.EVALUATION else None

    def join(self) -> None:
        """See the interface; asks servers that count drafts for all requests together."""
        if self._counted_drafts is not None:
            self._client.start(self._counted_drafts.end()).result()

    def load_corpus(self, path: Path) -> None:
        """Let all servers draft from the texts in ``path`` (JSON strings, one a line), and no longer from others.

        Raises:
            ValueError: the servers are not known to draft from corpora.
        """
        self._refuse_running()
        if self.drafts is None or not self._protocol.takes_corpora:
            raise ValueError(f"{self._protocol.name} takes no corpora here")
        self._client.start(self.drafts.load_corpus(path.resolve(), f"{self._run}-{path.stem}")).result()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        seen: set[int] = set()
        for request in requests:
            self._check(request, seen)
            seen.add(request.request_id)
        for request in requests:
            affinity = self._affinity(request)
            self._affinities[request.request_id] = (affinity, request.hold)
            label = f"request {request.request_id} ({len(request.token_ids)} tokens, up to {request.max_tokens} more)"
            future = self._client.start(self._generate(request, affinity, self._params, self._iteration, label))
            self._running[request.request_id] = future
            future.add_done_callback(lambda _, request_id=request.request_id: self._finished.put(request_id))

    def poll(self) -> list[GenerationResult]:
        """See the interface.

        Raises:
            ServerError: a request has failed for good; all others are given up.
        """
        begin = time.perf_counter()
        results: list[GenerationResult] = []
        while self._running and not results:
            if self._interrupted:
                self._cancel()
                raise ServerError("generation was interrupted")
            results = self._collect(wait=True)
        self._counts["seconds"] += time.perf_counter() - begin
        return results

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if self._held.pop(request_id, None) is None:
                raise ValueError(f"request {request_id} is not held")

    def statistics(self) -> dict[str, float]:
        """Besides the interface's: failures, ``weight_updates`` and their seconds, and how many servers are left."""
        counts = self._client.counts
        return {
            **self._counts,
            "weight_update_seconds": self._update_seconds,
            "retried_requests": float(counts.retried),
            "moved_requests": float(counts.moved),
            "servers_lost": float(counts.servers_lost),
            "servers": float(sum(server.alive for server in self._client.servers)),
        }

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """Let all healthy servers load ``checkpoint``; those that fail are left out until the next update.

        Raises:
            ServerError: no server has the new weights.
        """
        self._refuse_running()
        if checkpoint is None:
            raise ValueError("servers need the weights as a checkpoint")
        begin = time.perf_counter()
        self._label = f"{self._run}-{policy_version}"
        self._policy_version = policy_version
        self._client.start(self._update_all(checkpoint.resolve())).result()
        self._counts["weight_updates"] += 1
        self._update_seconds += time.perf_counter() - begin

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        self._cancel()
        self._held.clear()
        self._client.close()

    def _collect(self, wait: bool) -> list[GenerationResult]:
        """What has finished; with ``wait`` some time is spent waiting for the first."""
        results: list[GenerationResult] = []
        while True:
            try:
                request_id = self._finished.get(timeout=_WAIT_S) if wait and not results else self._finished.get(False)
            except queue.Empty:
                return results
            future = self._running.pop(request_id, None)
            if future is None or future.cancelled():
                continue
            error = future.exception()
            if error is not None:
                self._cancel()
                raise error
            result = future.result()
            affinity, hold = self._affinities.pop(request_id)
            if hold:
                self._held[request_id] = _Held(affinity)
            self._counts["requests"] += 1
            self._counts["decoded_tokens"] += len(result.token_ids)
            results.append(result)

    async def _generate(
        self, request: GenerationRequest, affinity: bytes, params: SamplingParams, iteration: int, label: str
    ) -> GenerationResult:
        """Sample until one of the trainer's own ends of sequence, or the cap."""
        tokens, logprobs = [np.asarray(request.token_ids, dtype=np.int32)], []
        left, stopped = request.max_tokens, False
        while left and not stopped:
            context = np.concatenate(tokens)
            seed = request_seed(params, iteration, request, len(context))
            body = self._protocol.body(context, left, params, seed)
            asked = Asked(context, left, self._vocab_size)
            piece = await self._client.post_anywhere(
                affinity,
                self._protocol.generate_path,
                body,
                lambda reply, asked=asked: self._read(reply, asked),
                label,
                asked.most_reply_bytes,
            )
            self._counts["reused_tokens"] += piece.cached_tokens
            self._counts["prefilled_tokens"] += len(context) - piece.cached_tokens
            if self._counted_drafts is not None:
                self._counted_drafts.add(piece)
            tokens.append(piece.token_ids)
            logprobs.append(piece.logprobs)
            left -= len(piece.token_ids)
            ends = np.flatnonzero(np.isin(piece.token_ids, list(params.eos_ids)))
            stopped = ends.size > 0
            if stopped and int(ends[0]) + 1 < len(piece.token_ids):
                raise ServerError(f"{label}: sampled past an end of sequence, though it was told where to stop")
        return GenerationResult(
            request.request_id,
            np.concatenate(tokens[1:]),
            np.concatenate(logprobs),
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            self._policy_version,
        )

    def _read(self, reply: object, asked: Asked) -> Piece:
        piece = self._protocol.read(reply, asked)
        if self._label and piece.weight_versions - {self._label}:
            others = shortened(", ".join(sorted(piece.weight_versions - {self._label})))
            raise WrongWeightsError(f"it samples with the weights {others} and not with {self._label}")
        return piece

    async def _has_label(self, server: Server) -> bool:
        return bool(self._label) and await self._protocol.weights_label(self._client, server) == self._label

    async def _check_logprobs(self, params: SamplingParams) -> None:
        setting = (params.temperature, params.top_p)
        for server in self._client.servers:
            if not server.alive or self._checked.get(server.url) == setting:
                continue
            try:
                await self._protocol.check_logprobs(self._client, server, params)
            except LogprobsError:
                raise
            except ServerError as error:
                self._client.leave_out(server, str(error))
                continue
            self._checked[server.url] = setting

    async def _update_all(self, folder: Path) -> None:
        healthy = await self._client.find_healthy()
        for attempt in range(1, self._client.settings.attempts):
            if healthy:
                break
            # They may still be starting.
            await self._client.pause(attempt)
            healthy = await self._client.find_healthy()
        failures = await asyncio.gather(*(self._update(server, folder) for server in healthy))
        if not healthy or all(failures):
            reasons = "; ".join(f"{server}: {server.problem}" for server in self._client.servers)
            raise ServerError(f"no rollout server could take the new weights ({reasons})")

    async def _update(self, server: Server, folder: Path) -> bool:
        """Whether it failed."""
        try:
            await self._protocol.update_weights(self._client, server, folder, self._label)
        except ServerError as error:
            self._client.leave_out(server, str(error))
            server.problem = str(error)
            # It may have been started with other settings when it comes back.
            self._checked.pop(server.url, None)
            if self.drafts is not None:
                self.drafts.forget(server)
            return True
        self._client.take_back(server)
        return False

    def _affinity(self, request: GenerationRequest) -> bytes:
        """The name of the prompt that the request belongs to: its parent's, or the one its context begins with."""
        if request.parent is not None:
            return self._held[request.parent].affinity
        context = np.asarray(request.token_ids, dtype=np.int32).tobytes()
        for length in (len(context), *(known for known in self._prompts if known < len(context))):
            if context[:length] in self._prompts.get(length, ()):
                return context[:length]
        self._prompts.setdefault(len(context), set()).add(context)
        return context

    def _check(self, request: GenerationRequest, seen: set[int]) -> None:
        check_request(request, self._running, self._held, seen, vocab_size=self._vocab_size)
        if request.parent is not None and request.parent not in self._held:
            raise ValueError(f"request {request.request_id}: its parent {request.parent} is not held")

    def _refuse_running(self) -> None:
        if self._running:
            raise ValueError(f"{len(self._running)} requests are running")

    def _cancel(self) -> None:
        running, self._running = self._running, {}
        for future in running.values():
            future.cancel()
        self._finished = queue.SimpleQueue()
        self._affinities.clear()
