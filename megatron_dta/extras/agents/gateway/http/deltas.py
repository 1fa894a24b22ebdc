"""The parts of an answer's message as they become certain, for streams of all interfaces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from megatron_dta.extras.agents.gateway.gateway import Choice
from megatron_dta.extras.agents.gateway.messages import AnswerParser


async def deltas(
    items: AsyncIterator[Any], parser: AnswerParser | None, has_tools: bool
) -> AsyncIterator[tuple[str, str] | Choice]:
    """("reasoning" or "content", the next part of it), in this order, and at last the choice, whose calls are new.

    Args:
        items: of ``Gateway.stream``.
        parser: None: the whole text is content.
    """
    sent = {"reasoning": 0, "content": 0}
    async for item in items:
        is_last = isinstance(item, Choice)
        if parser is None:
            message = ("", item.sampled.text if is_last else item.text[: item.safe])
        elif is_last:
            message = (item.answer.reasoning or "", item.answer.content or "")
        else:
            message = parser.begun(item.text[: item.safe], has_tools)
        for name, text in zip(sent, message, strict=True):
            if len(text) > sent[name]:
                yield name, text[sent[name] :]
                sent[name] = len(text)
        if is_last:
            yield item


def typed_event(kind: str, **values: Any) -> bytes:
    """One server-sent event whose data says its type, too."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps({"type": kind, **values}).encode())
