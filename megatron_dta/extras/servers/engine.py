"""Samples on inference servers over HTTP.

All requests are open at once, up to a limit for each server, whose scheduler batches them. A failed request is sent
again to the same or another server (``http_client``). A reply is used as a whole or not at all, so a server that dies
costs time but never mixes tokens. If a request fails for good, ``poll`` raises.

Requests of one prompt, and a request and its ``parent``, go to the same server, which has their prefix in its cache.
``hold`` and ``release`` have no other effect, since servers evict on their own.

With ``HttpSettings.continues`` weights may change while requests run. The servers then end all requests and reply with
the tokens so far, and each request is sent again with these after its context. Every reply has one version, and so has
every token.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.common.http.replies import TransientFailureError, shortened
from megatron_dta.common.keyed_random import Domain
from megatron_dta.extras.servers.http_client import HttpClient, HttpSettings, Server, ServerError, WrongWeightsError
from megatron_dta.extras.servers.protocol import Asked, LogprobsError, Piece, ServerProtocol, request_seed
from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.extras.servers.sender import Sender
from megatron_dta.extras.servers.weights.updates import ServerWeights
from megatron_dta.sampling.host_weights import HostWeights
from megatron_dta.sampling.interface import (
    ENGINE_COUNTS,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams

_WAIT_S = 0.5


class HttpEngine(RolloutEngine):
    """Samples on the servers at ``urls``.

    Args:
        protocol: the kind of the servers.
        urls: the servers.
        exact_logprobs: refuse servers whose logprobs are not the trainer's; False if they are not used.
        vocab_size: ids outside of it are refused; None: not checked.
        report: called with a line when a server is left out.
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
    ) -> None:
        self._continues = settings is not None and settings.continues
        self._protocol, self._exact_logprobs, self._vocab_size = protocol, exact_logprobs, vocab_size
        self._client = HttpClient(urls, protocol.health_path, settings, report)
        self._weights = ServerWeights(self._client, protocol, self._forget, self._check_returned)
        self._client.still_current = self._weights.has_newest
        self._sender = Sender(self._client, protocol)
        self._interrupted = False
        self._params: SamplingParams | None = None
        self._iteration = 0
        self._checked: dict[str, tuple[float, float]] = {}
        self._running: dict[int, Future[GenerationResult]] = {}
        self._responses: dict[int, SampledTokens] = {}
        # The affinities of requests that are held, and of those that are to be.
        self._held: dict[int, bytes] = {}
        self._to_hold: dict[int, bytes] = {}
        self._finished: queue.Queue[int] = queue.Queue()
        self._counts = dict.fromkeys((*ENGINE_COUNTS, "weight_updates", "rejected_tokens"), 0.0)
        self._update_seconds = 0.0
        self._client.start(self._weights.keep_visiting())

    def start(self, params: SamplingParams, iteration: int) -> None:
        """See the interface; checks the logprobs of servers that have not been checked yet."""
        self._refuse_running()
        self._params, self._iteration = params, iteration
        self._held.clear()
        self._to_hold.clear()
        # The logprobs of an evaluation are not used.
        if self._exact_logprobs and params.domain is not Domain.EVALUATION:
            self._client.start(self._check_logprobs(params)).result()

    def submit(self, requests: Sequence[GenerationRequest], begun: Mapping[int, SampledTokens] | None = None) -> None:
        """See the interface.

        Args:
            begun: what an earlier process has sampled of some requests (``sampled_so_far``), by id.
        """
        if self._params is None:
            raise ValueError("the engine was not started")
        seen: set[int] = set()
        for request in requests:
            check_request(request, self._held, self._running, seen, vocab_size=self._vocab_size)
            seen.add(request.request_id)
        for request in requests:
            affinity = self._affinity(request)
            if request.hold:
                self._to_hold[request.request_id] = affinity
            self._responses[request.request_id] = (begun or {}).get(request.request_id, SampledTokens())
            label = f"request {request.request_id} ({len(request.token_ids)} tokens, up to {request.max_tokens} more)"
            future = self._client.start(self._generate(request, affinity, self._params, self._iteration, label))
            self._running[request.request_id] = future
            future.add_done_callback(lambda _, request_id=request.request_id: self._finished.put(request_id))

    def sampled_so_far(self) -> dict[int, SampledTokens]:
        """The tokens of unfinished requests that servers have replied with, by id; any thread may call this."""
        return {request_id: response for request_id, response in self._responses.copy().items() if len(response)}

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        """See the interface.

        Raises:
            ServerError: a request has failed for good; all others are cancelled.
        """
        results = self.poll_for(0.0) if self._running else []
        while patient and self._running and not results:
            results = self.poll_for(_WAIT_S)
        return results

    def poll_for(self, seconds: float) -> list[GenerationResult]:
        """``poll`` that returns after ``seconds`` in any case, maybe with nothing."""
        if self._interrupted:
            self._cancel()
            raise ServerError("generation was interrupted")
        begin = time.perf_counter()
        results = self._collect(seconds)
        self._counts["seconds"] += time.perf_counter() - begin
        return results

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if self._held.pop(request_id, None) is None:
                raise ValueError(f"request {request_id} is not held")

    def statistics(self) -> dict[str, float]:
        """Adds failures, ``weight_updates`` and their seconds, and the number of servers left."""
        counts = self._client.counts
        return {
            **self._counts,
            "weight_update_seconds": self._update_seconds,
            "retried_requests": float(counts.retried),
            "servers_lost": float(counts.servers_lost),
            "servers": float(len(self._client.alive)),
            "open_requests": float(len(self._running)),
            "queued_requests": float(self._client.num_waiting),
        }

    def update_weights(self, policy_version: int, checkpoint: Path | HostWeights | None = None) -> None:
        """Give all healthy servers the weights; those that fail are left out until they can have them.

        Raises:
            ServerError: no server has the new weights.
        """
        if not self._continues:
            self._refuse_running()
        if checkpoint is None:
            raise ValueError("servers need the weights, as a checkpoint or in host memory")
        begin = time.perf_counter()
        weights = checkpoint.resolve() if isinstance(checkpoint, Path) else checkpoint
        self._client.start(self._weights.update(policy_version, weights, running=bool(self._running))).result()
        self._counts["weight_updates"] += 1
        self._update_seconds += time.perf_counter() - begin

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        self._cancel()
        self._held.clear()
        if not self._client.closed:
            self._client.start(self._weights.close()).result()
        self._client.close()
        self._sender.close()

    def _collect(self, wait_s: float) -> list[GenerationResult]:
        """The finished requests; waits up to ``wait_s`` for the first one."""
        results: list[GenerationResult] = []
        while True:
            try:
                request_id = self._finished.get(False) if results else self._finished.get(timeout=wait_s)
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
            del self._responses[request_id]
            if request_id in self._to_hold:
                self._held[request_id] = self._to_hold.pop(request_id)
            self._counts["requests"] += 1
            self._counts["decoded_tokens"] += len(result.token_ids)
            results.append(result)

    async def _generate(
        self, request: GenerationRequest, affinity: bytes, params: SamplingParams, iteration: int, label: str
    ) -> GenerationResult:
        """Sample until one of the trainer's ends of sequence or the length cap."""
        response, end = self._responses[request.request_id], None
        while len(response) < request.max_tokens and end is None:
            context = np.concatenate([np.asarray(request.token_ids, dtype=np.int32), response.token_ids])
            seed = request_seed(params, iteration, request, len(context), response.rejected)
            left = request.max_tokens - len(response)
            asked = Asked(context, left, self._vocab_size, self._protocol.routing, may_abort=self._continues)
            body, newest = self._protocol.body(context, left, params, seed), self._weights.label

            async def exchange(server: Server, asked: Asked = asked, body: Any = body, newest: str = newest) -> Piece:
                return self._sampled_by_known(await self._sender.exchange(server.url, body, asked), newest)

            piece = await self._client.anywhere(affinity, exchange, label)
            self._counts["reused_tokens"] += piece.cached_tokens
            self._counts["prefilled_tokens"] += len(context) - piece.cached_tokens
            version = self._version_of(piece)
            response = response.extended(piece.token_ids, piece.logprobs, version, params.vocab_size)
            end = response.end(params.eos_ids, label)
            if end is None and len(response) < request.max_tokens:
                self._responses[request.request_id] = response
        self._counts["rejected_tokens"] += response.rejected
        return GenerationResult(
            request.request_id,
            response.token_ids,
            response.logprobs,
            FinishReason.LENGTH if end is None else FinishReason.STOP,
            int(response.versions.min()),
            # The last reply has the experts of all earlier tokens, too.
            piece.routed_experts,
            response.versions if self._continues else None,
        )

    def _version_of(self, piece: Piece) -> int:
        label = next(iter(piece.weight_versions), None) if self._continues else None
        return self._weights.version if label is None else self._weights.version_of(label)

    def _sampled_by_known(self, piece: Piece, label: str) -> Piece:
        """Refuse a piece that was not sampled by the newest weights, or by one known version of them.

        Args:
            label: of the newest weights when the request was made.
        """
        newest = self._weights.label
        if self._continues and newest:
            self._check_versions(piece)
            if not len(piece.token_ids) and label == newest:
                raise TransientFailureError("the server ended the request without a token, and without new weights")
            return piece
        if newest and piece.weight_versions - {newest}:
            others = shortened(", ".join(sorted(piece.weight_versions - {newest})))
            raise WrongWeightsError(f"it samples with the weights {others} and not with {newest}")
        return piece

    def _check_versions(self, piece: Piece) -> None:
        """Refuse a reply without one known version."""
        labels = piece.weight_versions
        if not labels and len(piece.token_ids):
            raise ServerError(
                "replies do not contain the version of the weights; --rollout-max-staleness needs vLLM 0.33 or SGLang"
            )
        unknown = sorted(label for label in labels if self._weights.version_of(label) is None)
        if unknown:
            raise WrongWeightsError(
                f"it samples with the weights {shortened(', '.join(unknown))}, which it was not given"
            )
        if len(labels) > 1:
            raise TransientFailureError("the reply was sampled by two versions of the weights")

    async def _check_logprobs(self, params: SamplingParams) -> None:
        setting = (params.temperature, params.top_p)
        for server in self._client.alive:
            if self._checked.get(server.url) == setting:
                continue
            try:
                await self._protocol.check_logprobs(server, params)
            except LogprobsError:
                raise
            except ServerError as error:
                self._client.leave_out(server, str(error))
                continue
            self._checked[server.url] = setting

    async def _check_returned(self, server: Server) -> None:
        if self._params is not None and self._exact_logprobs:
            await self._protocol.check_logprobs(server, self._params)

    def _forget(self, server: Server) -> None:
        """Check a server again when it returns: it may have been restarted with other settings."""
        self._checked.pop(server.url, None)

    def _affinity(self, request: GenerationRequest) -> bytes:
        """Identifies the prompt of the request, or of its parent."""
        if request.parent is not None:
            return self._held[request.parent]
        return np.asarray(request.token_ids, dtype=np.int32)[: request.prompt_length].tobytes()

    def _refuse_running(self) -> None:
        if self._running:
            raise ValueError(f"{len(self._running)} requests are running")

    def _cancel(self) -> None:
        running, self._running = self._running, {}
        self._responses.clear()
        for future in running.values():
            future.cancel()
        self._finished = queue.Queue()
        self._to_hold.clear()
