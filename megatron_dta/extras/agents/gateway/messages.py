"""Parses the model's answer to a message with content, reasoning and tool calls, and prepares messages for templates.

Tool calls (``--tool-call-parser``) are parsed in the forms of ``prompts.tool_calls``; with ``auto`` it is the one that
the chat template writes, and with ``none`` the answer is text.

Reasoning (``--reasoning-parser``): with ``think`` the text up to ``</think>`` is ``reasoning_content``, apart from the
content; with ``none`` it stays in the content. Forms with channels (harmony) say themselves what is reasoning.

A call that cannot be parsed stays text, so the client sees what the model wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.messages import normalized
from megatron_dta.sampling.prompts.tool_calls import FORMS, AnswerForm, ToolCall

_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Answer:
    """An answer as a client receives it; ``content`` is None if it has tool calls and no other text."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The message in the form that templates take."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or ""}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class AnswerParser:
    """Parses answers, as ``--tool-call-parser`` and ``--reasoning-parser`` say.

    Attributes:
        tool_calls: the form's name.
        form: None: no calls are looked for.
    """

    tool_calls: str
    reasoning: str
    form: AnswerForm | None

    @classmethod
    def of(cls, tool_calls: str, reasoning: str, template: ChatTemplate | None) -> AnswerParser:
        """The parser of these flags; the template decides what ``auto`` is."""
        if tool_calls == "auto":
            tool_calls = "none" if template is None else template.tool_call_form
        form = template.response_form if tool_calls == "response_template" else FORMS.get(tool_calls)
        if form is not None:
            _ = form.template  # refuses what cannot be used
        return cls(tool_calls, reasoning, form)

    def parse(self, text: str, call_id: str, tools: Sequence[Any] | None) -> Answer:
        """The message of an answer.

        Args:
            call_id: the call's id, from which those of the tool calls are made.
            tools: those that the request offered; without them no call is looked for.
        """
        reasoning, text = self._split(text)
        if self.form is None or not (tools or self.form.has_channels):
            return Answer(text, reasoning)
        parts = self.form.read(text, tools)
        are_calls = bool(tools and parts.calls) and parts.has_ended and None not in parts.calls
        if self.form.has_channels:
            reasoning, rest = parts.thought or reasoning, parts.content + ("" if are_calls else parts.call_text)
            text = rest if reasoning or rest or are_calls else text
        elif are_calls:
            text = parts.content
        if not are_calls:
            return Answer(text, reasoning)
        ids = (call.call_id or f"call_{call_id[-24:]}_{i}" for i, call in enumerate(parts.calls))
        calls = tuple(replace(call, call_id=name) for call, name in zip(parts.calls, ids, strict=True))
        return Answer(text.rstrip() or None, reasoning, calls)

    def begun(self, text: str, has_tools: bool) -> tuple[str, str]:
        """Reasoning and content with which the message of an unfinished answer is sure to begin."""
        if self.reasoning == "think" and _END_OF_THOUGHT not in text:
            return "", ""
        reasoning, text = self._split(text)
        if self.form is not None and (has_tools or self.form.has_channels):
            parts = self.form.read(text, None, is_whole=False)
            reasoning, text = reasoning or parts.thought, parts.first.rstrip()  # blanks before a call are no content
        return reasoning or "", text

    def _split(self, text: str) -> tuple[str | None, str]:
        """Reasoning, None if there is none, and what follows it."""
        if self.reasoning == "none" or _END_OF_THOUGHT not in text:
            return None, text
        before, _, text = text.partition(_END_OF_THOUGHT)
        return before.lstrip("\n").removeprefix("<think>").strip("\n"), text.lstrip("\n")


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


def template_messages(
    messages: Sequence[Mapping[str, Any]], session: Session, template: ChatTemplate
) -> list[dict[str, Any]]:
    """Messages of a request as templates take them.

    Besides the form of ``prompts.messages``, ``developer`` becomes ``system``. Clients do not send reasoning back; it
    is put back into the answers that they do send, and the template decides what it keeps.

    Raises:
        RequestError: a message is not as it must be.
    """
    try:
        # A tool may answer nothing.
        rendered = template.messages([{**message, "content": message.get("content") or ""} for message in messages])
    except InputError as error:
        raise refuse(f"messages: {error}") from error
    for message in rendered:
        message["role"] = "system" if message["role"] == "developer" else message["role"]
        if message["role"] == "assistant" and "reasoning_content" not in message:
            reasoning = session.reasoning.get(visible_digest(message))
            if reasoning is not None:
                message["reasoning_content"] = reasoning
    return rendered


def visible_digest(message: Mapping[str, Any]) -> bytes:
    """Identifies what a client sees of an answer besides its reasoning."""
    (message,) = normalized([message])  # arguments may be JSON text
    seen = [message["content"], [call.get("function") for call in message.get("tool_calls", ())]]
    return hashlib.blake2b(json.dumps(seen, sort_keys=True).encode(), digest_size=16).digest()
