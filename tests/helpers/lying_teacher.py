"""A served teacher of a small vocabulary that answers rightly, or with lies; and its client without a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import torch

from megatron_dta.common.http.session import Limits
from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.teachers.array_message import pack, unpack
from megatron_dta.extras.teachers.remote import RemoteTeacher
from megatron_dta.extras.teachers.samples import TeacherFacts, digest, digest_array, tensor_bytes
from raw_server import RawRequest, RawServer, reply

VOCABULARY, WIDTH = 7, 3
HEAD = torch.arange(VOCABULARY * WIDTH, dtype=torch.float32).reshape(VOCABULARY, WIDTH)
FACTS = TeacherFacts(VOCABULARY, WIDTH, "torch.float32", False, digest(tensor_bytes(HEAD)[0].reshape(-1).data))
SAMPLES = [
    TrainingSample(np.array([1, 2, 3, 4], np.int32), np.array([False, True, True, False])),
    TrainingSample(np.array([1, 2], np.int32), np.array([False, False])),
    TrainingSample(np.array([1, 2, 5], np.int32), np.array([False, False, True])),
]
LOGPROBS = np.array([-0.5, -1.0, -2.0], np.float32)
ROWS, STATES = np.array([0, 1, 2]), torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])


@dataclass
class LyingTeacher:
    """What the server says; change a field to let it lie.

    Attributes:
        facts: the object of /v1/teacher.
        arrays: of the reply to a path, without ``reply_to``.
        reply_to: changes ``reply_to``.
        replies: whole replies by path, as pieces; they come before all others.
    """

    facts: dict
    arrays: dict[str, dict[str, np.ndarray]]
    reply_to: Callable[[np.ndarray], np.ndarray]
    replies: dict[str, Iterable[bytes]]

    def answer(self, request: RawRequest) -> Iterable[bytes]:
        path = request.target.partition("?")[0]
        if path in self.replies:
            return self.replies[path]
        if path == "/v1/teacher":
            return [reply(json.dumps(self.facts).encode())]
        arrays = dict(self.arrays[path])
        if path != "/v1/head":
            assert unpack(request.body).keys() == {"token_ids", "lengths", "loss_mask"}
            arrays["reply_to"] = self.reply_to(digest_array(digest(FACTS.head_digest, request.target, request.body)))
        return [reply(pack(arrays))]


def honest() -> LyingTeacher:
    """One that does not lie."""
    states = tensor_bytes(STATES)[0]
    arrays = {
        "/v1/head": {"head": tensor_bytes(HEAD)[0]},
        "/v1/logprobs": {"logprobs": LOGPROBS},
        "/v1/rows": {"row": ROWS, "states": states},
    }
    return LyingTeacher(asdict(FACTS), arrays, lambda right: right, {})


def client(server: RawServer, timeout_s: float = 60.0, attempts: int = 1) -> RemoteTeacher:
    """The client of a run with one process."""
    part = SimpleNamespace(true_vocab_size=VOCABULARY, post_process=True, vocabulary_shard=None)
    part.output_weight = lambda: HEAD
    policy = SimpleNamespace(temperature=0.7, tree_models=[part], device=torch.device("cpu"))
    with alone():
        return RemoteTeacher(server.url, policy, True, Limits(timeout_s, 60.0, attempts, 0.01, 0.02))
