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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.sampling.engines.interface import GenerationRequest
from megatron_dta.sampling.engines.servers.http_client import HttpClient, Server, ServerError
from megatron_dta.sampling.engines.servers.replies import TransientFailureError, as_float, field_of, list_of, shown
from megatron_dta.sampling.engines.servers.speculation import DraftCounts, ServerSpeculation
from megatron_dta.sampling.params import SamplingParams

# Servers round logprobs to float32 and compute some of them in bfloat16; vLLM has -9999 for those of no probability.
_LARGEST_LOGPROB, _SMALLEST_LOGPROB = 1e-3, -1e5
# What servers say of a token, in and out, and around all of them.
_TOKEN_BYTES, _OTHER_BYTES = 256, 1 << 20


@dataclass(frozen=True)
class Asked:
    """What a reply must answer.

    Attributes:
        token_ids: int32 [C], the context that was to be continued.
        max_tokens: most tokens to sample.
        vocab_size: ids must be below it; None: below 2^31.
    """

    token_ids: np.ndarray
    max_tokens: int
    vocab_size: int | None = None

    @property
    def most_reply_bytes(self) -> int:
        """What a reply may have at most."""
        return _OTHER_BYTES + _TOKEN_BYTES * (len(self.token_ids) + self.max_tokens)


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
    def read(self, reply: Any, asked: Asked) -> Piece:
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
        label = info.get("weight_version") if isinstance(info, dict) else None
        return label if isinstance(label, str) else None

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


def make_piece(
    token_ids: Any,
    logprobs: Any,
    finish_reason: str,
    asked: Asked,
    names: tuple[str, str],
    cached_tokens: int | None = None,
    weight_versions: Any = None,
) -> Piece:
    """A checked piece; ``TransientFailureError`` says what is wrong with the reply.

    Args:
        names: of the fields of the token ids and of their logprobs.
        weight_versions: labels of the weights; None where the server does not say.
    """
    list_of(token_ids, int, names[0])
    list_of(logprobs, (int, float), names[1])
    if len(token_ids) != len(logprobs):
        raise TransientFailureError(f"the reply has {len(token_ids)} {names[0]} and {len(logprobs)} {names[1]}")
    if not 1 <= len(token_ids) <= asked.max_tokens:
        raise TransientFailureError(f"the reply has {len(token_ids)} {names[0]}, asked were 1 to {asked.max_tokens}")
    if finish_reason not in ("stop", "length"):
        raise TransientFailureError(f"generation ended because of {shown(finish_reason)}")
    if finish_reason == "length" and len(token_ids) < asked.max_tokens:
        raise TransientFailureError(
            f"generation ended because of its length after {len(token_ids)} of {asked.max_tokens} tokens: the server's "
            "own limit of the context is lower than --max-position-embeddings"
        )
    limit = asked.vocab_size or 2**31
    outside = next((token for token in token_ids if not 0 <= token < limit), None)
    if outside is not None:
        raise TransientFailureError(
            f"the reply's {names[0]} have {shown(outside)}, outside of the vocabulary of {limit}: the server has "
            "another model"
        )
    wrong = next((v for v in logprobs if not _SMALLEST_LOGPROB <= as_float(v) <= _LARGEST_LOGPROB), None)
    if wrong is not None:
        raise TransientFailureError(
            f"the reply's {names[1]} have {shown(wrong)}, which is no logprob: above 0, below {_SMALLEST_LOGPROB:g} or "
            "not finite"
        )
    labels = list_of(weight_versions or [], (int, str), "weight_versions")
    return Piece(
        np.array(token_ids, dtype=np.int32),
        np.minimum(np.array(logprobs, dtype=np.float32), 0),
        finish_reason == "stop",
        # A request that the server has begun anew counts them again.
        max(0, min(cached_tokens or 0, len(asked.token_ids))),
        frozenset(shown(label) if isinstance(label, int) else label for label in labels),
    )


def check_prompt_length(reply: Any, asked: Asked, *path: str | int) -> None:
    """Refuse a reply that counts other tokens in its prompt than it was sent, where it counts them."""
    told = field_of(reply, *path, kind=int, optional=True)
    if told is not None and told != len(asked.token_ids):
        where = ".".join(str(part) for part in path)
        raise TransientFailureError(
            f"the reply is to another prompt: its {where} are {shown(told)}, sent were {len(asked.token_ids)}"
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
