"""Reads the experts that a server's routers chose for every token from its replies, for routing replay.

vLLM sends a NumPy file and SGLang plain 32-bit integers, both in base64. Both contain the experts of prompt and
response except for the last token, which no pass has seen. Entries for layers without experts are left out.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import replace

import numpy as np

from megatron_dta.common.http.replies import TransientFailureError
from megatron_dta.extras.servers.http_client import ServerError
from megatron_dta.extras.servers.protocol import Asked, Piece


class RoutingError(ServerError):
    """A server returns no experts, or those of another model."""


def array_of(text: str | None, name: str) -> np.ndarray | None:
    """The array of a NumPy file in base64; ``TransientFailureError`` if it is none."""
    if text is None:
        return None
    try:
        array = np.load(io.BytesIO(_bytes_of(text, name)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TransientFailureError(f"the reply's {name} is no NumPy array") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise TransientFailureError(f"the reply's {name} is no NumPy array of integers")
    return array


def integers_of(text: str | None, name: str) -> np.ndarray | None:
    """The 32-bit integers in base64; ``TransientFailureError`` if they are none."""
    if text is None:
        return None
    content = _bytes_of(text, name)
    if len(content) % 4:
        raise TransientFailureError(f"the reply's {name} is not a list of 32-bit integers")
    return np.frombuffer(content, dtype="<i4")


def _bytes_of(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TransientFailureError(f"the reply's {name} is not in base64") from error


def with_routing(piece: Piece, experts: np.ndarray | None, asked: Asked, server: str) -> Piece:
    """``piece`` with the experts of all tokens of context and response, of the layers that have experts.

    Raises:
        RoutingError: the server sends none, or they are not of this model.
    """
    shape, length = asked.routing, len(asked.token_ids) + len(piece.token_ids)
    if experts is None:
        raise RoutingError(
            f"--moe-routing-replay: {server} does not return the experts of its tokens; start it with "
            "--enable-return-routed-experts"
        )
    for num_tokens in (length - 1, length):
        for is_used in (np.array(shape.moe_layers), np.ones(sum(shape.moe_layers), dtype=bool)):
            if experts.size == num_tokens * len(is_used) * shape.topk and experts.size:
                routing = experts.reshape(num_tokens, len(is_used), shape.topk)[: length - 1, is_used]
                if routing.min() < 0 or routing.max() >= shape.num_experts:
                    raise RoutingError(
                        f"--moe-routing-replay: {server} returns expert {routing.max()} of a layer with "
                        f"{shape.num_experts}: it has another model"
                    )
                last = np.full((1, *routing.shape[1:]), -1, dtype=np.int16)
                return replace(piece, routed_experts=np.concatenate([routing.astype(np.int16), last]))
    raise RoutingError(
        f"--moe-routing-replay: {server} returns {experts.size} experts for {length} tokens, {sum(shape.moe_layers)} "
        f"of {len(shape.moe_layers)} layers and {shape.topk} experts a token; it has another model, or returns those "
        "of a part of the tokens"
    )
