"""Defines the interface of rollout engines, which continue sequences of token ids and return the tokens' logprobs.

Requests may be submitted at any time. Each one is returned as soon as it is finished, in any order, so a caller that
grows a tree can submit the children of a node when the node is returned.

**Samples.** The tokens of a request are a function of its ``token_ids``, its ``key``, the weights and the arguments of
``start``. They do not depend on other requests: the uniform number that draws the token at absolute position p is keyed
by (seed, domain, iteration, key, p). Engines on servers only pass a seed on and guarantee less.

**Logprobs** are those of the trainer: log-softmax(logits / temperature) over the full vocabulary, before a nucleus cuts
it, so importance ratios are 1 at the sampler's weights. Greedy decoding (temperature 0) returns those of temperature 1.

An engine is not thread-safe. Under a mesh all ranks of a replica make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.sampling.params import SamplingParams

if TYPE_CHECKING:
    from megatron_dta.sampling.host_weights import HostWeights


class FinishReason(Enum):
    """Why a request has ended."""

    STOP = "stop"  # an end-of-sequence token was sampled; it is the last token
    LENGTH = "length"  # max_tokens were sampled, none of them an end of sequence


@dataclass(frozen=True)
class GenerationRequest:
    """Continue one sequence by up to ``max_tokens`` tokens.

    Attributes:
        request_id: chosen by the caller, unique among running and held requests.
        token_ids: int32 [T], T >= 1, the whole context: prompt and response so far.
        max_tokens: at least 1.
        key: in [0, 2^63), identifies the sequence for random numbers.
        parent: a finished, held request whose tokens share a prefix with this context, usually all of them. It is only
            a hint where to find K/V.
        hold: keep K/V for children after the request has finished, until ``release``. An engine that is short of
            memory may compute it again.
        prompt_length: tokens of the prompt if segments or turns of earlier requests follow it in the context; None: the
            context is the prompt.
        sampled_before: tokens of the context that were sampled for this response.
    """

    request_id: int
    token_ids: np.ndarray
    max_tokens: int
    key: int
    parent: int | None = None
    hold: bool = False
    prompt_length: int | None = None
    sampled_before: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """A finished request.

    Attributes:
        token_ids: int32 [R], 1 <= R <= max_tokens, including the end of sequence.
        logprobs: float32 [R] (float64 for a float64 model), see the module's docstring.
        policy_version: version of the weights that sampled it; of several, the oldest.
        token_versions: int64 [R], the version that sampled each token; None: all are ``policy_version``.
        routed_experts: int16 [context + R, layers with experts, K], the experts of each token of context and response,
            -1 for the last one, which no pass has seen; None if the engine does not record them.
    """

    request_id: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    routed_experts: np.ndarray | None = None
    token_versions: np.ndarray | None = None

    @property
    def ended(self) -> bool:
        """Whether an end of sequence was sampled before the length cap."""
        return self.finish_reason is FinishReason.STOP


class RolloutEngine(ABC):
    """Samples continuations; see the module's docstring.

    Attributes:
        needs_checkpoint: whether ``update_weights`` needs a copy of the new weights, because the engine does not use
            the trainer's.
    """

    needs_checkpoint: bool = False

    @abstractmethod
    def start(self, params: SamplingParams, iteration: int) -> None:
        """Begin a phase: requests until the next call use ``params`` and iteration number ``iteration``.

        Raises ``ValueError`` if requests are running. Held requests of the previous phase are released.
        """

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests and return at once; may be called at any time after ``start``.

        Raises:
            ValueError: a request is invalid (empty, too long, ids outside the vocabulary, an id in use, a parent that
                is not held or shares no prefix). Then none of ``requests`` is queued.
        """

    @abstractmethod
    def poll(self, patient: bool = True) -> list[GenerationResult]:
        """Work or wait until at least one request has finished, if not ``patient`` only for a moment. Returns the
        finished ones; none if nothing runs."""

    @abstractmethod
    def release(self, request_ids: Sequence[int]) -> None:
        """Release the K/V and the ids of held requests; ``ValueError`` for an id that is not held."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counts since the engine was created.

        All engines: ``decoded_tokens`` (sampled), ``prefilled_tokens`` (context tokens computed), ``reused_tokens``
        (context tokens with cached K/V), ``requests`` (finished), ``seconds`` (spent in ``poll``).
        """

    @abstractmethod
    def update_weights(self, policy_version: int, checkpoint: Path | HostWeights | None = None) -> None:
        """Use new weights: later results have ``policy_version``, and old K/V is discarded.

        Args:
            checkpoint: the new weights in Hugging Face form, in a folder or in host memory, if ``needs_checkpoint``.

        Raises:
            ValueError: requests are running, and the engine cannot change weights under them.
        """

    def interrupt(self) -> None:
        """Make a waiting ``poll`` raise soon, and every later one; the only method that other threads may call."""
        return

    def join(self) -> None:  # noqa: B027 (most engines have nothing to wait for)
        """End a phase: wait until the engines of all ranks that run synchronized passes have called this."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, of numbers, strings, lists and tensors; the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        del state

    def timing(self) -> dict[str, float]:
        """Metrics of the last rollout batch that depend on the clock."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Abort all requests and free all memory. May be called twice."""


ENGINE_COUNTS = ("decoded_tokens", "prefilled_tokens", "reused_tokens", "requests", "seconds")
"""The names that ``statistics`` of every engine has."""


def generate(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    take: Callable[[list[GenerationResult]], None] | None = None,
) -> list[GenerationResult]:
    """Submit requests and wait for them; returns the results in their order. Nothing else may be running.

    ``take`` is called with results soon after they arrive, while a device may run ahead.
    """
    engine.submit(requests)
    finished: dict[int, GenerationResult] = {}
    while len(finished) < len(requests):
        results = engine.poll()
        if not results:
            raise RuntimeError(f"the engine gave {len(finished)} results for {len(requests)} requests")
        finished.update((result.request_id, result) for result in results)
        if take is not None:
            take(results)
    return [finished[request.request_id] for request in requests]


@contextmanager
def phase(engine: RolloutEngine, params: SamplingParams, iteration: int) -> Iterator[None]:
    """``start`` before the block and ``join`` after it."""
    engine.start(params, iteration)
    try:
        yield
    except FloatingPointError:
        # Diverged weights are diverged on all ranks; each rank reports the error.
        engine.join()
        raise
    engine.join()


def check_request(
    request: GenerationRequest,
    held: Container[int],
    *in_use: Container[int],
    vocab_size: int | None = None,
    check_tokens: bool = True,
) -> None:
    """Check a request; ``ValueError`` names the request and the field.

    Args:
        held: ids of held requests, among them the request's parent.
        in_use: ids of running and new requests.
        vocab_size: token ids must be below it; None: not checked.
        check_tokens: whether to check the token ids; False where another request with the same array was checked.
    """
    where, token_ids = f"request {request.request_id}", request.token_ids
    if check_tokens:
        if not isinstance(token_ids, np.ndarray) or token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise ValueError(f"{where}: token_ids must be a one-dimensional integer array")
        if token_ids.size == 0:
            raise ValueError(f"{where}: token_ids is empty; there must be at least one token to continue")
        # Without its sign, a negative id is a large one.
        if int(token_ids.view(f"u{token_ids.itemsize}").max()) >= (vocab_size or 2**31):
            raise ValueError(f"{where}: token ids outside of the vocabulary of {vocab_size}")
    if request.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be at least 1, got {request.max_tokens}")
    if not 0 <= request.key < 2**63:
        raise ValueError(f"{where}: key must be in [0, 2^63), got {request.key}")
    prompt = token_ids.size if request.prompt_length is None else request.prompt_length
    if not (1 <= prompt <= token_ids.size and 0 <= request.sampled_before <= token_ids.size - prompt):
        raise ValueError(f"{where}: prompt_length and sampled_before do not fit its {token_ids.size} tokens")
    for ids in (held, *in_use):
        if request.request_id in ids:
            raise ValueError(f"{where}: the id is in use")
    if request.parent is not None and request.parent not in held:
        raise ValueError(f"{where}: its parent {request.parent} is not held")
