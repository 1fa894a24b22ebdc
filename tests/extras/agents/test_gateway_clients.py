"""Unmodified client libraries at the gateway: those of OpenAI and Anthropic, if installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from open_gateway import OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

CALL = '<tool_call>{"name": "look_up", "arguments": {"drawer": "b"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[OpenGateway]:
    """Calls the tool until a tool has answered, then answers 3."""
    tokenizer = chat_tokenizer(tmp_path / "model")

    def script(prompt: list[int], key: int) -> list[int]:
        text = "3" if "\ntool\n" in "\n" + tokenizer.decode(prompt) else CALL
        return [*tokenizer.encode(text).tolist(), tokenizer.eos_id]

    engine = ScriptedEngine(script, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        yield gateway


def access(gateway: OpenGateway) -> tuple[object, SimpleNamespace]:
    session, key = gateway.open()
    return session, SimpleNamespace(base_url=gateway.url + "/v1", api_key=key)


def test_openais_client(served: OpenGateway) -> None:
    openai = pytest.importorskip("openai")
    session, agent = access(served)
    client = openai.OpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    ask = [{"role": "user", "content": "b?"}]
    first = client.chat.completions.create(model="m", messages=ask, tools=TOOLS, logprobs=True).choices[0]
    assert first.message.tool_calls[0].function.name == "look_up"
    assert len(first.logprobs.content) == len(session.calls[0].output)
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "3"}
    stream = client.chat.completions.create(
        model="m",
        messages=[*ask, first.message, result],
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "3"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= session.calls[0].length
    assert session.calls[1].parent is session.calls[0]
    assert len(client.chat.completions.create(model="m", messages=ask, n=2).choices) == 2
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=ask, temperature=0.2)
