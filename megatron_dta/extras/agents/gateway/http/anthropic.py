"""Translates Anthropic's interface: requests into messages for templates, answers into blocks and events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.gateway import Choice
from megatron_dta.extras.agents.gateway.http.schemas import AnthropicRequest, Block
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt

_FINISH = {"stop": "end_turn", "length": "max_tokens", "stop_sequence": "stop_sequence", "tool_calls": "tool_use"}


def messages_of(request: AnthropicRequest) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form; ``RequestError`` for content that is not text."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for number, message in enumerate(request.messages, start=1):
        where = f"messages.{number}"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _user(message.content, where)
    return messages


def tools_of(request: AnthropicRequest) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form."""
    choice = (request.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise refuse("tool_choice: the model decides; give auto or none")
    if not request.tools or choice == "none":
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in request.tools
    ]


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise refuse(f"{where}: a block of type {block.type!r}; the gateway takes text only")
    return "".join(block.text or "" for block in content)


def _assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    text, calls, thoughts = "", [], []
    for block in blocks:
        if block.type == "tool_use":
            if block.name is None:
                raise refuse(f"{where}: a block of type 'tool_use' without a name")
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        else:
            text += _text([block], where)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _user(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    """Tool results become messages of their own, in order with the texts between them."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block.type == "tool_result":
            content = _text(block.content or "", where)
            messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
            continue
        text = _text([block], where)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages


def whole(model: str, prompt: GatewayPrompt, choice: Choice) -> dict[str, Any]:
    return {
        "id": f"msg_{choice.call.call_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(choice.answer),
        "stop_reason": _FINISH[choice.call.finish],
        "stop_sequence": choice.sampled.stop,
        "usage": {"input_tokens": len(prompt.token_ids), "output_tokens": len(choice.call.output)},
    }


async def stream(
    model: str, prompt: GatewayPrompt, items: AsyncIterator[Any], parser: AnswerParser, has_tools: bool
) -> AsyncIterator[bytes]:
    """The events of an answer: text as it comes, blocks of other kinds at the end."""
    usage = {"input_tokens": len(prompt.token_ids), "output_tokens": 0}
    start = {"id": "msg_pending", "type": "message", "role": "assistant", "model": model, "content": []}
    yield _event("message_start", {"message": start | {"stop_reason": None, "stop_sequence": None, "usage": usage}})
    sent = 0
    async for item in items:
        if isinstance(item, Choice):
            for value in _rest(item, sent):
                yield value
            break
        safe = min(item.safe, parser.starts_hidden(item.text, has_tools))
        if safe > sent:
            if not sent:
                yield _event("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
            delta = {"type": "text_delta", "text": item.text[sent:safe]}
            yield _event("content_block_delta", {"index": 0, "delta": delta})
            sent = safe
    yield _event("message_stop", {})


def _rest(choice: Choice, sent: int) -> list[bytes]:
    """The events after the first ``sent`` characters of an answer's text."""
    events, index = [], 0
    content = choice.answer.content or ""
    if sent:
        rest = content[sent:] if choice.sampled.text.startswith(content) else ""
        if rest:
            events.append(_event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": rest}}))
        events.append(_event("content_block_stop", {"index": 0}))
        index = 1
    for block in _blocks(choice.answer):
        if block["type"] == "text" and sent:
            continue
        events += _block_events(index, block)
        index += 1
    reason = {"stop_reason": _FINISH[choice.call.finish], "stop_sequence": choice.sampled.stop}
    used = {"output_tokens": len(choice.call.output)}
    return [*events, _event("message_delta", {"delta": reason, "usage": used})]


def _block_events(index: int, block: dict[str, Any]) -> list[bytes]:
    kind = block["type"]
    if kind == "tool_use":
        empty: dict[str, Any] = block | {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    elif kind == "thinking":
        empty, delta = block | {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    else:
        empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    return [
        _event("content_block_start", {"index": index, "content_block": empty}),
        _event("content_block_delta", {"index": index, "delta": delta}),
        _event("content_block_stop", {"index": index}),
    ]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content or ""})
    blocks += [{"type": "tool_use", "id": c.call_id, "name": c.name, "input": c.arguments} for c in answer.tool_calls]
    return blocks


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps({"type": kind, **value}).encode())
