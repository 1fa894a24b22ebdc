"""A teacher that ``megatron-dta teacher`` serves from processes of its own, with a mesh of its own.

The first rank of each replica asks for what its replica needs and hands it on to the other ranks. The output weight is
fetched once; each rank keeps its rows of it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import numpy as np
import torch

from megatron_dta.common.array_message import pack, unpack
from megatron_dta.common.errors import InputError, one_line
from megatron_dta.engine import TreeEngine
from megatron_dta.model import Head, current_mesh
from megatron_dta.planning.step.sample import TrainingSample
from megatron_dta.training.teacher_samples import pack_samples, tensor_of

KEY = "MEGATRON_DTA_TEACHER_KEY"
_ATTEMPTS = 4
_SECONDS = 1800.0


class RemoteTeacher:
    """A teacher behind ``url``.

    Args:
        policy: the engine whose logits are compared; its ranks ask together.
        with_head: fetch the output weight, for the divergence over the vocabulary.
    """

    def __init__(self, url: str, policy: TreeEngine, with_head: bool) -> None:
        self._url, self._temperature = url.rstrip("/"), policy.temperature
        self._mesh = current_mesh()
        about = self._shared(lambda: json.loads(self._request("/v1/teacher")))
        part = policy.tree_models[-1]
        if about.get("vocab_size") != part.true_vocab_size:
            raise InputError(
                f"--teacher-load-hf {url}: has a vocabulary of {about.get('vocab_size')} and the policy of "
                f"{part.true_vocab_size}; the divergence needs the same tokens"
            )
        self._dtype, self._width, self._head = str(about["dtype"]), int(about["hidden_size"]), None
        if with_head:
            whole = self._shared(lambda: unpack(self._request("/v1/head"))["head"])
            if part.post_process:
                shard = part.vocabulary_shard
                first = 0 if shard is None else shard.first_token
                own = tensor_of(whole, self._dtype)[first : first + len(part.output_weight())]
                self._head = Head(own.to(policy.device), bool(about["fp32_lm_head"]))

    @property
    def models(self) -> list[torch.nn.Module]:
        """Chunks of the model in this process: none."""
        return []

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Logprobs of each sample's trained tokens, [T] each, 0 elsewhere."""
        if not samples:
            return []
        values = self._score("logprobs", samples)["logprobs"]
        found, at = [], 0
        for sample in samples:
            own = np.zeros(len(sample.token_ids), values.dtype)
            count = sample.num_trained
            own[np.asarray(sample.loss_mask, bool)] = values[at : at + count]
            found.append(own)
            at += count
        return found

    def rows(self, samples: Sequence[TrainingSample]) -> tuple[np.ndarray, torch.Tensor | None]:
        """The row of each trained token, int64 [P], and the rows' hidden states; None before the last stage."""
        if not samples:
            empty = torch.zeros(0, self._width)
            return np.zeros(0, np.int64), empty if self._head is not None else None
        found = self._score("rows", samples)
        return found["row"], tensor_of(found["states"], self._dtype) if self._head is not None else None

    def head(self) -> Head | None:
        """This rank's rows of the output weight; None before the last stage."""
        return self._head

    def _score(self, kind: str, samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
        path = f"/v1/{kind}?temperature={self._temperature!r}"
        return self._shared(lambda: unpack(self._request(path, pack(pack_samples(samples)))))

    def _shared(self, ask: Callable[[], object]) -> object:
        """The result of ``ask`` on the first rank of the replica, on all of its ranks; an error is raised on all."""
        found = None
        if self._mesh.is_first_of_replica:
            try:
                found = ("result", ask())
            except (InputError, ValueError, KeyError) as error:
                found = ("refused", f"--teacher-load-hf {self._url}: {error}")
        kind, value = self._mesh.from_first_of_replica(found)
        if kind == "refused":
            raise InputError(value)
        return value

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        """The reply to a request, which is sent again if the server cannot be reached."""
        request = urllib.request.Request(self._url + path, body, {"authorization": f"Bearer {os.environ.get(KEY, '')}"})
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                raise InputError(
                    one_line(f"status {error.code}: {error.read(400).decode('utf-8', 'replace')}")
                ) from error
            except (urllib.error.URLError, OSError) as error:
                if attempt == _ATTEMPTS:
                    raise InputError(one_line(f"cannot be reached: {error}")) from error
                time.sleep(2.0**attempt / 2)
        raise AssertionError("unreachable")
