"""A teacher that ``megatron-dta teacher`` serves from processes of its own, with a mesh of its own.

The first rank of each replica asks for what its replica needs and hands it on to the other ranks. The output weight is
fetched once; each rank keeps its rows of it. Nothing is taken from the server unchecked (``samples``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_dta.common.http.replies import (
    MOST_REPLY_BYTES,
    RefusedError,
    TimedOutError,
    TransientFailureError,
    parse_json,
)
from megatron_dta.common.http.session import HttpSession, Limits
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.kernel_types import Head
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.teachers.array_message import pack, unpack
from megatron_dta.extras.teachers.samples import TeacherFacts, digest, digest_array, pack_samples, read_logprobs

KEY = "MEGATRON_DTA_TEACHER_KEY"
Answer = TypeVar("Answer")


class RemoteTeacher:
    """A teacher behind ``url``.

    Args:
        policy: the engine whose logits are compared; its ranks ask together.
        with_head: fetch the output weight, for the divergence over the vocabulary.

    Raises:
        InputError: the teacher cannot be reached, or does not suit the policy.
    """

    def __init__(self, url: str, policy: TreeEngine, with_head: bool, limits: Limits) -> None:
        self._url, self._temperature = url.rstrip("/"), policy.temperature
        self._mesh = current_mesh()
        self._http: HttpSession | None = None

        def connect() -> TeacherFacts:
            self._http = HttpSession("served teachers", limits, KEY)
            return self._ask("/v1/teacher", None, lambda reply: TeacherFacts.read(parse_json(reply)))

        part, self._facts = policy.tree_models[-1], self._shared(connect)
        if self._facts.vocab_size != part.true_vocab_size:
            raise InputError(
                f"--teacher-load-hf {url}: has a vocabulary of {self._facts.vocab_size} and the policy of "
                f"{part.true_vocab_size}; the divergence needs the same tokens"
            )
        self._head = None
        if with_head:
            most, read = self._facts.most_head_bytes, self._facts.read_head
            head = self._shared(lambda: self._ask("/v1/head", None, lambda reply: read(unpack(reply)), most))
            if part.post_process:
                shard = part.vocabulary_shard
                first = 0 if shard is None else shard.first_token
                rows = head[first : first + len(part.output_weight())]
                self._head = Head(rows.to(policy.device), self._facts.fp32_lm_head)

    @property
    def models(self) -> list[torch.nn.Module]:
        """Chunks of the model in this process: none."""
        return []

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Logprobs of each sample's trained tokens, [T] each, 0 elsewhere."""
        if not any(sample.num_trained for sample in samples):
            return [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
        return self._score("logprobs", samples, lambda arrays: read_logprobs(arrays, samples))

    def rows(self, samples: Sequence[TrainingSample]) -> tuple[np.ndarray, torch.Tensor | None]:
        """The row of each trained token, int64 [P], and the rows' hidden states; None before the last stage."""
        if not any(sample.num_trained for sample in samples):
            empty = torch.zeros(0, self._facts.hidden_size)
            return np.zeros(0, np.int64), empty if self._head is not None else None
        row, states = self._score("rows", samples, lambda arrays: self._facts.read_rows(arrays, samples))
        return row, states if self._head is not None else None

    def head(self) -> Head | None:
        """This rank's rows of the output weight; None before the last stage."""
        return self._head

    def _score(
        self, kind: str, samples: Sequence[TrainingSample], read: Callable[[dict[str, np.ndarray]], Answer]
    ) -> Answer:
        """What the teacher computes for ``samples``, checked by ``read``, on all ranks of the replica."""
        path = f"/v1/{kind}?temperature={self._temperature!r}"

        def checked(reply: bytes, body: bytes) -> Answer:
            arrays = unpack(reply)
            expected = digest_array(digest(self._facts.head_digest, path, body))
            if not np.array_equal(arrays.pop("reply_to", None), expected):
                raise ValueError("the reply is to another request, or of another teacher than when the run began")
            return read(arrays)

        def ask() -> Answer:
            # Samples without trained tokens have neither logprobs nor rows.
            body = pack(pack_samples([sample for sample in samples if sample.num_trained]))
            most = self._facts.most_reply_bytes(samples, kind)
            return self._ask(path, body, lambda reply: checked(reply, body), most)

        return self._shared(ask)

    def _shared(self, ask: Callable[[], Answer]) -> Answer:
        """The result of ``ask`` on the first rank of the replica, on all of its ranks; an error is raised on all."""
        outcome: tuple[str, Any] | None = None
        if self._mesh.is_first_of_replica:
            try:
                outcome = ("result", ask())
            except InputError as error:
                outcome = ("refused", f"--teacher-load-hf {self._url}: {error}")
        kind, value = self._mesh.from_first_of_replica(outcome)
        if kind == "refused":
            raise InputError(value)
        return value

    def _ask(
        self, path: str, body: bytes | None, read: Callable[[bytes], Answer], most_bytes: int = MOST_REPLY_BYTES
    ) -> Answer:
        """``read`` of the reply to a request; what it raises counts as a failed attempt."""
        http, method = self._http, "GET" if body is None else "POST"

        async def attempt(number: int) -> Answer:
            del number
            try:
                return read(await http.send(method, self._url, path, body, most_bytes))
            except TimedOutError as error:
                # Not sent again: it would wait as long.
                raise InputError(f"{error} (--rollout-timeout)") from error
            except ValueError as error:
                raise TransientFailureError(f"{method} {path}: {error}") from error

        try:
            return http.start(http.retried(attempt)).result()
        except RefusedError as error:
            raise InputError(str(error)) from error
        except TransientFailureError as error:
            raise InputError(f"failed {http.limits.attempts} times, the last time: {error}") from error
