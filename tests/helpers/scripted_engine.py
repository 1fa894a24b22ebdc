"""A rollout engine whose answers are scripted: a function of the context gives the tokens of a whole answer."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from megatron_dta.sampling.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams


class ScriptedEngine(RolloutEngine):
    """Answers with ``script(prompt ids, key)``, piece by piece, and checks how it is called.

    Args:
        script: returns token ids; an answer ends with the end of sequence if they do.
        seconds: time of a ``poll`` with requests.

    Attributes:
        prompts: (prompt ids, key) of every answer begun.
    """

    def __init__(
        self, script: Callable[[list[int], int], list[int]], vocab_size: int, seconds: float = 0.0, version: int = 0
    ) -> None:
        self._script, self._vocab_size, self._seconds, self.version = script, vocab_size, seconds, version
        self._running: list[GenerationRequest] = []
        self.held: dict[int, np.ndarray] = {}
        self.prompts: list[tuple[list[int], int]] = []
        self.submitted = 0

    def start(self, params: SamplingParams, iteration: int) -> None:
        assert not self._running
        self.held.clear()
        self._ends = params.eos_ids

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            check_request(request, self.held, [r.request_id for r in self._running], vocab_size=self._vocab_size)
            if request.parent is not None:
                parent = self.held[request.parent]
                shared = min(len(parent), len(request.token_ids))
                assert shared
                assert parent[0] == request.token_ids[0]
            if not request.sampled_before:
                self.prompts.append((request.token_ids.tolist(), request.key))
            self.submitted += 1
            self._running.append(request)

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        if not self._running:
            return []
        time.sleep(self._seconds)
        request = self._running.pop(0)
        prompt = request.token_ids[: request.prompt_length].tolist()
        answer = self._script(prompt, request.key)
        token_ids = np.array(answer[request.sampled_before :][: request.max_tokens], np.int32)
        assert len(token_ids), "the script has ended without an end of sequence"
        logprobs = -(1.0 + (token_ids + request.sampled_before + np.arange(len(token_ids))) % 7).astype(np.float32) / 8
        self.held[request.request_id] = np.concatenate([request.token_ids, token_ids])
        finish = FinishReason.STOP if int(token_ids[-1]) in self._ends else FinishReason.LENGTH
        return [GenerationResult(request.request_id, token_ids, logprobs, finish, self.version)]

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            del self.held[request_id]

    def statistics(self) -> dict[str, float]:
        return {}

    def update_weights(self, policy_version: int, checkpoint: object = None) -> None:
        self.version = policy_version

    def close(self) -> None:
        self._running.clear()
        self.held.clear()
