"""A rollout engine without a model that records all requests, for tests of the callers of engines.

The token at each position is a function of all tokens before it, the request's key and the position. A test can
therefore check every token of a tree against the prefix that the tree records for it: ``RecordingEngine.token_after``
returns the token again, and a context that was spliced, shifted or cut elsewhere gives a different one. Results are
returned a few at a time in a shuffled order, as from continuous batching.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_dta.sampling.interface import (
    ENGINE_COUNTS,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams

# A probability, or a function of the absolute position: for a length distribution its hazard rate.
EndProbability = float | Callable[[int], float]


class RecordingEngine(RolloutEngine):
    """Samples deterministic tokens, records requests and finishes them in a random order.

    Attributes:
        requests: all requests in the order of their submission.
        results: by request id, including released requests; the last one of an id that was used again.
        held: ids of finished requests that are held.
        calls: names and request ids of all calls, in order: ("submit", 3), ("finish", 3), ("release", 3), ...

    Args:
        vocab_size: tokens are in [0, vocab_size); the tokens that end a sequence come from ``start``'s params.
        end_probability: probability that the token at a position ends the sequence, or a function of the absolute
            position that gives it.
        seed: determines the order of results, not the tokens.
        most_at_once: maximum number of results of a poll.
        tokens_per_poll: tokens by which a poll advances each running request; None: requests finish in a random order,
            independent of their length.
    """

    def __init__(
        self, vocab_size: int = 1000, end_probability: EndProbability = 0.0, seed: int = 0, most_at_once: int = 4,
        tokens_per_poll: int | None = None,
    ) -> None:  # fmt: skip
        self.requests: list[GenerationRequest] = []
        self.results: dict[int, GenerationResult] = {}
        self.held: set[int] = set()
        self.calls: list[tuple[str, int]] = []
        self._vocab_size, self._end_probability = vocab_size, end_probability
        self._order = np.random.default_rng(seed)
        self._most_at_once, self._tokens_per_poll = most_at_once, tokens_per_poll
        self._running: dict[int, tuple[GenerationRequest, GenerationResult, int]] = {}
        self._contexts: dict[int, np.ndarray] = {}
        self._params: SamplingParams | None = None
        self._iteration = self._policy_version = 0
        self._counts = dict.fromkeys(ENGINE_COUNTS, 0.0)

    def start(self, params: SamplingParams, iteration: int) -> None:
        if self._running:
            raise ValueError(f"{len(self._running)} requests are running")
        self._params, self._iteration = params, iteration
        self.held.clear()
        self._contexts.clear()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        seen: set[int] = set()
        for request in requests:
            self._check(request, seen)
            seen.add(request.request_id)
        for request in requests:
            result = self._sample(request)
            self.requests.append(request)
            self.calls.append(("submit", request.request_id))
            self._running[request.request_id] = (request, result, 0)
            # The last token of a context is always computed.
            shared = min(self._shared_prefix(request), len(request.token_ids) - 1)
            self._counts["reused_tokens"] += shared
            self._counts["prefilled_tokens"] += len(request.token_ids) - shared

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        if not self._running or (not patient and self._order.random() < 0.5):
            return []
        finished: list[int] = []
        while not finished:
            if self._tokens_per_poll is None:
                finished = list(self._running)
            else:
                for key, (request, result, done) in self._running.items():
                    self._running[key] = (request, result, done + self._tokens_per_poll)
                finished = [key for key, (_, result, done) in self._running.items() if done >= len(result.token_ids)]
        count = min(len(finished), int(self._order.integers(1, self._most_at_once + 1)))
        return [self._finish(finished[i]) for i in self._order.permutation(len(finished))[:count]]

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id not in self.held:
                raise ValueError(f"request {request_id} is not held")
            self.held.discard(request_id)
            self.calls.append(("release", request_id))

    def statistics(self) -> dict[str, float]:
        return dict(self._counts)

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        if self._running:
            raise ValueError(f"{len(self._running)} requests are running")
        self._policy_version = policy_version

    def close(self) -> None:
        self._running.clear()
        self.held.clear()

    def token_after(self, prefix: Sequence[int] | np.ndarray, key: int) -> int:
        """The token this engine samples after ``prefix`` for a request with ``key``."""
        end, token, _ = self._numbers(np.asarray(prefix, dtype=np.int32), key)
        eos_ids = sorted(self._params.eos_ids)
        position = len(prefix)
        probability = self._end_probability(position) if callable(self._end_probability) else self._end_probability
        if end < probability:
            return eos_ids[int(token * len(eos_ids))]
        others = self._vocab_size - sum(0 <= eos < self._vocab_size for eos in eos_ids)
        chosen = int(token * others)
        for eos in eos_ids:
            chosen += 0 <= eos <= chosen
        return chosen

    def logprob_after(self, prefix: Sequence[int] | np.ndarray, key: int) -> float:
        """The logprob of the token after ``prefix``, keyed in the same way, in (-4, 0]."""
        return -4 * self._numbers(np.asarray(prefix, dtype=np.int32), key)[2]

    def _numbers(self, prefix: np.ndarray, key: int) -> tuple[float, float, float]:
        """Three uniforms in [0, 1) keyed by all the prefix's tokens, the key, its length and the phase."""
        phase = f"{self._params.seed} {int(self._params.domain)} {self._iteration} {key} {len(prefix)} "
        digest = hashlib.blake2b(phase.encode() + prefix.tobytes(), digest_size=24).digest()
        first, second, third = struct.unpack("<3Q", digest)
        return (first >> 11) * 2.0**-53, (second >> 11) * 2.0**-53, (third >> 11) * 2.0**-53

    def _sample(self, request: GenerationRequest) -> GenerationResult:
        tokens = [int(token) for token in request.token_ids]
        prompt_length, logprobs, reason = len(tokens), [], FinishReason.LENGTH
        while len(logprobs) < request.max_tokens and reason is FinishReason.LENGTH:
            logprobs.append(self.logprob_after(tokens, request.key))
            tokens.append(self.token_after(tokens, request.key))
            if tokens[-1] in self._params.eos_ids:
                reason = FinishReason.STOP
        return GenerationResult(
            request.request_id,
            np.array(tokens[prompt_length:], dtype=np.int32),
            np.array(logprobs, dtype=np.float32),
            reason,
            self._policy_version,
        )

    def _finish(self, request_id: int) -> GenerationResult:
        request, result, _ = self._running.pop(request_id)
        self.results[request_id] = result
        self._contexts[request_id] = np.concatenate([request.token_ids, result.token_ids])
        self.calls.append(("finish", request_id))
        if request.hold:
            self.held.add(request_id)
        self._counts["requests"] += 1
        self._counts["decoded_tokens"] += len(result.token_ids)
        return result

    def _check(self, request: GenerationRequest, seen: set[int]) -> None:
        check_request(request, self.held, self._running, seen, vocab_size=self._vocab_size)
        if request.parent is not None and self._shared_prefix(request) == 0:
            raise ValueError(f"request {request.request_id}: shares no prefix with its parent {request.parent}")

    def _shared_prefix(self, request: GenerationRequest) -> int:
        """Length of the common prefix of the context and its parent's tokens; 0 without a parent."""
        if request.parent is None:
            return 0
        parent = self._contexts[request.parent]
        length = min(len(parent), len(request.token_ids))
        differing = np.flatnonzero(parent[:length] != request.token_ids[:length])
        return int(differing[0]) if differing.size else length
