"""Translates Anthropic's interface: requests into messages for templates, answers into blocks and events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.gateway import Choice
from megatron_dta.extras.agents.gateway.http.deltas import deltas, typed_event
from megatron_dta.extras.agents.gateway.http.schemas import Block, CountRequest
from megatron_dta.extras.agents.gateway.messages import AnswerParser
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt

_FINISH = {"stop": "end_turn", "length": "max_tokens", "stop_sequence": "stop_sequence", "tool_calls": "tool_use"}


def messages_of(request: CountRequest) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form; ``RequestError`` for content that is not text."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _system(request.system)})
    for number, message in enumerate(request.messages, start=1):
        where = f"messages.{number}"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        elif message.role == "system":
            messages.append({"role": "system", "content": _text(message.content, where)})
        else:
            messages += _user(message.content, where)
    return messages


def tools_of(request: CountRequest) -> list[dict[str, Any]] | None:
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


def _system(system: str | list[Block]) -> str:
    """The system prompt without the block that Claude Code puts in front for Anthropic's servers, which changes."""
    if isinstance(system, list) and (system[0].text or "").startswith("x-anthropic-billing-header:"):
        system = system[1:]
    return _text(system, "system")


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
        "content": _blocks(choice),
        "stop_reason": _FINISH[choice.call.finish],
        "stop_sequence": choice.sampled.stop,
        "usage": {"input_tokens": len(prompt.token_ids), "output_tokens": len(choice.call.output)},
    }


async def stream(
    model: str, prompt: GatewayPrompt, items: AsyncIterator[Any], parser: AnswerParser, call_id: str, has_tools: bool
) -> AsyncIterator[bytes]:
    """The events of an answer: text as it comes, calls of tools at the end."""
    usage = {"input_tokens": len(prompt.token_ids), "output_tokens": 0}
    start = {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": model, "content": []}
    yield typed_event("message_start", message=start | {"stop_reason": None, "stop_sequence": None, "usage": usage})
    sent, open_name = 0, None
    async for item in deltas(items, parser, has_tools):
        name = None if isinstance(item, Choice) else item[0]
        if name != open_name and open_name is not None:
            if open_name == "reasoning":
                delta = {"type": "signature_delta", "signature": call_id}
                yield typed_event("content_block_delta", index=sent - 1, delta=delta)
            yield typed_event("content_block_stop", index=sent - 1)
        if isinstance(item, Choice):
            for value in _rest(item, sent):
                yield value
            break
        kind = "text" if name == "content" else "thinking"
        if name != open_name:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            yield typed_event("content_block_start", index=sent, content_block=block)
            sent, open_name = sent + 1, name
        yield typed_event("content_block_delta", index=sent - 1, delta={"type": f"{kind}_delta", kind: item[1]})
    yield typed_event("message_stop")


def _rest(choice: Choice, sent: int) -> Iterator[bytes]:
    """The events after the first ``sent`` blocks: calls of tools, or the text of an empty answer."""
    for index, block in enumerate(_blocks(choice)[sent:], start=sent):
        begun = block | ({"input": {}} if block["type"] == "tool_use" else {})
        yield typed_event("content_block_start", index=index, content_block=begun)
        if block["type"] == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield typed_event("content_block_delta", index=index, delta=delta)
        yield typed_event("content_block_stop", index=index)
    reason = {"stop_reason": _FINISH[choice.call.finish], "stop_sequence": choice.sampled.stop}
    yield typed_event("message_delta", delta=reason, usage={"output_tokens": len(choice.call.output)})


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    answer = choice.answer
    if answer.reasoning:
        # Clients send thoughts without a signature back as something else.
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": choice.call.call_id})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content or ""})
    blocks += [{"type": "tool_use", "id": c.call_id, "name": c.name, "input": c.arguments} for c in answer.tool_calls]
    return blocks
