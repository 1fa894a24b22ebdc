"""Translates OpenAI's responses: requests into messages for templates, answers into items and events.

Nothing is stored: clients send all items again, and a reference to an earlier response is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from megatron_dta.extras.agents.gateway.errors import refuse
from megatron_dta.extras.agents.gateway.gateway import Choice
from megatron_dta.extras.agents.gateway.http.deltas import deltas, typed_event
from megatron_dta.extras.agents.gateway.http.schemas import Item, ResponsesRequest
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


def messages_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The conversation as messages; ``RequestError`` for items that the gateway does not know."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for number, item in enumerate(request.input, start=1):
        _add(messages, item, f"input.{number}")
    return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Append an item; those of one answer (reasoning, text, calls) become one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if item.type == "message" and item.role is not None:
        message = {"role": item.role, "content": _text(item.content, where)}
        if item.role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif item.type == "function_call" and item.name is not None:
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif item.type == "function_call_output":
        content = _text(item.output, where)
        messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    elif item.type == "reasoning":
        messages.append({"role": "assistant", "content": ""})
        # Clients may leave out the text; then the gateway knows it.
        if isinstance(item.content, list) and item.content:
            messages[-1]["reasoning_content"] = "".join(part.text or "" for part in item.content)
    else:
        raise refuse(f"{where}: an item of type {item.type!r}; messages, function calls and reasoning are taken")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise refuse(f"{where}: a part of type {part.type!r}; the gateway takes text only")
    return "".join(part.text or part.refusal or "" for part in content)


def tools_of(request: ResponsesRequest) -> list[dict[str, Any]] | None:
    """The tools in the form of chat completions."""
    if not request.tools or request.tool_choice == "none":
        return None
    tools = []
    for number, tool in enumerate(request.tools, start=1):
        if tool.type != "function" or tool.name is None:
            raise refuse(
                f"tools.{number}: a tool of type {tool.type!r}; only functions can be called here, turn it off"
            )
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters or {}}
        tools.append({"type": "function", "function": function})
    return tools


class ResponseWriter:
    """Writes one response, whole or as events.

    Args:
        call_id: of the call, part of all ids.
    """

    def __init__(
        self, request: ResponsesRequest, model: str, prompt: GatewayPrompt, call_id: str, tokenizer: Tokenizer
    ) -> None:
        self._call_id, self._prompt, self._tokenizer, self._events = call_id, prompt, tokenizer, 0
        self._head = {
            "id": f"resp_{call_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": request.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
        }

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The finished response."""
        is_cut = choice.call.finish == "length"
        read, written = len(self._prompt.token_ids), len(choice.call.output)
        return self._head | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(choice.answer),
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": self._prompt.known},
                "output_tokens": written,
                "output_tokens_details": {
                    "reasoning_tokens": len(self._tokenizer.encode(choice.answer.reasoning or ""))
                },
                "total_tokens": read + written,
            },
        }

    async def stream(self, items: AsyncIterator[Any], parser: AnswerParser, has_tools: bool) -> AsyncIterator[bytes]:
        """The events of a response: text as it comes, calls of functions at the end."""
        begun = self._head | {"status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        index, open_name, text = -1, None, ""
        async for item in deltas(items, parser, has_tools):
            name = None if isinstance(item, Choice) else item[0]
            if name != open_name:
                for value in () if open_name is None else self._end(index, open_name, text):
                    yield value
                text, open_name = "", name
                index += 1
                for value in () if name is None else self._begin(index, name):
                    yield value
            if isinstance(item, Choice):
                for value in self._rest(item, max(index, 0)):
                    yield value
                continue
            text += item[1]
            yield self._event(f"response.{_TEXT[name]}.delta", **self._at(index, name), delta=item[1])

    def _begin(self, index: int, name: str) -> Iterator[bytes]:
        item = self._item(name, "") | {"content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._event("response.content_part.added", **self._at(index, name), part=_part(name, ""))

    def _end(self, index: int, name: str, text: str) -> Iterator[bytes]:
        yield self._event(f"response.{_TEXT[name]}.done", **self._at(index, name), text=text)
        yield self._event("response.content_part.done", **self._at(index, name), part=_part(name, text))
        yield self._event("response.output_item.done", output_index=index, item=self._item(name, text))

    def _rest(self, choice: Choice, sent: int) -> Iterator[bytes]:
        """The events after the first ``sent`` items: calls of functions, or the text of an empty answer."""
        for index, item in enumerate(self._items(choice.answer)[sent:], start=sent):
            if item["type"] == "message":
                yield from self._begin(index, "content")
                yield from self._end(index, "content", "")
                continue
            begun = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=begun)
            values = {"item_id": item["id"], "output_index": index}
            yield self._event("response.function_call_arguments.delta", **values, delta=item["arguments"])
            values |= {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **values)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = self.whole(choice)
        yield self._event(f"response.{response['status']}", response=response)

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        items = [] if not answer.reasoning else [self._item("reasoning", answer.reasoning)]
        if answer.content or not answer.tool_calls:
            items.append(self._item("content", answer.content or ""))
        for i, call in enumerate(answer.tool_calls):
            item = {"type": "function_call", "id": f"fc_{self._call_id}_{i}", "call_id": call.call_id}
            items.append(item | {"name": call.name, "arguments": json.dumps(call.arguments), "status": "completed"})
        return items

    def _item(self, name: str, text: str) -> dict[str, Any]:
        item = {"id": self._item_id(name), "status": "completed", "content": [_part(name, text)]}
        if name == "reasoning":
            return item | {"type": "reasoning", "summary": []}
        return item | {"type": "message", "role": "assistant"}

    def _item_id(self, name: str) -> str:
        return f"{'rs' if name == 'reasoning' else 'msg'}_{self._call_id}"

    def _at(self, index: int, name: str) -> dict[str, Any]:
        values = {"item_id": self._item_id(name), "output_index": index, "content_index": 0}
        return values | ({} if name == "reasoning" else {"logprobs": []})

    def _event(self, kind: str, **values: Any) -> bytes:
        self._events += 1
        return typed_event(kind, sequence_number=self._events - 1, **values)


_TEXT = {"reasoning": "reasoning_text", "content": "output_text"}


def _part(name: str, text: str) -> dict[str, Any]:
    if name == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}
