"""Defines what differs between inference servers: the forms of requests and replies, and the update of weights.

**End of sequence.** Only the trainer's end tokens end a response. Servers also stop at those of the model's own
configuration; the engine continues such a response, so that samples have the same distribution on every engine.

**Random numbers.** Each request has a seed, made from the key of the sample and the position where the request starts.
(A branch that continues its sequence under the same key must not see the same numbers again.) A server draws its own
sequence of numbers from the seed (vLLM) or ignores it by default (SGLang), and its matrix products depend on the batch.
So samples of servers do not repeat bit for bit.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.common.http.replies import TransientFailureError, field_of, list_of, shown
from megatron_dta.extras.servers.http_client import Server, ServerError
from megatron_dta.sampling.interface import GenerationRequest
from megatron_dta.sampling.params import SamplingParams

if TYPE_CHECKING:  # torch, which the process that sends requests does without
    from megatron_dta.extras.servers.weights.groups import GroupOpener, Meeting
    from megatron_dta.sampling.host_weights import Bucket

# Servers round logprobs to float32 and compute some of them in bfloat16; vLLM reports probability 0 as -9999.
_LARGEST_LOGPROB, _SMALLEST_LOGPROB = 1e-3, -1e5
NEUTRAL_SAMPLING = {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""Values with which sampling parameters other than temperature and ``top_p`` have no effect."""

# Maximum bytes of a reply per token, and for the rest of it.
_TOKEN_BYTES, _OTHER_BYTES = 256, 1 << 20

# Bytes of the largest integers that servers send.
INTEGER_BYTES = 8


@dataclass(frozen=True)
class RoutingShape:
    """The experts that a reply lists for each token.

    Attributes:
        moe_layers: whether each layer of the model has experts.
        topk: experts of each token in a layer.
        num_experts: experts of a layer.
    """

    moe_layers: tuple[bool, ...]
    topk: int
    num_experts: int

    @property
    def most_text_bytes(self) -> int:
        """Maximum number of characters of a reply for a token."""
        return 2 * INTEGER_BYTES * len(self.moe_layers) * self.topk


@dataclass(frozen=True)
class Asked:
    """The request to which a reply must belong.

    Attributes:
        token_ids: int32 [C], the context to continue.
        max_tokens: maximum number of tokens to sample.
        vocab_size: ids must be below it; None: below 2^31.
        routing: the layers whose experts the reply must contain; None for no layers.
        may_abort: the reply may end before its end, after any number of tokens, because new weights were loaded.
    """

    token_ids: np.ndarray
    max_tokens: int
    vocab_size: int | None = None
    routing: RoutingShape | None = None
    may_abort: bool = False

    @property
    def most_reply_bytes(self) -> int:
        """Maximum length of a reply."""
        token_bytes = _TOKEN_BYTES + (0 if self.routing is None else self.routing.most_text_bytes)
        return _OTHER_BYTES + token_bytes * (len(self.token_ids) + self.max_tokens)


@dataclass(frozen=True)
class Piece:
    """The contents of one reply.

    Attributes:
        token_ids: int32 [R], R >= 1 unless the reply was aborted.
        logprobs: float32 [R].
        stopped: whether a token ended it, rather than the length cap.
        aborted: whether it may be continued.
        cached_tokens: context tokens from the server's prefix cache, if reported.
        weight_versions: labels of the weights that sampled it, if reported.
        routed_experts: int16 [C + R, layers with experts, K], see ``GenerationResult``.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    aborted: bool = False
    cached_tokens: int = 0
    weight_versions: frozenset[str] = frozenset()
    routed_experts: np.ndarray | None = None


class ServerProtocol(ABC):
    """The interface of one kind of server.

    Args:
        routing: the layers of the model if replies must contain the experts of every token, else None.
        open_group: opens process groups with such servers; None: weights come from folders.

    Attributes:
        name: as users know the server.
        generate_path, health_path: paths for POST of requests and for GET of the health.
        label_path: path for GET of the label of the weights, ``weight_version``.
        meets_by_unique_id: whether the server joins groups of NCCL by their unique id instead of through a store.
        receives_many: whether it can be told of several buckets of one dtype at once.
    """

    name: str
    generate_path: str
    health_path: str
    label_path: str
    meets_by_unique_id = receives_many = False

    def __init__(self, routing: RoutingShape | None = None, open_group: GroupOpener | None = None) -> None:
        self.routing = routing
        self.open_group = open_group

    @abstractmethod
    def body(self, token_ids: np.ndarray, max_tokens: int, params: SamplingParams, seed: int) -> dict[str, Any]:
        """The request that continues ``token_ids``."""

    @abstractmethod
    def read(self, reply: Any, asked: Asked) -> Piece:
        """Read the reply to such a request; ``TransientFailureError`` if it does not have the server's form."""

    @abstractmethod
    async def check_logprobs(self, server: Server, params: SamplingParams) -> None:
        """Find out which logprobs a server returns; ``LogprobsError`` if they are not the trainer's."""

    @abstractmethod
    async def update_weights(self, server: Server, folder: Path, label: str, running: bool = False) -> None:
        """Pause, load, clear the cache, set the label, continue; ``ServerError`` leaves the state unknown.

        Args:
            running: requests may be running; the server ends them, and replies with the tokens so far.
        """

    @abstractmethod
    async def world_size(self, server: Server) -> int:
        """The number of a server's processes, each of which joins a group."""

    @abstractmethod
    async def join_group(self, server: Server, meeting: Meeting, rank_offset: int, bucket_bytes: int) -> None:
        """Let a server's processes join a group with consecutive ranks; returns when all members have joined.

        Args:
            bucket_bytes: see ``HostWeights.bucket_bytes``.
        """

    async def leave_group(self, server: Server, meeting: Meeting) -> None:  # noqa: B027
        """Let a server leave its group before it joins another one."""

    @abstractmethod
    async def begin_update(self, server: Server, running: bool) -> None:
        """Pause a server and prepare it for new weights; ``running`` as for ``update_weights``."""

    @abstractmethod
    async def receive(self, server: Server, buckets: Sequence[Bucket], meeting: Meeting) -> None:
        """Let a server receive buckets from its group, see ``receives_many``; returns when it has."""

    @abstractmethod
    async def end_update(self, server: Server, label: str) -> None:
        """Use the new weights: clear the prefix cache, set the label, continue."""

    @abstractmethod
    async def give_up_update(self, server: Server) -> None:
        """End a failed update, so that another one can begin; the server stays paused."""

    async def weights_label(self, server: Server) -> str | None:
        """The label of the server's weights; None if it does not report one."""
        try:
            info = await server.ask("GET", self.label_path)
        except ServerError:
            return None
        label = info.get("weight_version") if isinstance(info, dict) else None
        return label if isinstance(label, str) else None


def request_seed(
    params: SamplingParams, iteration: int, request: GenerationRequest, position: int, rejected: int = 0
) -> int:
    """The seed of a request that starts at ``position``, in [0, 2^63).

    rejected: number of tokens that were rejected before.
    """
    identity = f"{params.seed} {int(params.domain)} {iteration} {request.key} {position}"
    identity += f" {rejected}" if rejected else ""
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
    """Check the contents of a reply; ``TransientFailureError`` names the fault.

    Args:
        names: the fields of the token ids and of their logprobs.
        weight_versions: labels of the weights; None if not reported.
    """
    list_of(token_ids, int, names[0])
    list_of(logprobs, (int, float), names[1])
    if len(token_ids) != len(logprobs):
        raise TransientFailureError(f"the reply has {len(token_ids)} {names[0]} and {len(logprobs)} {names[1]}")
    aborted = asked.may_abort and finish_reason == "abort"
    if not (0 if aborted else 1) <= len(token_ids) <= asked.max_tokens:
        raise TransientFailureError(f"the reply has {len(token_ids)} {names[0]}, not 1 to {asked.max_tokens}")
    if finish_reason not in ("stop", "length") and not aborted:
        raise TransientFailureError(f"generation ended because of {shown(finish_reason)}")
    if finish_reason == "length" and len(token_ids) < asked.max_tokens:
        raise TransientFailureError(
            f"generation ended because of its length after {len(token_ids)} of {asked.max_tokens} tokens: the server's "
            "own limit of the context is lower than --max-position-embeddings"
        )
    limit = asked.vocab_size or 2**31
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limit:
        outside = next(token for token in token_ids if not 0 <= token < limit)
        raise TransientFailureError(
            f"the reply's {names[0]} have {shown(outside)}, outside of the vocabulary of {limit}: the server has "
            "another model"
        )
    if logprobs and not _SMALLEST_LOGPROB <= min(logprobs) <= max(logprobs) <= _LARGEST_LOGPROB:
        wrong = next(v for v in logprobs if not _SMALLEST_LOGPROB <= v <= _LARGEST_LOGPROB)
        raise TransientFailureError(
            f"the reply's {names[1]} have {shown(wrong)}, which is not a logprob: above 0, "
            f"below {_SMALLEST_LOGPROB:g} or not finite"
        )
    labels = list_of(weight_versions or [], (int, str), "weight_versions")
    return Piece(
        np.array(token_ids, dtype=np.int32),
        np.minimum(np.array(logprobs, dtype=np.float32), 0),
        finish_reason == "stop",
        aborted,
        # A request that the server restarted counts them again.
        max(0, min(cached_tokens or 0, len(asked.token_ids))),
        frozenset(shown(label) if isinstance(label, int) else label for label in labels),
    )


def check_prompt_length(reply: Any, asked: Asked, *path: str | int) -> None:
    """Refuse a reply whose number of prompt tokens, if reported, is not that of the request."""
    reported = field_of(reply, *path, kind=int, optional=True)
    if reported is not None and reported != len(asked.token_ids):
        where = ".".join(str(part) for part in path)
        raise TransientFailureError(
            f"the reply is to another prompt: its {where} are {shown(reported)}, but {len(asked.token_ids)} were sent"
        )


class LogprobsError(ServerError):
    """A server returns other logprobs than the trainer's, because of its settings."""


def refuse_logprobs(server: Server, params: SamplingParams, returned: str, fix: str) -> LogprobsError:
    """The error for a server whose logprobs are not the trainer's."""
    return LogprobsError(
        f"{server}: returns logprobs {returned}, which with --rollout-temperature {params.temperature:g} and "
        f"--rollout-top-p {params.top_p:g} are not those of the tempered softmax that the trainer compares with; {fix}"
    )
