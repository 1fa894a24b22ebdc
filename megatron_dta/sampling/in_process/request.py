"""The state of a generation request while the engine runs it: its tokens, pages and digests of prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.degenerate import DegenerateDetector
from megatron_dta.sampling.in_process.pages import extend_digest
from megatron_dta.sampling.interface import GenerationRequest


class Request:
    """The state of one generation request.

    Args:
        twin: a request with the same context: its digests are hashed once.

    Attributes:
        generation: the request as it was submitted.
        tokens: int32 [context + max_tokens]; the first ``num_tokens`` are valid.
        num_known_tokens: those that it had when it began to run; 0 if its parent has computed all but the last one.
        num_computed_tokens: positions whose K and V are stored in the first pages of ``table``.
        table: int64 page numbers; the first ``num_pages`` are held.
        logprobs: float64 [max_tokens], logprobs of the sampled tokens.
        expected: digests of what is not computed and not its parent's, while it waits.
        common_with_parent: length of the prefix that the context shares with the parent's tokens.
        waiting_children: requests not yet admitted that have this one as their parent.
        detector: if degenerate requests are stopped, while this one runs.
        state_source, has_lost_state: request whose state this one copies first; its own is gone (``row_states``).
    """

    def __init__(
        self,
        generation: GenerationRequest,
        arrival: int,
        page_size: int,
        parent: Request | None,
        twin: Request | None = None,
    ) -> None:
        context = np.asarray(generation.token_ids, dtype=np.int32)
        self._twin = twin
        self.generation, self.arrival, self.page_size, self.parent = generation, arrival, page_size, parent
        self.tokens = np.concatenate([context, np.zeros(generation.max_tokens, dtype=np.int32)])
        self.logprobs = np.zeros(generation.max_tokens)
        self.context_length = self.num_tokens = len(context)
        self.num_known_tokens = self.num_computed_tokens = self.num_pages = self.waiting_children = 0
        self.state_source: Request | None = None
        self.detector: DegenerateDetector | None = None
        self.expected: list[bytes] = []
        self.table = np.zeros(-(-len(self.tokens) // page_size), dtype=np.int64)
        self.common_with_parent = 0 if parent is None else common_prefix(parent.tokens[: parent.num_tokens], context)
        # A long context is mostly its parent's, so only the new part is hashed.
        self._digests = [] if parent is None else parent._digests[: self.common_with_parent // page_size]
        self.is_running = self.was_admitted = self.released = self.has_lost_state = False

    @cached_property
    def context_digest(self) -> bytes:
        """Digest of the context."""
        if self._twin is not None:
            return self._twin.context_digest
        full = self.digests()[: self.context_length // self.page_size]
        rest = self.tokens[len(full) * self.page_size : self.context_length].tobytes()
        return extend_digest((full[-1] if full else b"") + b"context", rest)

    def missing(self, known: int) -> list[bytes]:
        """Digests of the prefixes of more than ``known`` tokens that are not computed yet: those of full pages, and
        that of the context."""
        missing = self.digests()[known // self.page_size :]
        if self.num_computed_tokens < self.context_length:
            missing.append(self.context_digest)
        return missing

    @property
    def response(self) -> np.ndarray:
        """Tokens sampled so far."""
        return self.tokens[self.context_length : self.num_tokens]

    def digests(self) -> list[bytes]:
        """Digests of the prefixes that end with each full page."""
        of_context = self.context_length // self.page_size
        if self._twin is not None and len(self._digests) < of_context:
            self._digests = self._twin.digests()[:of_context]
        digests, missing = self._digests, self.num_tokens // self.page_size - len(self._digests)
        if missing > 0:
            first, size = len(digests) * self.page_size, self.page_size * self.tokens.itemsize
            tokens = self.tokens[first : first + missing * self.page_size].tobytes()
            for begin in range(0, len(tokens), size):
                digests.append(extend_digest(digests[-1] if digests else b"", tokens[begin : begin + size]))
        return digests

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append sampled tokens."""
        done, end = self.num_tokens - self.context_length, self.num_tokens + len(tokens)
        self.logprobs[done : done + len(tokens)] = logprobs
        self.tokens[self.num_tokens : end] = tokens
        self.num_tokens = end

    def add_pages(self, pages: Sequence[int] | np.ndarray) -> None:
        """Append pages to the table."""
        self.table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)


@dataclass
class Prefix:
    """The cached prefix of a request: its pages (the last one may be partly filled) and its length in tokens."""

    pages: np.ndarray
    length: int
    is_pending: bool  # a running request is computing a longer prefix, which is waited for


def check_length(request: GenerationRequest, most: int, page_size: int, max_pages: int | None) -> None:
    """Refuse a request that does not fit into ``most`` positions or into all pages."""
    length = len(request.token_ids) + request.max_tokens
    if length > most:
        raise ValueError(
            f"request {request.request_id}: {len(request.token_ids)} tokens and a response of up to "
            f"{request.max_tokens} do not fit into --max-position-embeddings {most}; raise it or lower "
            "--rollout-max-response-len"
        )
    if max_pages is not None and -(-length // page_size) > max_pages:
        raise InputError(
            f"the K/V cache of {max_pages} pages of {page_size} positions cannot hold one sequence of {length} tokens; "
            "raise it"
        )


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest common prefix of two arrays of int32."""
    length = min(len(first), len(second))
    is_common = first[:length].tobytes() == second[:length].tobytes()
    return length if is_common else int((first[:length] != second[:length]).argmax())
