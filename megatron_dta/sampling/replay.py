"""Answers requests from stored rollouts (``--rollout-engine replay``), as if they were sampled now.

The candidates for a request are the recorded rollouts that begin with its context and continue with a sampled token
(one that ``loss_mask`` trains). The first request for a context gets the first candidate in the order of the files, the
next request the second one, and a request without candidates left is an error. Prompts, rewards, advantages and
training run as with a sampler. This serves to try a reward or a task, to compare settings on the same rollouts, or to
reproduce a run. The temperature, nucleus and weights of this run have no effect on the rollouts.

Every evaluation begins with the first recorded rollout of each prompt.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.interface import (
    ENGINE_COUNTS,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.sources.batch_source import RolloutError


class ReplayEngine(RolloutEngine):
    """Answers from ``rollouts``.

    Args:
        needs_logprobs: whether the logprobs are used; if not, they may be missing and are returned as 0.

    Raises:
        InputError: there are no rollouts, or one has no logprobs although they are needed.
    """

    def __init__(self, rollouts: Sequence[Rollout], needs_logprobs: bool = True) -> None:
        if not rollouts:
            raise InputError("--rollout-replay: no rollouts in these files")
        for index, rollout in enumerate(rollouts):
            if needs_logprobs and rollout.logprobs is None:
                raise InputError(
                    f"--rollout-replay: rollout {index} has no logprobs; record them, or add --old-logprobs recompute"
                )
        self._rollouts = list(rollouts)
        self._by_prompt: dict[bytes, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            prompt = rollout.token_ids[: int(np.argmax(rollout.loss_mask))]
            self._by_prompt.setdefault(prompt.tobytes(), []).append(index)
        self._used: dict[str, int] = {}
        self._used_in_evaluation: dict[str, int] = {}
        self._params: SamplingParams | None = None
        self._finished: list[GenerationResult] = []
        self._held: set[int] = set()
        self._hold: set[int] = set()
        self._policy_version = 0
        self._counts = dict.fromkeys(ENGINE_COUNTS, 0.0)

    def start(self, params: SamplingParams, iteration: int) -> None:
        self._refuse_running()
        self._params = params
        self._held.clear()
        self._used_in_evaluation.clear()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        in_use = {result.request_id for result in self._finished}
        for request in requests:
            check_request(request, self._held, in_use)
            in_use.add(request.request_id)
        begin = time.perf_counter()
        for request in requests:
            self._finished.append(self._answer(request))
            if request.hold:
                self._hold.add(request.request_id)
        self._counts["seconds"] += time.perf_counter() - begin

    def poll(self) -> list[GenerationResult]:
        results, self._finished = self._finished, []
        self._held |= {result.request_id for result in results} & self._hold
        self._hold.clear()
        self._counts["requests"] += len(results)
        self._counts["decoded_tokens"] += sum(len(result.token_ids) for result in results)
        return results

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id not in self._held:
                raise ValueError(f"request {request_id} is not held")
            self._held.discard(request_id)

    def statistics(self) -> dict[str, float]:
        return dict(self._counts)

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """Set the version of results whose rollouts have none."""
        self._refuse_running()
        self._policy_version = policy_version

    def close(self) -> None:
        self._finished.clear()
        self._held.clear()

    def state_dict(self) -> dict[str, Any]:
        """The number of used continuations of each context; a resumed run continues after them."""
        return {"used": sorted(self._used.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._used = {name: int(count) for name, count in state["used"]}

    def _answer(self, request: GenerationRequest) -> GenerationResult:
        context = np.asarray(request.token_ids, dtype=np.int32)
        name = hashlib.blake2b(context.tobytes(), digest_size=16).hexdigest()
        used = self._used_in_evaluation if self._params.domain is Domain.EVALUATION else self._used
        continuations = self._continuations(context)
        if not continuations:
            raise RolloutError(f"--rollout-replay: no recorded rollout continues the {_shown(context)}")
        if used.get(name, 0) >= len(continuations):
            raise RolloutError(
                f"--rollout-replay: all {len(continuations)} recorded continuations of the {_shown(context)} are used; "
                "lower --n-samples-per-prompt or --train-iters, or record more"
            )
        rollout = self._rollouts[continuations[used.get(name, 0)]]
        used[name] = used.get(name, 0) + 1
        begin, end = len(context), min(len(rollout), len(context) + request.max_tokens)
        untrained = np.flatnonzero(~rollout.loss_mask[begin:end])
        end = begin + int(untrained[0]) if untrained.size else end
        ends = np.flatnonzero(np.isin(rollout.token_ids[begin:end], list(self._params.eos_ids)))
        end = begin + int(ends[0]) + 1 if ends.size else end
        logprobs = np.zeros(len(rollout), np.float32) if rollout.logprobs is None else rollout.logprobs
        self._counts["prefilled_tokens"] += len(context)
        return GenerationResult(
            request.request_id,
            rollout.token_ids[begin:end].copy(),
            logprobs[begin:end].copy(),
            FinishReason.STOP if ends.size else FinishReason.LENGTH,
            self._policy_version if rollout.policy_version is None else rollout.policy_version,
        )

    def _continuations(self, context: np.ndarray) -> list[int]:
        """Indices of the rollouts that continue ``context`` with a sampled token, in the order of the files."""
        content = context.tobytes()
        candidates = [index for prompt, some in self._by_prompt.items() if content.startswith(prompt) for index in some]
        return sorted(index for index in candidates if _goes_on(self._rollouts[index], context))

    def _refuse_running(self) -> None:
        if self._finished:
            raise ValueError(f"{len(self._finished)} requests are running")


def _goes_on(rollout: Rollout, context: np.ndarray) -> bool:
    length = len(context)
    return (
        length < len(rollout)
        and bool(rollout.loss_mask[length])
        and np.array_equal(rollout.token_ids[:length], context)
    )


def _shown(context: np.ndarray) -> str:
    begin = " ".join(str(token) for token in context[:8])
    return f"{len(context)} tokens {begin}{' ...' if len(context) > 8 else ''}"
