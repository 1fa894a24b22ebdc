"""The gateway's messages as families write them: ids after a known prefix, tool calls in tags, continued words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from test_gateway_calls import events, post

from blank_tokenizer import blank_tokenizer
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.sampling.params import SamplingParams
from open_gateway import chat_tokenizer, open_gateway
from scripted_engine import ScriptedEngine

TAGS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TYPES = {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}}
TYPES["b"] = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
TYPED = [{"type": "function", "function": {"name": "add", "parameters": {"properties": TYPES}}}]


def written(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def answering(tokenizer: object, text: str) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, key: [*tokenizer.encode(text), tokenizer.eos_id], tokenizer.vocab_size)


def test_a_branch_has_the_ids_of_its_whole_text(tmp_path: Path) -> None:
    tokenizer = blank_tokenizer(tmp_path / "model")
    engine = ScriptedEngine(lambda prompt, key: [*prompt[-3:-1], tokenizer.eos_id], tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        session, key = gateway.open()
        for word in ("add two", "see me"):
            talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": word}]
            reply = post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
            text = f"system: be kind</s>\nuser: {word}</s>\nassistant: "
            call = session.calls[-1]
            assert call.token_ids(call.prompt_length).tolist() == tokenizer.encode(text).tolist()
        # The turn after an answer, too: what follows its end is as in a text that has it.
        talk += [reply["choices"][0]["message"], {"role": "user", "content": "go"}]
        post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
        last = session.calls[-1]
        assert last.parent is session.calls[-2]
        rest = last.token_ids(last.prompt_length)[last.parent.length :]
        assert rest.tolist() == tokenizer.encode("</s>\nuser: go</s>\nassistant: ").tolist()[1:]
        assert session.counts.crossed_borders == 0


def test_calls_in_tags_are_found_and_typed() -> None:
    parser = AnswerParser("qwen3_coder")

    def calls(text: str) -> list[tuple]:
        return [(call.name, call.arguments) for call in parser.parse(text, "id", TYPED).tool_calls]

    text = "first\n" + written("add", a="1", s="2") + "\n" + written("add", b="None", o='{"x": [1]}', s="\ntwo\n")
    assert calls(text) == [("add", {"a": 1, "s": "2"}), ("add", {"b": None, "o": {"x": [1]}, "s": "\ntwo\n"})]
    assert parser.parse(text, "id", TYPED).content == "first"
    assert calls(written("add", a="1.0", b="True")) == [("add", {"a": 1, "b": True})]
    # A value that is none of its types stays text, as do those without a type; so do calls that are not whole.
    assert calls(written("add", a="one", o="NaN", x="3")) == [("add", {"a": "one", "o": "NaN", "x": "3"})]
    assert calls(written("add")) == [("add", {})]
    for broken in (
        written("add", a="1").replace("</parameter>", ""),
        written("add", a="1").replace("</function>", ""),
        written("add", a="1").replace("<parameter", "text <parameter"),
        written("add", a="1") + "<tool_call>no call</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ):
        assert parser.parse(broken, "id", TYPED) == Answer(broken, None)
    assert parser.parse(text, "id", None).content == text


def test_the_template_decides_how_calls_are_parsed(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", TAGS)
    engine = answering(tokenizer, "so " + written("add", a="1", s="2"))
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        assert gateway.gateway.parser.tool_calls == "qwen3_coder"
        gateway.gateway.params = SamplingParams(200, tokenizer.eos_id)
        session, key = gateway.open()
        body = {
            "messages": [{"role": "user", "content": "go"}],
            "tools": TYPED,
        }
        message = post(gateway.url + "/v1/chat/completions", key, body)["choices"][0]["message"]
        assert message["content"] == "so"
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "s": "2"}
        streamed = "".join(events(gateway.url + "/v1/chat/completions", key, {**body, "stream": True}))
        assert "<function" not in streamed
        # Sent back, the call continues the answer as it was sampled.
        body["messages"] += [message, {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}]
        post(gateway.url + "/v1/chat/completions", key, body)
        assert session.calls[-1].parent is not None


def test_words_of_the_assistant_are_continued(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model")
    engine = answering(tokenizer, "four")
    with open_gateway(engine, tokenizer, tmp_path / "model") as gateway:
        session, key = gateway.open()
        ask = {"role": "user", "content": "two and two?"}
        begun = [ask, {"role": "assistant", "content": "that is "}]
        reply = post(gateway.url + "/v1/chat/completions", key, {"messages": begun})["choices"][0]["message"]
        assert reply["content"] == "four"
        text = tokenizer.encode("<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\nthat is ").tolist()
        assert engine.prompts[0][0] == text
        talk = [ask, {"role": "assistant", "content": "that is four"}, {"role": "user", "content": "sure?"}]
        post(gateway.url + "/v1/chat/completions", key, {"messages": talk})
        assert session.calls[1].parent is session.calls[0]
