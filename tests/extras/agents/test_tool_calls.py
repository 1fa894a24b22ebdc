"""Calls of tools in every form: what a template writes is read back, whole, in pieces, and where it is broken."""

import json
import re
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("transformers", "5.15")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from test_gateway_calls import events, post

from chat_folder import make_chat_folder
from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.agents.gateway.messages import Answer, AnswerParser
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.prompts.tool_calls import FORMS, MARKED
from open_gateway import open_gateway
from scripted_engine import ScriptedEngine

TYPES = {"a": {"type": "integer"}, "s": {"type": "string"}, "o": {"type": "object"}, "n": {"type": "number"}}
TYPES["b"] = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": TYPES}}}]
HARD = 'quotes "\' and\nlines, 日本 \N{ROCKET} <b> {"x": 1} \\n </arg> ```'
CALLS = [
    ("add", {"a": 1, "s": "2", "o": {"x": [1, {"y": None}]}, "b": True, "n": 0.5}),
    ("unknown.tool-2", {"s": HARD}),
    ("add", {}),
]
# What the models' own templates write for the calls of an answer; ``JINJA`` has what that stands for.
WRITTEN = {
    "hermes": 'FOR\n<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>DONE',
    "qwen3_coder": "FOR\n<tool_call>\n<function=NAME>\nEACH<parameter=KEY>\nVALUE\n</parameter>\nDONE</function>\n"
    "</tool_call>DONE",
    "glm": "FOR\n<tool_call>NAME\nEACH<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\nDONE</tool_call>DONE",
    "glm 4.7": "FOR<tool_call>NAMEEACH<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>DONE</tool_call>DONE",
    "deepseek_v3": "<~tool▁calls▁begin~>FOR<~tool▁call▁begin~>function<~tool▁sep~>NAME\n```json\nJSON\n```"
    "<~tool▁call▁end~>\nDONE<~tool▁calls▁end~>",
    "deepseek_v3 1": "<~tool▁calls▁begin~>FOR<~tool▁call▁begin~>NAME<~tool▁sep~>{{ '' + f.arguments }}"
    "<~tool▁call▁end~>DONE<~tool▁calls▁end~>",
    "deepseek_v32": '\n\n<~DSML~function_calls>\nFOR<~DSML~invoke name="NAME">\nEACH<~DSML~parameter name="KEY" '
    'string="TEXT">VALUE</~DSML~parameter>\nDONE</~DSML~invoke>\nDONE</~DSML~function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|>FOR<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>JSON"
    "<|tool_call_end|>DONE<|tool_calls_section_end|>",
    "harmony": "FOR<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>JSON<|call|>DONE",
    "llama3_json": 'FOR{"name": "NAME", "parameters": JSON}DONE',
}
JINJA = {
    "FOR": "{% for c in m.tool_calls %}{% set f = c.function %}",
    "EACH": "{% for k, v in f.arguments | items %}",
    "DONE": "{% endfor %}",
    "NAME": "{{ f.name }}",
    "JSON": "{{ f.arguments | tojson(ensure_ascii=false) }}",
    "KEY": "{{ k }}",
    "VALUE": "{{ v if v is string else v | tojson(ensure_ascii=false) }}",
    "TEXT": "{{ 'true' if v is string else 'false' }}",
    "~": "\uff5c",
}


def written(form: str, calls: list[tuple[str, dict]], folder: Path) -> tuple[ChatTemplate, str]:
    """A template of this form, whose answers end with the next turn's role, and how it writes one with these calls."""
    channel = "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    thought = channel if form == "harmony" else "{{ m.thinking }}</think>"
    text = "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.thinking %}" + thought
    text += "{% endif %}{{ m.content }}{% if m.tool_calls %}" + WRITTEN[form] + "{% endif %}{% endfor %}"
    text += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    for short, long in JINJA.items():
        text = text.replace(short, long)
    marks = re.findall(r"<[|\uff5c][\w\u2581]+[|\uff5c]>", text + "<|start|><|user|><|tool|>")
    template = ChatTemplate(make_chat_folder(folder, text, special=marks))
    functions = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": functions}
    return template, template.text([answer], TOOLS, generation_prompt=False).partition("<|assistant|>")[2]


@pytest.mark.parametrize("form", WRITTEN)
def test_what_a_template_writes_is_read_back_and_continued(form: str, tmp_path: Path) -> None:
    name = form.partition(" ")[0]
    calls = CALLS[:1] if name in ("harmony", "llama3_json") else CALLS
    template, text = written(form, calls, tmp_path / "model")
    assert template.tool_call_form == name
    parser = AnswerParser.of("auto", "think", template)
    whole = parser.parse(text, "id", TOOLS)
    assert [(call.name, call.arguments) for call in whole.tool_calls] == calls
    assert (whole.reasoning, whole.content) == ("Hm.", None)
    assert (whole.tool_calls[0].call_id == "functions.add:0") == (name == "kimi_k2")
    # Cut anywhere: what a stream has sent begins the whole message, and a call without an end makes the answer text.
    for end in range(len(text)):
        reasoning, content = parser.begun(text[:end], has_tools=True)
        assert (whole.reasoning.startswith(reasoning), content) == (True, "")
        cut = parser.parse(text[:end], "id", TOOLS)
        assert cut.tool_calls == whole.tool_calls[: len(cut.tool_calls)]
        if not cut.tool_calls and name != "harmony":
            assert text[:end].endswith(cut.content)
    if name not in ("harmony", "llama3_json"):
        assert [(call.name, call.arguments) for call in MARKED.read(text, TOOLS).calls] == calls
    # Sent back, the call continues the answer with the ids that were sampled.
    end = "" if form == "harmony" else "<|tool|>"
    _, text = written(form, CALLS[:1], folder := tmp_path / "other")
    tokenizer = HuggingFaceTokenizer(folder, [int(HuggingFaceTokenizer(folder).encode(text + end)[-1])])
    # With other blanks than the template writes in JSON.
    script = tokenizer.encode(text.replace('": ', '":  ') + end).tolist()
    engine = ScriptedEngine(lambda prompt, key: script, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, folder, max_tokens=(900, 9000), reasoning_parser="think") as gateway:
        session, key = gateway.open()
        url, talk = gateway.url + "/v1/chat/completions", [{"role": "user", "content": "go"}]
        for _ in range(2):
            message = post(url, key, {"messages": talk, "tools": TOOLS})["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert (message.pop("reasoning_content"), message["content"]) == ("Hm.", None)
            assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
            talk += [message, {"role": "tool", "content": "3", "tool_call_id": call["id"]}]
        assert (session.calls[1].parent, session.branches) == (session.calls[0], {})
        assert session.calls[1].token_ids().tolist()[session.calls[0].prompt_length :][: len(script)] == script
        streamed = "".join(events(url, key, {"messages": talk, "tools": TOOLS, "stream": True}))
        assert '"content": "' not in streamed.replace('"content": ""', "")


def test_broken_calls_stay_text() -> None:
    for form, text in (
        ("hermes", "<tool_call>no call</tool_call>"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "\\ud800"}}</tool_call>'),
        ("glm", "<tool_call>add<b>text<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("llama3_json", '{"name": 3}'),
    ):
        assert AnswerParser.of(form, "none", None).parse(text, "id", TOOLS) == Answer(text, None)
    tools = [{"name": "add", "parameters": {"properties": {"a": {"anyOf": 3}}}}]  # which is no schema
    text = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert AnswerParser.of("glm", "none", None).parse(text, "id", tools) == Answer(text, None)
    parser = AnswerParser.of("harmony", "none", None)
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    # Cut, or without tools.
    assert parser.parse(thought + call, "id", TOOLS) == Answer('{"a": 1}', "hm")
    assert parser.parse(f"{thought}{call}<|call|>", "id", None) == Answer('{"a": 1}', "hm")
    assert parser.parse(f"{thought}<|channel|>final<|message|>42<|return|>", "id", None) == Answer("42", "hm")
    assert set(FORMS) == {form.partition(" ")[0] for form in WRITTEN}


def test_answers_that_repeat_themselves_are_read_fast() -> None:
    """Time that grows by the square is minutes, in which nobody else is answered."""
    texts = [(form, " " * 100_000) for form in (*FORMS.values(), MARKED)]
    texts += [
        (FORMS["glm"], f"<tool_call>add{text}</tool_call>") for text in ("<arg_key>" + " " * 4000, "<arg_key>a" * 5000)
    ]
    texts.append(
        (FORMS["qwen3_coder"], "<tool_call><function=add>" + "<parameter=a>" * 5000 + "</function></tool_call>")
    )
    began = time.monotonic()
    assert [form.read(text, TOOLS).calls for form, text in texts] == [[]] * (len(FORMS) + 1) + [[None]] * 3
    assert time.monotonic() - began < 20


def test_a_tokenizer_brings_its_own_form(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    calls = {"open_pattern": r"<call:(?P<name>\w+)>", "close": "</call>", "repeats": True, "content": "json"}
    calls["transform"] = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    fields = {"content": {"close": "<|im_end|>"}, "tool_calls": calls}
    config["response_template"] = {"start_anchor": "assistant", "fields": fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    parser = AnswerParser.of("auto", "none", ChatTemplate(folder))
    (call,) = parser.parse('so <call:add>{"a": 1}</call><|im_end|>', "id", TOOLS).tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert parser.parse("so <call:add>{</call>", "id", TOOLS).content == "so <call:add>{</call>"
    tags = calls | {"content": "xml-inline", "content_args": {"tag_pattern": "<(?P<key>a)>(?P<value>.*?)</a>"}}
    whole = {"start_anchor": "assistant", "fields": {"tool_calls": tags}}
    for template in (whole, "", [], {}, {"fields": {"content": 3}}, whole | {"version": 9}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": template}))
        with nullcontext() if template == whole else pytest.raises(InputError, match=r"^response_template of"):
            parser = AnswerParser.of("auto", "none", ChatTemplate(folder))
    for text in ("<call:add><a>1</a></call>", "<call:add><a>1</a><a>"):  # the second is cut
        assert len(parser.parse(text, "id", TOOLS).tool_calls) == text.endswith("</call>")
