"""Says why a call begins a branch of its session's tree, so that a user sees why little is reused and what to change.

A conversation is compared with the earlier ones of its session, message by message (without reasoning, which clients
leave out), and the first difference is the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from megatron_dta.extras.agents.gateway.messages import visible_digest
from megatron_dta.extras.agents.gateway.prompts import GatewayPrompt
from megatron_dta.extras.agents.gateway.session import Call, Session

# In the order of a conversation; ``monitor.metric_names`` describes them.
REASONS = ("again", "tools", "system", "history", "answer", "stop", "template", "text")


def note_call(session: Session, prompt: GatewayPrompt, call: Call, answers: list[dict[str, Any]]) -> None:
    """Note a finished call, and the reason if it begins a branch.

    Args:
        answers: its message in the forms in which a client may send it back.
    """
    parent = call.parent
    is_branch = bool(session.prompts) if parent is None else parent in session.continued
    if prompt.node in session.prompts:
        session.branches[call.number] = "again"
    elif is_branch:
        session.branches[call.number] = _reason(session, prompt)
    session.prompts.add(prompt.node)
    if parent is not None:
        session.continued.add(parent)
    if prompt.messages is not None:
        digest = b""
        for digest, _ in _beginnings(prompt.messages, prompt.tools):
            session.talks.setdefault(digest, [])
        for after in {_after(digest, answer) for answer in answers}:
            session.talks.setdefault(after, []).append(call)


def _reason(session: Session, prompt: GatewayPrompt) -> str:
    if prompt.messages is None:
        return "text"
    path, node = set(), prompt.node.parent
    while node is not None:
        path.add(node)
        node = node.parent
    for digest, role in _beginnings(prompt.messages, prompt.tools):
        if digest not in session.talks:
            return {"": "tools", "system": "system", "assistant": "answer"}.get(role, "history")
        calls = session.talks[digest]
        if calls and path.isdisjoint(calls):
            return "stop" if calls[-1].finish == "stop_sequence" else "template"
    return "history"


def _beginnings(messages: list[dict[str, Any]], tools: list[Any] | None) -> Iterator[tuple[bytes, str]]:
    """The digest of every beginning of a conversation, and the role of its last message; first that of its tools."""
    digest = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()
    yield digest, ""
    for message in messages:
        digest = _after(digest, message)
        yield digest, message["role"]


def _after(digest: bytes, message: dict[str, Any]) -> bytes:
    content = digest + message["role"].encode() + visible_digest(message)
    return hashlib.blake2b(content, digest_size=16).digest()
