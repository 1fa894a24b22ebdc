"""The gateway's interfaces over raw HTTP: replies to clients, and the calls that it records."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from megatron_dta.extras.agents.gateway.records import SessionSizes, context_of, leaves, session_rollouts
from open_gateway import AGENT_TEMPLATE, OpenGateway, chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]


class Script:
    """Answers texts by the end of the prompt's text."""

    def __init__(self, tokenizer: object) -> None:
        self.tokenizer, self.answers = tokenizer, {}

    def __call__(self, prompt: list[int], key: int) -> list[int]:
        # Special tokens are left out of decoded text, so the last message ends it.
        text = self.tokenizer.decode(prompt)
        for end, answer in self.answers.items():
            if text.rstrip().endswith(end):
                return [*self.tokenizer.encode(answer).tolist(), self.tokenizer.eos_id]
        return [*self.tokenizer.encode(f"fine {key % 97}").tolist(), self.tokenizer.eos_id]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[OpenGateway, Script, ScriptedEngine]]:
    tokenizer = chat_tokenizer(tmp_path / "model")
    script = Script(tokenizer)
    engine = ScriptedEngine(script, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        yield gateway, script, engine


def post(url: str, key: str, body: object, header: str = "authorization") -> dict:
    value = f"Bearer {key}" if header == "authorization" else key
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {header: value, "content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.loads(reply.read())


def refused(url: str, key: str, body: object) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, key, body)
    reply = json.loads(caught.value.read())
    assert "\n" not in reply["error"]["message"]
    return caught.value.code, reply["error"]["message"]


def events(url: str, key: str, body: dict) -> list[str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as reply:
        return [line for line in reply.read().decode().split("\n\n") if line]


def test_a_conversation_with_tools_is_one_path(served) -> None:
    """Three calls, the second with a tool's result: one leaf, answers as they were sampled, nothing tokenized twice."""
    gateway, script, engine = served
    session, key = gateway.open("g")
    url = gateway.url + "/v1/chat/completions"
    # Not as the template writes it: no blanks, and words around the call.
    script.answers["user\nadd 1 and 2\nassistant"] = (
        'well\n<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'
    )
    messages: list[dict] = [{"role": "user", "content": "add 1 and 2"}]
    reply = post(url, key, {"model": "m", "messages": messages, "tools": TOOLS, "logprobs": True})
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert choice["message"]["content"] == "well"
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"] == len(session.calls[0].output)
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == session.calls[0].logprobs.tolist()
    messages += [choice["message"], {"role": "tool", "content": "3", "tool_call_id": call["id"]}]
    again = post(url, key, {"model": "m", "messages": messages, "tools": TOOLS})
    messages += [again["choices"][0]["message"], {"role": "user", "content": "and now?"}]
    post(url, key, {"model": "m", "messages": messages, "tools": TOOLS})
    first, second, third = session.calls
    assert second.parent is first
    assert third.parent is second
    assert np.array_equal(second.token_ids(first.length), first.token_ids())
    assert [prompt for prompt, _ in engine.prompts] == [c.token_ids(c.prompt_length).tolist() for c in session.calls]
    sizes = SessionSizes.of(session)
    assert (sizes.calls, sizes.branches) == (3, 1)
    assert sizes.trained_tokens == sum(len(c.output) for c in session.calls)
    assert sizes.tokenized_tokens == sizes.stored_tokens - sizes.trained_tokens
    (rollout,) = session_rollouts(session, 1.0)
    assert rollout.group_id == "g"
    assert np.count_nonzero(rollout.loss_mask) == sizes.trained_tokens
    assert np.array_equal(rollout.token_ids[first.prompt_length : first.length], first.output)
    assert np.array_equal(rollout.logprobs[rollout.loss_mask], np.concatenate([c.logprobs for c in session.calls]))


def test_changed_histories_branch(served) -> None:
    """A retry, a compaction, a sub-agent and dropped reasoning: branches that share what is equal."""
    gateway, script, _ = served
    session, key = gateway.open()
    url = gateway.url + "/v1/chat/completions"
    system = {"role": "system", "content": "be good, and do as the long text of this system prompt says"}
    script.answers["user\nthink\nassistant"] = "<think>\nhm hm\n</think>\n\nyes"
    ask = [system, {"role": "user", "content": "think"}]
    reply = post(url, key, {"messages": ask})["choices"][0]["message"]
    assert reply["content"] == "<think>\nhm hm\n</think>\n\nyes"
    post(url, key, {"messages": ask})  # a retry
    tokenized = session.counts.tokenized_tokens
    first, retry = session.calls
    assert retry.parent is None
    assert retry.prompt_length == first.prompt_length
    assert tokenized == first.prompt_length
    # With a tool's result the reasoning stays: the call continues the retry, which was the last with this text.
    kept = [*ask, reply, {"role": "tool", "content": "t"}]
    post(url, key, {"messages": kept})
    assert session.calls[2].parent is retry
    # After another question the template drops it: a branch behind the first question.
    post(url, key, {"messages": [*ask, reply, {"role": "user", "content": "why"}]})
    stripped = session.calls[3]
    assert stripped.parent is None
    text = gateway.gateway.tokenizer.decode(stripped.token_ids(stripped.prompt_length))
    assert "hm hm" not in text
    assert stripped.base.base_length >= first.prompt_length - 3
    post(url, key, {"messages": [system, {"role": "user", "content": "summary: thought"}]})
    compacted = session.calls[4]
    assert compacted.base.base_length > 10  # the system prompt
    post(url, key, {"messages": [{"role": "system", "content": "sub-agent"}, {"role": "user", "content": "go"}]})
    assert len(leaves(session.calls)) == 5
    rollouts = session_rollouts(session, 0.5)
    assert sum(np.count_nonzero(r.loss_mask) for r in rollouts) == sum(len(c.output) for c in session.calls)
    assert {r.trajectory_id for r in rollouts} == {session.session_id}
    # With rewards of calls, every call becomes a rollout.
    post(gateway.url + "/v1/session/reward", key, {"reward": 2, "call": "chatcmpl-" + retry.call_id})
    by_call = session_rollouts(session, 0.5)
    assert [r.reward for r in by_call] == [0.5, 2.0, 0.5, 0.5, 0.5, 0.5]
    assert len({r.trajectory_id for r in by_call}) == 6


def test_an_end_that_the_template_does_not_write_is_not_repeated(tmp_path: Path) -> None:
    """A later prompt has the answer with the template's end; the answer with the sampled one is a branch."""
    tokenizer = chat_tokenizer(tmp_path / "model", AGENT_TEMPLATE, "<s>")
    answer = [*tokenizer.encode("yes").tolist(), tokenizer.encode("<s>")[0]]
    with open_gateway(
        ScriptedEngine(lambda prompt, key: answer, tokenizer.vocab_size), tokenizer, tmp_path / "model"
    ) as gateway:
        session, key = gateway.open()
        url, ask = gateway.url + "/v1/chat/completions", [{"role": "user", "content": "really?"}]
        choice = post(url, key, {"messages": ask})["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("yes", "stop")
        post(url, key, {"messages": [*ask, choice["message"], {"role": "user", "content": "why"}]})
        first, second = session.calls
        assert second.parent is None
        written = second.token_ids(second.prompt_length)
        assert np.array_equal(written[: first.length - 1], first.token_ids()[:-1])
        assert written[first.length - 1] == tokenizer.eos_id
        assert session.counts.reused_tokens == first.length - 1
        assert sum(np.count_nonzero(r.loss_mask) for r in session_rollouts(session, 1.0)) == 2 * len(answer)


def test_choices_stops_and_lengths(served) -> None:
    gateway, script, _ = served
    session, key = gateway.open()
    script.answers["user\ncount\nassistant"] = "one two three four five six"
    url, ask = gateway.url + "/v1/chat/completions", [{"role": "user", "content": "count"}]
    reply = post(url, key, {"messages": ask, "stop": ["three", "nine"]})
    assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("one two ", "stop")
    stopped = session.calls[0]
    assert gateway.gateway.tokenizer.decode(stopped.output) == "one two three"
    reply = post(url, key, {"messages": ask, "max_tokens": 5})
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(session.calls[1].output) == 5
    # Cut at its length, an answer is continued with the end that the template adds.
    history = [*ask, reply["choices"][0]["message"], {"role": "user", "content": "on"}]
    post(url, key, {"messages": history})
    assert session.calls[2].parent is session.calls[1]
    assert context_of(session.calls[2])[0] == gateway.gateway.tokenizer.eos_id
    reply = post(url, key, {"messages": [{"role": "user", "content": "hello"}], "n": 3})
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert len(set(texts)) == 3
    assert len(session.calls) == 6
    assert len(leaves(session.calls)) == 5


def test_streams_say_the_same(served) -> None:
    gateway, script, _ = served
    _, key = gateway.open()
    text = 'let us see, Grüße 🙂 <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    script.answers["user\nstream\nassistant"] = text
    body = {"messages": [{"role": "user", "content": "stream"}], "tools": TOOLS, "stream": True}
    lines = events(gateway.url + "/v1/chat/completions", key, body | {"stream_options": {"include_usage": True}})
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "let us see, Grüße 🙂"
    assert len([delta for delta in deltas if delta.get("content")]) > 1
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1}]
    assert chunks[-1]["usage"]["completion_tokens"] > 10
    plain = events(gateway.url + "/v1/completions", key, {"prompt": "tell", "stream": True, "max_tokens": 40})
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in plain[:-1]]
    assert "".join(texts).startswith("fine ")


def test_bytes_of_parts_of_a_character(served) -> None:
    """The tokenizer has a token for each byte of an emoji: the bytes of all tokens are the text's, in streams too."""
    gateway, script, _ = served
    _, key = gateway.open()
    text = "Grüße 🙂 ¡"
    script.answers["user\nsmile\nassistant"] = text
    body = {"messages": [{"role": "user", "content": "smile"}], "logprobs": True}
    whole = post(gateway.url + "/v1/chat/completions", key, body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in whole) == text.encode() + b"<|im_end|>"
    assert [entry["bytes"] for entry in whole if entry["token"] == "\ufffd"][-5:-2] == [[0x9F], [0x99], [0x82]]
    lines = events(gateway.url + "/v1/chat/completions", key, body | {"stream": True})
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")] == [whole]


def test_completions_continue_texts_and_ids(served) -> None:
    gateway, _, _ = served
    session, key = gateway.open()
    url = gateway.url + "/v1/completions"
    text = post(url, key, {"prompt": "once", "max_tokens": 40})["choices"][0]["text"]
    post(url, key, {"prompt": "once" + text + " more", "max_tokens": 40})
    assert session.calls[1].parent is session.calls[0]
    token_ids = session.calls[1].token_ids().tolist()
    post(url, key, {"prompt": [*token_ids, 5, 6]})
    assert session.calls[2].base.base is None  # token ids and texts are distinguished
    token_ids = session.calls[2].token_ids().tolist()
    post(url, key, {"prompt": [*token_ids, 7]})
    assert session.calls[3].parent is session.calls[2]
    assert context_of(session.calls[3]).tolist() == [7]


def test_anthropics_interface(served) -> None:
    gateway, script, _ = served
    session, key = gateway.open()
    url = gateway.url + "/v1/messages"
    script.answers["user\nadd\nassistant"] = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    body = {
        "model": "m",
        "max_tokens": 60,
        "system": "s",
        "tools": tools,
        "messages": [{"role": "user", "content": "add"}],
    }
    reply = post(url, key, body, "x-api-key")
    assert reply["stop_reason"] == "tool_use"
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
    result = {
        "type": "tool_result",
        "tool_use_id": reply["content"][1]["id"],
        "content": [{"type": "text", "text": "1"}],
    }
    later = [
        *body["messages"],
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [result]},
    ]
    reply = post(url, key, body | {"messages": later}, "x-api-key")
    assert reply["stop_reason"] == "end_turn"
    assert session.calls[1].parent is session.calls[0]
    streamed = events(url, key, body | {"stream": True})
    kinds = [line.split("\n")[0].removeprefix("event: ") for line in streamed]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    assert refused(url, key, body | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})[0] == 400


ASK = [{"role": "user", "content": "a"}]
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"


@pytest.mark.parametrize(
    ("route", "body", "says"),
    [
        (CHAT, {"messages": ASK, "temperature": 0.3}, "temperature: 0.3 is not the run's 1"),
        (CHAT, {"messages": ASK, "n": 2, "stream": True}, "n: streams"),
        (CHAT, {"messages": ASK, "made_up": 1}, "made_up: the gateway does not know"),
        (CHAT, {"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format: 'json_schema' would"),
        (CHAT, {"messages": ASK, "tool_choice": "required"}, "tool_choice: the model decides"),
        (CHAT, {"messages": ASK, "reasoning_effort": "low"}, "reasoning_effort: the run decides"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: message 1: a part of"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400_000}]}, "the prompt has 4000"),
        (CHAT, b"{not json", "body: Invalid JSON"),
        (RESPONSES, {"input": ASK, "previous_response_id": "resp_1"}, "previous_response_id: "),
        (RESPONSES, {"input": ASK, "tools": [{"type": "web_search"}]}, "tools.1: a tool of type 'web_search'"),
        (RESPONSES, {"input": ASK, "reasoning": {"effort": "low"}}, "reasoning.effort: the run decides"),
        (RESPONSES, {"input": ASK, "text": {"format": {"type": "json_schema"}}}, "text.format: 'json_schema' would"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.1: a part of type"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input.1: an item of type 'item_reference'"),
        (MESSAGES, {"messages": ASK, "max_tokens": 9, "top_k": 5}, "top_k: the run decides"),
        (MESSAGES, {"messages": ASK, "max_tokens": 9, "thinking": {"type": "enabled"}}, "thinking: the run decides"),
        (
            MESSAGES,
            {"messages": ASK, "max_tokens": 9, "context_management": {"edits": [{"type": "clear_tool_uses"}]}},
            "context_management: the gateway takes",
        ),
        (
            MESSAGES,
            {"messages": ASK, "max_tokens": 9, "tools": [{"type": "web_search_1", "name": "w"}]},
            "tools.0.type: ",
        ),
        (
            MESSAGES,
            {"messages": ASK, "max_tokens": 9, "tool_choice": {"type": "any"}},
            "tool_choice: the model decides",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(served, route: str, body: object, says: str) -> None:
    gateway, _, _ = served
    session, key = gateway.open()
    status, message = refused(f"{gateway.url}/v1/{route}", key, body)
    assert status == 400
    assert message.startswith(says)
    assert not session.calls
    assert session.running == 0
