"""What differs between inference servers: the forms of requests and replies, and how weights are updated.

**End of sequence.** Only the tokens that the trainer names end a response. Servers also stop at those of the model's
own configuration; a response that such a token has stopped is continued behind it by the engine, so that what is
sampled is the same on every engine.

**Random numbers.** Each request has a seed, made from everything a sample is keyed by and the position where the
request starts. The engines in this process key the number of every position; a server draws its own sequence of
numbers from the seed (vLLM) or ignores it unless told (SGLang), and its matrix products depend on the batch. So samples
of servers do not repeat bit for bit. The starting position is part of the seed because a branch that continues its
sequence under the same key must not see the same numbers again.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.sampling.engines.http_client import HttpClient, Server, ServerError, TransientFailureError
from megatron_dta.sampling.engines.interface import GenerationRequest
from megatron_dta.sampling.engines.server_speculation import DraftCounts, ServerSpeculation
from megatron_dta.sampling.params import SamplingParams

# Servers round logprobs to float32 and compute some of them in bfloat16.
_LARGEST_LOGPROB = 1e-3


@dataclass(frozen=True)
class Piece:
    """What one reply brings.

    Attributes:
        token_ids: int32 [R], R >= 1.
        logprobs: float32 [R].
        stopped: whether a token ended it, rather than the length cap.
        cached_tokens: context tokens that the server had in its prefix cache, where it says so.
        weight_versions: labels of the weights that sampled it, where the server says so.
        drafted, accepted: tokens that it was guessed by, where the server says so.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    cached_tokens: int = 0
    weight_versions: frozenset[str] = frozenset()
    drafted: int = 0
    accepted: int = 0


class ServerProtocol(ABC):
    """The forms of one kind of server.

    Attributes:
        name: as users know the server.
        generate_path, health_path: where to POST requests, and what to GET to know that the server can work.
        label_path: what to GET for the label of the weights, ``weight_version``.
        takes_corpora: whether it drafts from corpora that it is given.
    """

    name: str
    generate_path: str
    health_path: str
    label_path: str
    takes_corpora = False

    @abstractmethod
    def body(self, token_ids: np.ndarray, max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
        """The request that continues ``token_ids``."""

    @abstractmethod
    def read(self, reply: Any, max_tokens: int) -> Piece:
        """The reply to such a request; ``TransientFailureError`` if it has not the server's form."""

    @abstractmethod
    async def check_logprobs(self, client: HttpClient, server: Server, params: SamplingParams) -> None:
        """Ask a server for what tells which logprobs it returns; ``LogprobsError`` if they are not the trainer's."""

    @abstractmethod
    async def update_weights(self, client: HttpClient, server: Server, folder: Path, label: str) -> None:
        """Pause, load, forget the cache, label, continue; ``ServerError`` leaves the server in an unknown state."""

    async def weights_label(self, client: HttpClient, server: Server) -> str | None:
        """The label of the server's weights; None where it does not tell."""
        try:
            info = await client.ask(server, "GET", self.label_path)
        except ServerError:
            return None
        return info.get("weight_version") if isinstance(info, dict) else None

    @abstractmethod
    async def speculation_differs(
        self, client: HttpClient, server: Server, speculation: ServerSpeculation
    ) -> str | None:
        """How a server's settings do not fit; None if they do. ``ServerError`` if it does not tell."""

    async def draft_counts(self, client: HttpClient, server: Server) -> DraftCounts | None:
        """What a server has drafted so far, where its replies do not say it."""
        del client, server
        return None

    async def load_corpus(self, client: HttpClient, server: Server, path: Path, name: str, old: str | None) -> None:
        """Let it draft from a corpus, in the place of the one named ``old``; ``ServerError`` if it cannot."""
        raise NotImplementedError(f"{self.name} takes no corpora")


def request_seed(params: SamplingParams, iteration: int, request: GenerationRequest, position: int) -> int:
    """The seed of a request that starts at ``position``, in [0, 2^63)."""
    identity = f"{params.seed} {int(params.domain)} {iteration} {request.key} {position}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big") >> 1


def field_of(reply: Any, *path: str | int) -> Any:
    """The value at a path of keys and indices of a reply."""
    value = reply
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(str(part) for part in path)
            raise TransientFailureError(f"the reply has no {where}") from error
    return value


def make_piece(
    token_ids: Any,
    logprobs: Any,
    finish_reason: Any,
    max_tokens: int,
    cached_tokens: Any = 0,
    weight_versions: frozenset[str] = frozenset(),
) -> Piece:
    """A checked piece; ``TransientFailureError`` says what is wrong with the reply."""
    if not _are_numbers(token_ids, int) or not _are_numbers(logprobs, (int, float)):
        raise TransientFailureError("the reply's token ids or logprobs are not lists of numbers")
    if len(token_ids) != len(logprobs):
        raise TransientFailureError(f"the reply has {len(token_ids)} token ids and {len(logprobs)} logprobs")
    if not 1 <= len(token_ids) <= max_tokens:
        raise TransientFailureError(f"the reply has {len(token_ids)} token ids, asked were 1 to {max_tokens}")
    if finish_reason not in ("stop", "length"):
        raise TransientFailureError(f"generation ended because of {finish_reason!r}")
    if finish_reason == "length" and len(token_ids) < max_tokens:
        raise TransientFailureError(
            f"generation ended because of its length after {len(token_ids)} of {max_tokens} tokens: the server's own "
            "limit of the context is lower than --max-position-embeddings"
        )
    if min(token_ids) < 0 or max(token_ids) >= 2**31:
        raise TransientFailureError("the reply has a token id outside of [0, 2^31)")
    if not all(math.isfinite(logprob) and logprob <= _LARGEST_LOGPROB for logprob in logprobs):
        raise TransientFailureError("the reply has logprobs that are above 0 or not finite: they are no logprobs")
    return Piece(
        np.array(token_ids, dtype=np.int32),
        np.minimum(np.array(logprobs, dtype=np.float32), 0),
        finish_reason == "stop",
        cached_tokens if isinstance(cached_tokens, int) else 0,
        weight_versions,
    )


class LogprobsError(ServerError):
    """A server returns other logprobs than the trainer's: a matter of its settings, not of its health."""


class SpeculationError(ServerError):
    """A server drafts otherwise than the flags say: a matter of its settings, not of its health."""


def refuse_logprobs(server: Server, params: SamplingParams, returned: str, fix: str) -> LogprobsError:
    """The error for a server whose logprobs are not the trainer's."""
    return LogprobsError(
        f"{server}: returns logprobs {returned}, which with --rollout-temperature {params.temperature:g} and "
        f"--rollout-top-p {params.top_p:g} are not those of the tempered softmax that the trainer compares with; {fix}"
    )


def _are_numbers(values: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(values, list) and all(isinstance(v, kinds) and not isinstance(v, bool) for v in values)
