"""What ``gateway_sessions.py`` puts into the gateway: a scripted engine, and notes of what is sampled and tokenized."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
from megatron_dta.extras.agents.gateway.prompts import PromptBuilder
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.sampling.interface import FinishReason, GenerationRequest, GenerationResult, RolloutEngine
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer

SECONDS_OF_A_PASS = 0.005


class ScriptedEngine(RolloutEngine):
    """Answers that follow from the request's key; all that are running get their next tokens in one pass."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer, self._running = tokenizer, []
        self._answer = lru_cache(512)(self.answer)

    def answer(self, key: int) -> list[int]:
        random = np.random.default_rng(key)
        words = " ".join(f"w{value}" for value in random.integers(50, size=int(random.integers(10, 60))))
        thought = f"<think>\n{words[:40]}\n</think>\n\n" if random.random() < 0.3 else ""
        call = f'<tool_call>\n{{"name":"look_up", "arguments": {{"what": "{key % 97}"}}}}\n</tool_call>'
        ids = self._tokenizer.encode(thought + words + ("\n" + call if random.random() < 0.7 else "")).tolist()
        return [*ids, self._tokenizer.eos_id]

    def start(self, params: SamplingParams, iteration: int) -> None:
        pass

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._running += requests

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        if self._running:
            time.sleep(SECONDS_OF_A_PASS)
        results, self._running = [self._result(request) for request in self._running], []
        return results

    def _result(self, request: GenerationRequest) -> GenerationResult:
        answer = self._answer(request.key)
        ids = np.array(answer[request.sampled_before :][: request.max_tokens], np.int32)
        ends = request.sampled_before + len(ids) == len(answer)
        reason = FinishReason.STOP if ends else FinishReason.LENGTH
        return GenerationResult(request.request_id, ids, -(1 + ids % 7).astype(np.float32) / 8, reason, 0)

    def release(self, request_ids: Sequence[int]) -> None:
        pass

    def statistics(self) -> dict[str, float]:
        return {}

    def update_weights(self, policy_version: int, checkpoint: object = None) -> None:
        pass

    def close(self) -> None:
        pass


class RecordingLoop(EngineLoop):
    """Notes what was asked of the engine and what it gave, and the seconds from one to the other.

    Attributes:
        answers: (prompt, tokens, logprobs) of every answer that was begun, by its key and prompt.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.answers: dict[tuple[int, bytes], tuple[bytes, list[int], list[float]]] = {}
        self.seconds = 0.0

    def sample(self, request: GenerationRequest) -> Any:
        began, future = time.perf_counter(), super().sample(request)
        prompt = request.token_ids[: request.prompt_length].tobytes()
        entry = self.answers.setdefault((request.key, digest(prompt)), (digest(prompt), [], []))

        def done(future: Any) -> None:
            self.seconds += time.perf_counter() - began
            if not future.cancelled() and future.exception() is None:
                assert len(entry[1]) == request.sampled_before
                entry[1].extend(future.result().token_ids.tolist())
                entry[2].extend(future.result().logprobs.tolist())

        future.add_done_callback(done)
        return future

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or is held."""
        return not self._futures and not self._held and self._queue.empty()


class CountingPrompts(PromptBuilder):
    """Counts texts that are tokenized twice behind the same tokens of a session."""

    texts: Counter[bytes]
    session = ""

    def _of_text(self, session: Session, *arguments: Any) -> Any:
        self.session = session.session_id
        return super()._of_text(session, *arguments)

    def _encode(self, known: np.ndarray, text: str) -> Any:
        if text:
            self.texts[digest(self.session.encode(), known.tobytes(), text.encode())] += 1
        return super()._encode(known, text)


def digest(*pieces: bytes) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=16).digest()
