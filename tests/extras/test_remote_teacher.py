"""The client of served teachers believes nothing: every lie ends in one line with the address and the reason."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("aiohttp")

from megatron_dta.common.http.session import Limits
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import alone
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.teachers.array_message import pack, unpack
from megatron_dta.extras.teachers.remote import KEY, RemoteTeacher
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


def use(teacher: RemoteTeacher) -> None:
    teacher.logprobs(SAMPLES)
    teacher.rows(SAMPLES)


def test_an_honest_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a key of enough characters")
    with RawServer(honest().answer) as server:
        teacher = client(server)
        logprobs = teacher.logprobs(SAMPLES)
        assert [values.tolist() for values in logprobs] == [[0, -0.5, -1, 0], [0, 0], [0, 0, -2]]
        row, states = teacher.rows(SAMPLES)
        assert row.tolist() == ROWS.tolist()
        assert torch.equal(states, STATES)
        assert torch.equal(teacher.head().weight, HEAD)
        assert [len(values) for values in teacher.logprobs(SAMPLES[1:2])] == [2]
        assert len(server.requests) == 4
        assert {request.headers["authorization"] for request in server.requests} == {
            "Bearer a key of enough characters"
        }
        assert unpack(server.requests[2].body)["lengths"].tolist() == [4, 3]


def fact(name: str, value: object) -> Callable[[LyingTeacher], None]:
    return lambda teacher: teacher.facts.update({name: value})


def array(path: str, name: str, values: object) -> Callable[[LyingTeacher], None]:
    return lambda teacher: teacher.arrays[path].update({name: np.asarray(values)})


def whole(path: str, *pieces: bytes) -> Callable[[LyingTeacher], None]:
    return lambda teacher: teacher.replies.update({path: pieces})


def logprob(index: int, value: float) -> Callable[[LyingTeacher], None]:
    changed = LOGPROBS.copy()
    changed[index] = value
    return array("/v1/logprobs", "logprobs", changed)


def swapped_reply_to(teacher: LyingTeacher) -> None:
    teacher.reply_to = lambda right: right[::-1].copy()


def nan_states() -> np.ndarray:
    states = STATES.clone()
    states[1, 1] = torch.nan
    return tensor_bytes(states)[0]


def header(text: str) -> bytes:
    return reply(text.encode() + b"\n")


SCORES, ROW = "/v1/logprobs", "/v1/rows"
LIES = {
    "other vocabulary": (fact("vocab_size", 8), "has a vocabulary of 8 and the policy of 7"),
    "unknown dtype": (fact("dtype", "torch.complex64"), "describes no teacher"),
    "head of other rows": (array("/v1/head", "head", tensor_bytes(HEAD[:6])[0]), "head: has the shape (6, 12)"),
    "head without end": (whole("/v1/head", *[b"HTTP/1.1 200 OK\r\n\r\n"], *[b"x" * 70_000] * 3), "is longer than"),
    "whole numbers": (array(SCORES, "logprobs", np.zeros(3, np.int64)), "logprobs: must be an array [..] of float32"),
    "NaN": (logprob(1, np.nan), "logprobs: nan is not a logprob"),
    "another array": (array(SCORES, "more", LOGPROBS), "must have the arrays logprobs, got"),
    "to another request": (swapped_reply_to, "the reply is to another request"),
    "rows outside": (array(ROW, "row", np.array([0, 1, 3])), "row: must be in [0, 3), got 0 to 3"),
    "states that are no numbers": (array(ROW, "states", nan_states()), "states: must be finite"),
    "claims gigabytes": (whole(SCORES, header('{"arrays":[["logprobs","float32",[1000000000000]]]}')), "ends before"),
    "objects": (whole(SCORES, header('{"arrays":[["a","object",[1]]]}')), "have a dtype of"),
    "longer than asked for": (whole(SCORES, reply(b"x" * 100_000)), "the reply is longer than 65560 bytes"),
    "compressed": (whole(SCORES, reply(b"x", "200 OK", "Content-Encoding: gzip")), "is compressed"),
    "an error of many lines": (whole(SCORES, reply(b"a\r\n\x1b[2J\nb", "400 Bad")), "is refused with 400: a"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lies_end_in_a_line(lie: str) -> None:
    change, told = LIES[lie]
    teacher = honest()
    change(teacher)
    with RawServer(teacher.answer) as server:
        with pytest.raises(InputError) as caught:
            use(client(server))
        message = str(caught.value)
        assert told in message
        assert message.startswith(f"--teacher-load-hf {server.url}: ")
        assert message.isprintable()
        assert len(message) < 700


def test_the_key_goes_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to the target of a redirect, to another host or this one, nor to a proxy."""
    monkeypatch.setenv(KEY, "a key of enough characters")
    teacher = honest()
    with RawServer(honest().answer) as other, RawServer(teacher.answer) as server:
        monkeypatch.setenv("HTTP_PROXY", other.url)
        for status in ("301 Moved", "302 Found", "303 Other", "307 Temporary", "308 Permanent"):
            for target in (other.url, server.url.replace("127.0.0.1", "localhost")):
                teacher.replies = {"/v1/teacher": [reply(b"", status, f"Location: {target}/v1/teacher")]}
                with pytest.raises(InputError, match=f"is refused with {status[:3]}: redirects are not followed"):
                    client(server)
        assert not other.requests
        assert {request.target for request in server.requests} == {"/v1/teacher"}
    for key in ("line\nbreak", "ümlaut"):
        monkeypatch.setenv(KEY, key)
        with pytest.raises(InputError, match=f"{KEY}: the key must be printable ASCII"):
            client(server)


def test_waits_are_bounded() -> None:
    """Replies that come a byte at a time, in head or body, or not at all; a server that is not there."""

    def slowly(first: bytes, piece: bytes) -> Iterator[bytes]:
        yield first
        for _ in range(60):
            time.sleep(0.05)
            yield piece

    heads = {"body": (b"HTTP/1.1 200 OK\r\n\r\n", b" "), "head": (b"HTTP/1.1 200 OK\r\n", b"X"), "none": (b"", b"")}
    heads["interim"] = (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    for first, piece in heads.values():
        began = time.monotonic()
        with RawServer(lambda request, answer=(first, piece): slowly(*answer)) as server:
            with pytest.raises(InputError, match=r"no reply within 0.2 s \(--rollout-timeout\)"):
                client(server, timeout_s=0.2, attempts=3)
            # On a busy machine none is read in time.
            assert len(server.requests) <= 1
        assert time.monotonic() - began < 60
    with pytest.raises(InputError, match="failed 2 times"):
        client(server, attempts=2)


def test_trouble_that_passes_is_tried_again() -> None:
    teacher, left = honest(), [reply(b"", "503 Busy"), b"", reply(b"{}"), reply(json.dumps({}).encode())]

    def answer(request: RawRequest) -> list[bytes]:
        return [left.pop()] if left else list(teacher.answer(request))

    with RawServer(answer) as server:
        use(client(server, attempts=5))
        assert len(server.requests) == 4 + 4
