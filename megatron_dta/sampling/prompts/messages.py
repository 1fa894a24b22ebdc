"""Brings messages of files and clients into one form, for prompts, training text, environments and the gateway.

from, value        of ShareGPT's messages become ``role`` and ``content``
null fields        of messages, tool calls, functions and parts of a content are left out
content            is "" in a turn that only calls tools; lists of text parts are joined unless the template reads
                   parts, and text becomes a part where it reads nothing else
arguments          of tool calls that are JSON text become objects, and are empty objects where there are none; where
                   the template takes no objects (DeepSeek V3.1) they become JSON text
reasoning_content  is ``thinking``, too, which is its name in other templates (gpt-oss)
tool_calls         an empty list is left out
weight, loss, ...  say whether a turn is trained (``is_trained``); templates do not see them
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dta.core.common.errors import InputError

# Fields with which public formats mark turns of the assistant that are context only.
MARKS = ("weight", "trainable", "train", "loss", "loss_mask", "step_loss_mask")
# ShareGPT's names of roles.
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_TEXT_PARTS = ("text", "refusal", "input_text", "output_text")


@dataclass(frozen=True)
class ContentForm:
    """Which contents a chat template reads: text, lists of parts, or both; and arguments of calls as JSON text."""

    reads_text: bool = True
    reads_parts: bool = False
    json_arguments: bool = False

    def of(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The content as the template reads it."""
        if isinstance(content, str):
            return content if self.reads_text else [{"type": "text", "text": content}]
        return content if self.reads_parts else text_of(content)


def normalized(messages: Any, form: ContentForm = ContentForm()) -> list[dict[str, Any]]:
    """The messages of a list, or text as a message of the user; ``InputError`` names the message that is wrong.

    Normalized messages stay as they are.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"must be text or a list of messages, got {type(messages).__name__}")
    result = []
    for number, message in enumerate(messages, start=1):
        try:
            result.append(_normalized(message, form))
        except InputError as error:
            raise InputError(f"message {number}: {error}") from None
    return result


def with_role(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with ``role`` and ``content``, if it is one of ShareGPT (``from`` and ``value``); else as it is."""
    if not isinstance(message.get("from"), str) or message.get("role") is not None:
        return message
    others = {name: value for name, value in message.items() if name not in ("from", "value", "role")}
    role = _ROLES.get(message["from"], message["from"])
    if message["from"] == "function_call":
        return {**others, "role": role, "tool_calls": [{"type": "function", "function": _named_call(message)}]}
    return {**others, "role": role, "content": message.get("value")}


def _named_call(message: Mapping[str, Any]) -> dict[str, Any]:
    try:
        call = json.loads(message["value"])
    except (KeyError, TypeError, ValueError, RecursionError):
        call = None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise InputError(
            'a message from function_call must have the value {"name": ..., "arguments": ...} as JSON text'
        )
    return call


def _normalized(message: Any, form: ContentForm) -> dict[str, Any]:
    fields = _without_nulls(with_role(message)) if isinstance(message, Mapping) else {}
    calls = fields.pop("tool_calls", None)
    # A turn that only calls tools may have no content.
    if not isinstance(fields.get("role"), str) or not ("content" in fields or calls):
        raise InputError("must be an object with 'role' and 'content' (or 'from' and 'value')")
    fields["content"] = form.of(_content(fields.get("content", "")))
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise InputError("tool_calls: must be a list of objects")
        fields["tool_calls"] = [_call(_without_nulls(call), form.json_arguments) for call in calls]
    if "reasoning_content" in fields:
        fields.setdefault("thinking", fields["reasoning_content"])
    return {name: value for name, value in fields.items() if name not in MARKS}


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Text, or parts of text without null fields."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"content: must be text or a list of parts of text, got {type(content).__name__}")
    parts = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        part = _without_nulls(part) if isinstance(part, Mapping) else {}
        name = next((name for name in ("text", "refusal") if isinstance(part.get(name), str)), None)
        if part.get("type", "text") not in _TEXT_PARTS or name is None:
            raise InputError(f"a part of content of type {part.get('type')!r}; only text is taken")
        parts.append({"type": "text", "text": part[name]})
    return parts


def _call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(_without_nulls(call["function"]), as_text)}
    arguments = _arguments(call.get("arguments", ""))
    if as_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments}


def _arguments(arguments: Any) -> Any:
    """The object of a JSON text. Other text stays, since a model may have written it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The text of a normalized content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def words_to_continue(messages: list[dict[str, Any]]) -> bool:
    """Whether normalized messages end with words of the assistant, which a prompt continues."""
    last = messages[-1]
    return last["role"] == "assistant" and "tool_calls" not in last and bool(text_of(last["content"]).strip())


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message, as it stands in a file, is trained if it is the assistant's.

    Raises:
        InputError: a mark is neither 0 nor 1, or marks another role's message as trained.
    """
    marks = {name: message[name] for name in MARKS if message.get(name) is not None}
    for name, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise InputError(f"{name}: must be 0 or 1 (or false or true), got {value!r}")
        if value and message.get("role") != "assistant":
            raise InputError(f"{name}: only turns of the assistant are trained; leave the mark out")
    return all(marks.values())


def checked_tools(tools: Any) -> list[Any] | None:
    """Tools as templates take them, from a list or the JSON text of one; None if there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise InputError("tools: is text that is not JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise InputError(f"tools: must be a list, got {type(tools).__name__}")
    # Files store an empty list for rows without tools.
    return tools or None


def without_fillers(value: Any) -> Any:
    """Messages or tools of a Parquet row without null fields, at every level.

    Arrow gives every struct of a column the fields that any of them has, so nulls that are meant cannot be told apart;
    a file that has some stores arguments and tools as JSON text.
    """
    if isinstance(value, Mapping):
        return {name: without_fillers(part) for name, part in value.items() if part is not None}
    return [without_fillers(part) for part in value] if isinstance(value, list) else value


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
