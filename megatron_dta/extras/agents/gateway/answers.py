"""Samples one answer in pieces: for streams, for stop strings, and so that other requests need not wait for it.

The random number of a token is keyed by its position (``sampling.interface``), so the pieces are the same tokens as one
long request would give. An answer ends with an end of sequence, at the first stop string, or at its length cap. At a
stop string it ends with the token that completes it: what is sampled is a stopped sequence, and its logprobs are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from megatron_dta.extras.agents.gateway.engine_loop import EngineLoop
from megatron_dta.extras.agents.gateway.messages import safe_length
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult

Decode = Callable[[np.ndarray], str]


@dataclass
class Sampled:
    """An answer, or what there is of it.

    Attributes:
        text: without special tokens but those of the form of calls; up to the stop string, if one has ended it.
        safe: number of characters of the text that will not change any more.
        finish: stop, length or stop_sequence; empty while it is being sampled.
        request_id: the engine's request whose K/V is that of prompt and answer.
    """

    output: np.ndarray
    logprobs: np.ndarray
    text: str
    safe: int
    policy_version: int
    finish: str = ""
    stop: str | None = None
    request_id: int | None = None


async def sample_answer(
    loop: EngineLoop, decode: Decode, request: GenerationRequest, stops: Sequence[str], piece_tokens: int
) -> AsyncIterator[Sampled]:
    """Yield the answer after each piece; the last one has ``finish``. The caller releases its ``request_id``.

    Args:
        request: the whole answer; the loop chooses the ids of its pieces.

    Raises:
        RequestError: the engine refuses the prompt or is closing.
    """
    output, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    prompt, parent, held = request.token_ids, request.parent, None
    try:
        while True:
            piece = replace(
                request,
                token_ids=np.concatenate([prompt, output]),
                max_tokens=min(request.max_tokens - len(output), piece_tokens),
                parent=parent,
                prompt_length=len(prompt),
                sampled_before=len(output),
            )
            result = await _result(loop, piece)
            if held is not None:
                loop.release(held)
            held = parent = result.request_id
            begin = len(output)
            output = np.concatenate([output, result.token_ids])
            logprobs = np.concatenate([logprobs.astype(result.logprobs.dtype), result.logprobs])
            match = _stopped(decode, output, begin, stops)
            if match is not None:
                count, text, stop = match
                yield Sampled(
                    output[:count],
                    logprobs[:count],
                    text,
                    len(text),
                    result.policy_version,
                    "stop_sequence",
                    stop,
                    held,
                )
                held = None
                return
            text = decode(output)
            finish = "stop" if result.ended else "length" if len(output) >= request.max_tokens else ""
            safe = len(text) if finish else safe_length(text, stops)
            answer = Sampled(output, logprobs, text, safe, result.policy_version, finish, None, held)
            held = None if finish else held
            yield answer
            if finish:
                return
    finally:
        if held is not None:
            loop.release(held)


async def _result(loop: EngineLoop, piece: GenerationRequest) -> GenerationResult:
    """The result of a piece. If the caller is cancelled just when it comes, its K/V is released here."""

    def release(done: Future[GenerationResult]) -> None:
        if not done.cancelled() and done.exception() is None:
            loop.release(done.result().request_id)

    future = loop.sample(piece)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(release)
        raise


def _stopped(decode: Decode, output: np.ndarray, begin: int, stops: Sequence[str]) -> tuple[int, str, str] | None:
    """(tokens, text, stop string) where one of ``stops`` has come with a token after ``begin``; else None."""
    if not stops:
        return None
    decoded = decode(output)
    if not any(stop in decoded for stop in stops):
        return None
    for count in range(begin + 1, len(output) + 1):
        text = decode(output[:count])
        matches = [(text.find(stop), stop) for stop in stops if stop in text]
        if matches:
            at, stop = min(matches)
            return count, text[:at], stop
    return None
