"""Parses the model's answer to a message with content, reasoning and tool calls, and prepares messages for templates.

Tool calls (``--tool-call-parser``), as the model's template writes them:

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them (Qwen, Hermes)
    llama3_json  {"name": "add", "parameters": {"a": 1}} as the whole answer (Llama 3)
    none         the answer is text

Reasoning (``--reasoning-parser``): with ``think`` the text up to ``</think>`` is ``reasoning_content``, apart from the
content; with ``none`` it stays in the content.

A call that cannot be parsed stays text, so the client sees what the model wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dta.sampling.gateway.errors import refuse
from megatron_dta.sampling.gateway.session import Session

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its id, its name and its arguments."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """An answer as a client receives it; ``content`` is None if it has tool calls and no other text."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The message in the form that templates take."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return found


@dataclass(frozen=True)
class AnswerParser:
    """Parses answers, as ``--tool-call-parser`` and ``--reasoning-parser`` say."""

    tool_calls: str = "hermes"
    reasoning: str = "none"

    def parse(self, text: str, call_id: str, has_tools: bool) -> Answer:
        """The message of an answer.

        Args:
            call_id: the call's id, from which those of the tool calls are made.
            has_tools: whether the request offered tools; without them no call is looked for.
        """
        reasoning = None
        if self.reasoning == "think" and _END_OF_THOUGHT in text:
            before, _, text = text.partition(_END_OF_THOUGHT)
            reasoning = before.removeprefix("<think>").strip("\n")
            text = text.lstrip("\n")
        if not has_tools or self.tool_calls == "none":
            return Answer(text, reasoning)
        if self.tool_calls == "hermes":
            pieces, rest = _HERMES.findall(text), _HERMES.sub("", text)
        else:
            pieces, rest = ([text], "") if text.lstrip().startswith("{") else ([], text)
        found = [_tool_call(piece) for piece in pieces]
        if not found or None in found:
            return Answer(text, reasoning)
        calls = tuple(ToolCall(f"call_{call_id[-24:]}_{i}", *call) for i, call in enumerate(found))
        return Answer(rest.strip() or None, reasoning, calls)

    def starts_hidden(self, text: str, has_tools: bool) -> int:
        """Number of characters at the start of an unfinished answer that are surely content."""
        if self.reasoning == "think" and _END_OF_THOUGHT not in text:
            return 0
        if not has_tools or self.tool_calls == "none":
            return len(text)
        if self.tool_calls == "llama3_json":
            return 0 if not text.strip() or text.lstrip().startswith("{") else len(text)
        return _safe_length(text, ("<tool_call>",))


def _safe_length(text: str, marks: Sequence[str]) -> int:
    """Number of characters before the first of ``marks``, or before an end of the text that may begin one."""
    length = min((text.find(mark) for mark in marks if mark in text), default=len(text))
    for mark in marks:
        for size in range(1, min(len(mark), len(text)) + 1):
            if text.endswith(mark[:size]):
                length = min(length, len(text) - size)
    return length


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Number of characters of an unfinished text that no stop string can cut off any more."""
    unfinished = len(text) - len(text.rstrip("\ufffd"))
    return min(len(text) - unfinished, _safe_length(text, stops))


def _tool_call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return (found["name"], arguments) if isinstance(arguments, dict) else None


def template_messages(messages: Sequence[Mapping[str, Any]], session: Session) -> list[dict[str, Any]]:
    """Messages of a request as templates take them.

    Parts of text are joined, arguments of tool calls become objects, ``developer`` becomes ``system``. Clients do not
    send reasoning back; it is put back into the answers that they do send, and the template decides what it keeps.

    Raises:
        RequestError: a part is not text.
    """
    return [_template_message(message, number, session) for number, message in enumerate(messages, start=1)]


def _template_message(message: Mapping[str, Any], number: int, session: Session) -> dict[str, Any]:
    role = message["role"]
    found: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text_of(message.get("content"), number),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            found[name] = message[name]
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _arguments(call["function"]["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or session.reasoning.get(visible_digest(found))
        if reasoning is not None:
            found["reasoning_content"] = reasoning
    return found


def _text_of(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") not in ("text", "refusal", "input_text", "output_text"):
            raise refuse(f"message {number}: content of type {part.get('type')!r}; the gateway takes text only")
        texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(texts)


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def visible_digest(message: Mapping[str, Any]) -> bytes:
    """Identifies what a client sees of an answer besides its reasoning."""
    seen = [message.get("content") or "", message.get("tool_calls") or []]
    return hashlib.blake2b(json.dumps(seen, sort_keys=True).encode(), digest_size=16).digest()
