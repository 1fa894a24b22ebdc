"""What every rollout engine does: continue sequences of token ids, many at a time, and say how likely each token was.

A request is one sequence and how far to continue it. Requests may be submitted at any time and come back in any order,
each as soon as it is finished: an engine batches whatever is there, so a caller that grows a tree submits a node's
children the moment the node comes back and never waits for a level.

**What a sample depends on.** The tokens of a request are a function of its ``token_ids``, its ``key``, the weights and
what the engine was started with, whatever else runs beside it: the uniform number that draws the token at absolute
position p is keyed by (seed, domain, iteration, key, p). (Engines behind a server pass a seed on where it can promise
less; they say so.)

**Logprobs are the trainer's**: of log-softmax(logits / temperature) over the full vocabulary, before any nucleus cuts
it, so importance ratios are 1 at the sampler's weights; greedy decoding (temperature 0) gives those of temperature 1.

An engine is not thread-safe. Under a mesh every rank of a replica makes the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from megatron_dta.sampling.params import SamplingParams


class FinishReason(Enum):
    """Why a request came back."""

    STOP = "stop"  # an end-of-sequence token was sampled; it is the last token
    LENGTH = "length"  # max_tokens were sampled, none of them an end of sequence


@dataclass(frozen=True)
class GenerationRequest:
    """Continue one sequence by up to ``max_tokens`` tokens.

    Attributes:
        request_id: the caller's choice, unique among requests that run or are held.
        token_ids: int32 [T], T >= 1, the whole context: prompt and response so far.
        max_tokens: at least 1.
        key: in [0, 2^63), the sequence's identity for random numbers.
        parent: a finished, still held request that this one continues or branches off: the two contexts (with the
            parent's output) share a prefix, usually all of the parent's. Only a hint where to find K/V.
        hold: keep K/V for children after it has finished, until ``release``. Also a hint: an engine short of memory
            may compute it again.
        prompt_length: tokens of the context that are the prompt, where segments or turns of an earlier request follow
            it; None: all. Requests of one prompt are alike, and one that continues another is of the same response.
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
        token_ids: int32 [R], 1 <= R <= max_tokens, as sampled, the end of sequence included.
        logprobs: float32 [R] (float64 for a float64 model), see the module's docstring.
        policy_version: of the weights that sampled it.
        routed_experts: int16 [R, layers with experts, experts per token] where the engine records them.
    """

    request_id: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    policy_version: int
    routed_experts: np.ndarray | None = None

    @property
    def ended(self) -> bool:
        """Whether an end of sequence came before the length cap."""
        return self.finish_reason is FinishReason.STOP


class RolloutEngine(ABC):
    """Samples continuations; see the module's docstring.

    Attributes:
        needs_checkpoint: whether ``update_weights`` wants the new weights as a folder, because the engine does not run
            on the trainer's own.
    """

    needs_checkpoint: bool = False

    @abstractmethod
    def start(self, params: SamplingParams, iteration: int) -> None:
        """Begin a phase: all requests until the next call are sampled so, in iteration number ``iteration``.

        Nothing may run any more (``ValueError``); what is held of the phase before is released.
        """

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; returns at once, may be called any time after ``start``.

        Raises:
            ValueError: a request that cannot be sampled (empty, too long, ids outside of the vocabulary, an id in use,
                a parent that is not held or shares no prefix); none of ``requests`` is queued then.
        """

    @abstractmethod
    def poll(self) -> list[GenerationResult]:
        """Work or wait until at least one request is finished; those that have finished. Empty only if none runs."""

    @abstractmethod
    def release(self, request_ids: Sequence[int]) -> None:
        """Give up the K/V of held requests; ``ValueError`` for an id that is not held. Their ids are free again."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Counts since the engine was made.

        All engines: ``decoded_tokens`` (sampled), ``prefilled_tokens`` (context tokens computed), ``reused_tokens``
        (context tokens whose K/V were there), ``requests`` (finished), ``seconds`` (spent in ``poll``).
        """

    @abstractmethod
    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """The weights have changed: results carry ``policy_version`` from now on, and no old K/V is used.

        Args:
            checkpoint: folder with the new weights in Hugging Face form, where ``needs_checkpoint``.

        Raises:
            ValueError: requests are running, and the engine cannot change weights under them.
        """

    def interrupt(self) -> None:
        """Let a ``poll`` that waits raise soon, and every later one; the only method another thread may call."""
        return

    def join(self) -> None:  # noqa: B027 (most engines have nobody to wait for)
        """End a phase: return when the engines of all ranks that must run in step have come here."""

    @abstractmethod
    def close(self) -> None:
        """Give up all requests and memory. May be called twice."""


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
    """Submit all, wait for all; the results in the order of the requests. Nothing else may be running."""
    engine.submit(requests)
    finished: dict[int, GenerationResult] = {}
    while len(finished) < len(requests):
        results = engine.poll()
        if not results:
            raise RuntimeError(f"the engine gave {len(finished)} results for {len(requests)} requests")
        finished.update((result.request_id, result) for result in results)
    return [finished[request.request_id] for request in requests]


@contextmanager
def phase(engine: RolloutEngine, params: SamplingParams, iteration: int) -> Iterator[None]:
    """``start`` before the block and ``join`` after it."""
    engine.start(params, iteration)
    try:
        yield
    except FloatingPointError:
        # Weights that have diverged have done so on all ranks, and each is to say so.
        engine.join()
        raise
    engine.join()


def check_request(request: GenerationRequest, *in_use: Container[int], vocab_size: int | None = None) -> None:
    """Refuse what no engine can run; ``ValueError`` names the request and the field.

    Args:
        in_use: ids that another request has.
        vocab_size: token ids are below it; None if that is not known.
    """
    where = f"request {request.request_id}"
    token_ids = request.token_ids
    if not isinstance(token_ids, np.ndarray) or token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
        raise ValueError(f"{where}: token_ids must be a one-dimensional integer array")
    if token_ids.size == 0:
        raise ValueError(f"{where}: token_ids is empty; there must be at least one token to continue")
    if request.max_tokens < 1:
        raise ValueError(f"{where}: max_tokens must be at least 1, got {request.max_tokens}")
    if not 0 <= request.key < 2**63:
        raise ValueError(f"{where}: key must be in [0, 2^63), got {request.key}")
    prompt = token_ids.size if request.prompt_length is None else request.prompt_length
    if not (1 <= prompt <= token_ids.size and 0 <= request.sampled_before <= token_ids.size - prompt):
        raise ValueError(f"{where}: prompt_length and sampled_before do not fit its {token_ids.size} tokens")
    if any(request.request_id in ids for ids in in_use):
        raise ValueError(f"{where}: the id is in use")
    if int(token_ids.min()) < 0 or (vocab_size is not None and int(token_ids.max()) >= vocab_size):
        raise ValueError(f"{where}: token ids outside of the vocabulary of {vocab_size}")
