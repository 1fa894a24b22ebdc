"""Writes answers in the form of OpenAI's interface, whole or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from megatron_dta.extras.agents.gateway.gateway import Choice
from megatron_dta.extras.agents.gateway.http.deltas import deltas
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt
from megatron_dta.sampling.prompts.tokenizer import Tokenizer

_FINISH = {"stop": "stop", "length": "length", "stop_sequence": "stop", "tool_calls": "tool_calls"}


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class OpenAIReplies:
    """Writes the replies of one call.

    Args:
        is_chat: of /v1/chat/completions; else of /v1/completions.
        wants_logprobs: whether the request asked for logprobs.
        has_tools: whether tools were offered.
    """

    def __init__(self, tokenizer: Tokenizer, model: str, is_chat: bool, wants_logprobs: bool, has_tools: bool) -> None:
        self._tokenizer, self._model, self._is_chat = tokenizer, model, is_chat
        self._wants_logprobs, self.has_tools = wants_logprobs, has_tools
        self._created = int(time.time())

    def whole(self, prompt: GatewayPrompt, choices: Sequence[Choice]) -> dict[str, Any]:
        rows = []
        for index, choice in enumerate(choices):
            row: dict[str, Any] = {"index": index, "finish_reason": _FINISH[choice.call.finish]}
            if self._is_chat:
                row["message"] = _message(choice.answer)
            else:
                row["text"] = choice.sampled.text
            row["logprobs"] = self._logprobs(choice)
            rows.append(row)
        return {**self._head(choices[0].call.call_id, ""), "choices": rows, "usage": usage(prompt, choices)}

    async def stream(
        self, prompt: GatewayPrompt, items: AsyncIterator[Any], parser: AnswerParser, call_id: str, with_usage: bool
    ) -> AsyncIterator[bytes]:
        """The events of one answer."""
        head = self._head(call_id, ".chunk")
        if self._is_chat:
            yield event({**head, "choices": [_delta({"role": "assistant", "content": ""})]})
        async for item in deltas(items, parser if self._is_chat else None, self.has_tools):
            if not isinstance(item, Choice):
                name, text = item
                delta = {"content" if name == "content" else "reasoning_content": text}
                row = _delta(delta) if self._is_chat else {"index": 0, "text": text, "finish_reason": None}
                yield event({**head, "choices": [row]})
                continue
            if item.answer.tool_calls:
                calls = [call | {"index": i} for i, call in enumerate(_tool_calls(item.answer))]
                yield event({**head, "choices": [_delta({"tool_calls": calls})]})
            last = _delta({}) if self._is_chat else {"index": 0, "text": ""}
            last |= {"finish_reason": _FINISH[item.call.finish], "logprobs": self._logprobs(item)}
            yield event({**head, "choices": [last]})
            if with_usage:
                yield event({**head, "choices": [], "usage": usage(prompt, [item])})
        yield b"data: [DONE]\n\n"

    def _head(self, call_id: str, suffix: str) -> dict[str, Any]:
        kind, prefix = ("chat.completion", "chatcmpl-") if self._is_chat else ("text_completion", "cmpl-")
        object_name = kind + (suffix if self._is_chat else "")
        return {"id": prefix + call_id, "object": object_name, "created": self._created, "model": self._model}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        ids, values = choice.call.output.tolist(), [float(value) for value in choice.call.logprobs]
        pieces = [self._tokenizer.token_bytes(token) for token in ids]
        texts = [piece.decode(errors="replace") for piece in pieces]
        if not self._is_chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(piece), "top_logprobs": []}
                for text, value, piece in zip(texts, values, pieces, strict=True)
            ],
            "refusal": None,
        }


def usage(prompt: GatewayPrompt, choices: Sequence[Choice]) -> dict[str, Any]:
    """Numbers of tokens; ``cached_tokens`` are those that the session knew."""
    read, written = len(prompt.token_ids), sum(len(choice.call.output) for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": prompt.known},
    }


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = _tool_calls(answer)
    return message


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in answer.tool_calls
    ]
