"""Messages in all forms that files and clients have: what templates see, what is trained, and which ids it has."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from blank_tokenizer import blank_tokenizer
from chat_folder import CHATML, THINKING, make_chat_folder
from megatron_dta.common import time_limit
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import encode_after
from megatron_dta.sampling.prompts.load import PromptReader
from megatron_dta.sampling.prompts.messages import normalized
from megatron_dta.sampling.prompts.text_rollouts import TextReader
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.task import build_task
from megatron_dta.training.arguments import parse_arguments

pytest.importorskip("transformers")

ASK = {"role": "user", "content": "a"}
# Writes calls as Qwen's.
HERMES = (
    '<tool_call>\n{% raw %}{{% endraw %}"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)


def template(folder: Path, text: str, **settings: Any) -> ChatTemplate:
    return ChatTemplate(make_chat_folder(folder, text), **settings)


def calls(form: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + form + "{% endfor %}<|im_end|>\n{% endfor %}"
    )


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


# --- what templates see --------------------------------------------------------------------------------------------


def test_forms_become_one() -> None:
    function = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": 1}}}
    expected = [ASK, {"role": "assistant", "content": "", "tool_calls": [function]}]
    talks = [
        [ASK, call('{"x": null, "y": 1}')],
        [{**ASK, "name": None, "tool_calls": []}, call({"x": None, "y": 1})],
        [{**ASK, "content": [{"type": "text", "text": "a", "image": None}], "weight": 0}, call({"x": None, "y": 1})],
    ]
    for talk in talks:
        assert normalized(talk) == expected
        assert normalized(normalized(talk)) == expected
    assert normalized([ASK, call("")])[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert normalized([ASK, call("no JSON")])[1]["tool_calls"][0]["function"]["arguments"] == "no JSON"
    assert normalized("a") == [ASK]
    for talk, message in (
        (
            [ASK, {"role": "user", "content": [{"type": "image_url"}]}],
            "message 2: a part of content of type 'image_url'",
        ),
        ([{"role": "user", "content": None}], "message 1: must be an object with 'role' and 'content'"),
        ([{"role": "user", "content": 3}], "message 1: content: must be text or a list"),
        ([{"role": "user", "content": "", "tool_calls": "x"}], "message 1: tool_calls: must be a list"),
    ):
        with pytest.raises(InputError, match=message):
            normalized(talk)


def test_templates_get_text_or_parts_as_they_read_them(tmp_path: Path) -> None:
    head, tail = "{% for m in messages %}", "{% endfor %}"
    text = head + "[{{ m.content }}]" + tail
    parts = head + "[{% for p in m.content %}{{ p.text | trim }};{% endfor %}]" + tail
    both = (
        head + "[{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | length }}{% for p in m.content %}"
    )
    both += " {{ p.text }}{% endfor %}{% endif %}]" + tail
    two = [{"role": "user", "content": [{"type": "text", "text": "b "}, "c"]}]
    expected = {text: ("[a]", "[b c]"), parts: ("[a;]", "[b;c;]"), both: ("[a]", "[2 b  c]")}
    for number, (form, (of_text, of_parts)) in enumerate(expected.items()):
        chat = template(tmp_path / str(number), form)
        assert chat.prompt([ASK]) == of_text
        assert chat.prompt(two) == of_parts


def test_nulls_that_are_meant_stay(tmp_path: Path) -> None:
    see = "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | default([]) | tojson }}{% endfor %}"
    folder = make_chat_folder(tmp_path / "model", see)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}]
    row = {"prompt": [ASK, call({"x": None})], "tools": tools, "extra_info": {"answer": None}}
    text = {**row, "prompt": [ASK, call('{"x": null}')], "tools": json.dumps(tools)}
    prompts = {}
    for name, rows in (("row", [row]), ("text", [text])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        for file in (tmp_path / f"{name}.jsonl", tmp_path / f"{name}.parquet"):
            tokenizer = HuggingFaceTokenizer(folder)
            (prompt,) = PromptReader(tokenizer, template=ChatTemplate(folder)).read(file)
            assert prompt.record["extra_info"] == {"answer": None}
            prompts[file.name] = tokenizer.decode(prompt.token_ids)
    # In structs of Parquet a null is a filler; as JSON text it is what it is.
    assert prompts["row.jsonl"] == prompts["text.jsonl"] == prompts["text.parquet"]
    assert prompts["row.jsonl"].count("null") == 2
    assert "null" not in prompts["row.parquet"]


def test_words_of_the_assistant_are_continued(tmp_path: Path) -> None:
    chat = template(tmp_path / "a", CHATML)
    begun = [ASK, {"role": "assistant", "content": "the answer is "}]
    assert chat.prompt(begun) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nthe answer is "
    assert chat.prompt([ASK, {"role": "assistant", "content": ""}]).endswith("<|im_start|>assistant\n")
    tokenizer = HuggingFaceTokenizer(tmp_path / "a")
    reader = TextReader(tokenizer, chat)
    # Also where a response or an answer of a preference follows: its words alone are trained.
    answer = {"role": "assistant", "content": "4"}
    rows = [
        {"prompt": begun, "response": "4"},
        {"prompt": begun, "chosen": "4", "rejected": [{**answer, "content": "5"}]},
    ]
    for row, pairs in zip(rows, (False, True), strict=True):
        (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
        first = reader.read(tmp_path / "t.jsonl", pairs)[0]
        assert first.token_ids.tolist() == tokenizer.encode(chat.prompt(begun) + "4<|im_end|>").tolist()
        assert tokenizer.decode(first.token_ids[first.loss_mask]) == "4"


def test_the_date_of_a_template_is_fixed(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers").PreTrainedTokenizerFast
    clock = "\n  {% if 1 %}x{% endif %}{{ strftime_now('%d %b %Y, 100%%') }}{% macro m() %}{{ strftime_now('%H') }}"
    clock += "{% endmacro %}|{{ m() }}"
    chat = template(tmp_path / "a", clock, date=datetime(2024, 7, 6, 5))
    assert chat.writes_date
    assert chat.prompt("hi") == "\nx06 Jul 2024, 100%|05"
    # With the time of now the text is the library's.
    plain = template(tmp_path / "b", clock.replace("%H", "%Y"))
    assert plain.prompt("hi") == library.from_pretrained(tmp_path / "b").apply_chat_template([ASK], tokenize=False)
    assert not template(tmp_path / "c", CHATML).writes_date


# --- what is trained -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False, "loss": True}])
def test_marked_turns_are_context(tmp_path: Path, mark: dict[str, Any]) -> None:
    folder = make_chat_folder(tmp_path / "model")
    tokenizer = HuggingFaceTokenizer(folder)
    wrong = {"role": "assistant", "content": "WRONG"}
    right = {"role": "assistant", "content": "right", **{name: not value for name, value in mark.items() if not value}}
    talk = [ASK, {**wrong, **mark}, ASK, right]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    for granularity in ("trajectory", "turn"):
        reader = TextReader(tokenizer, ChatTemplate(folder), sample_granularity=granularity)
        (sample,) = reader.read(tmp_path / "t.jsonl", pairs=False)
        assert "WRONG" in tokenizer.decode(sample.token_ids)
        assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "right"
    for bad, message in (
        ([ASK, {**wrong, "weight": 0.5}], "message 2: weight: must be 0 or 1"),
        ([{**ASK, "train": True}, right], "message 1: train: only turns of the assistant are trained"),
        ([ASK, {**wrong, **mark}], "has no message of the assistant to train"),
    ):
        (tmp_path / "t.jsonl").write_text(json.dumps({"messages": bad}) + "\n")
        with pytest.raises(InputError, match=f"row 1: messages: {message}"):
            reader.read(tmp_path / "t.jsonl", pairs=False)


# --- ids -----------------------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_whole_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = blank_tokenizer(tmp_path / "model")
    (tmp_path / "t.jsonl").write_text('{"prompt": "two+2=", "response": "4"}\n')
    (sample,) = TextReader(tokenizer).read(tmp_path / "t.jsonl", pairs=False)
    assert sample.token_ids.tolist() == tokenizer.encode("two+2=4</s>").tolist()
    talk = [ASK, {"role": "assistant", "content": "bb"}, ASK, {"role": "assistant", "content": "dd"}]
    (tmp_path / "m.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (sample,) = TextReader(tokenizer, ChatTemplate(tmp_path / "model")).read(tmp_path / "m.jsonl", pairs=False)
    text = "user: a</s>\nassistant: bb</s>\nuser: a</s>\nassistant: dd</s>"
    assert sample.token_ids.tolist() == tokenizer.encode(text).tolist()
    assert not caplog.records


def test_what_differs_from_the_whole_text_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = blank_tokenizer(tmp_path / "model", merges=("=4", "aa"))
    (tmp_path / "t.jsonl").write_text('{"prompt": "two+2=", "response": "4"}\n' * 2)
    samples = TextReader(tokenizer).read(tmp_path / "t.jsonl", pairs=False)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "t.jsonl: tokens of the whole text would cross 2 borders" in message
    assert samples[0].token_ids.tolist() == [
        *tokenizer.encode("two+2="),
        *tokenizer.encode("</s>4")[1:],
        tokenizer.eos_id,
    ]
    # "a" would merge with what follows, so another character keeps the blank away.
    assert encode_after(tokenizer, "a", "ab") == (pytest.approx(tokenizer.encode("</s>ab")[1:]), True)
    assert np.array_equal(encode_after(tokenizer, "b", "ab").token_ids, tokenizer.encode("bab")[2:])


def test_sharegpt_is_read_as_messages(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", calls(HERMES))
    reader = TextReader(HuggingFaceTokenizer(folder), ChatTemplate(folder))
    call = {"name": "add", "arguments": {"a": 1}}
    talk = [("human", "hi"), ("function_call", json.dumps(call)), ("observation", "2"), ("gpt", "two")]
    theirs = {"system": "be brief", "conversations": [{"from": name, "value": text} for name, text in talk]}
    ours = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([theirs, {"messages": ours}]))
    first, second = reader.read(path, pairs=False)
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": None}]}]))
    with pytest.raises(InputError, match=r"row 1: conversations: .*'from' and 'value'"):
        reader.read(path, pairs=False)
    answers = {name: {"from": "gpt", "value": name} for name in ("chosen", "rejected")}
    path.write_text(json.dumps([{**theirs, **answers, "conversations": theirs["conversations"][:1]}]))
    assert len(reader.read(path, pairs=True)) == 2


def test_a_template_without_an_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for _ in range(3000) %}"
    endless = template(tmp_path / "model", loop + loop + "{{ messages[0].role }}{% endfor %}{% endfor %}")
    monkeypatch.setattr(time_limit, "SECONDS", 0.1)
    with pytest.raises(InputError, match=r"the chat template does not end: no result after 0 s"):
        endless.prompt([ASK])


transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<think/>{% endif %}{% endif %}"
)


@pytest.fixture(params=["tokenizer_config.json", "chat_template.jinja"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A byte tokenizer with its template in either place."""
    return make_chat_folder(tmp_path / "model", TEMPLATE, request.param)


def task_of(folder: Path, rows: list[object], flags: str = "--apply-chat-template") -> object:
    file = folder.parent / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --rollout-max-response-len 8 "
    common += f"--reward-function exact_match --tokenizer-type HuggingFaceTokenizer --prompt-data {file} "
    common += f"--tokenizer-model {folder}/tokenizer.json"
    config = parse_arguments([*common.split(), *flags.split(" ", 2)])
    return build_task(config.sampling, 400)


def test_tokens_are_those_of_the_library(folder: Path) -> None:
    library = transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1? <|im_end|> ä"}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {"prompt": talk, "answer": 2},
        {"prompt": talk, "tools": tools},
        {"question": "hi"},
        {"prompt_token_ids": [5]},
    ]
    for flags, settings in (
        ("--apply-chat-template", {}),
        ('--apply-chat-template --apply-chat-template-kwargs {"enable_thinking": false}', {"enable_thinking": False}),
    ):
        prompts = task_of(folder, rows, flags).prompts
        expected = [
            library.apply_chat_template(
                messages, tools=schemas, add_generation_prompt=True, return_dict=False, **settings
            )
            for messages, schemas in ((talk, None), (talk, tools), ([{"role": "user", "content": "hi"}], None))
        ]
        assert [prompt.token_ids.tolist() for prompt in prompts] == [*map(list, expected), [5]]
        assert prompts[0].record["answer"] == 2
        assert library.decode(prompts[2].token_ids).endswith("<think/>") == bool(settings)


def test_what_is_wrong_is_told_by_its_row(folder: Path) -> None:
    for prompt, message in (
        ([], "row 1: prompt: must be text or a list of messages, got list"),
        (3, "row 1: prompt: must be text or a list of messages, got int"),
        ([{"role": "user"}], "row 1: prompt: message 1: must be an object with 'role' and 'content'"),
        (["hi"], "row 1: prompt: message 1: must be"),
        ([{"role": "robot", "content": ""}], "row 1: prompt: the chat template refuses it: .*no robots"),
    ):
        with pytest.raises(InputError, match=message):
            task_of(folder, [{"prompt": prompt}])
    with pytest.raises(InputError, match="tools: is text that is not JSON"):
        task_of(folder, [{"prompt": "hi", "tools": "all"}])
    with pytest.raises(InputError, match="must be a string, got list; messages need --apply-chat-template"):
        task_of(folder, [{"prompt": [{"role": "user", "content": "hi"}]}], "--rollout-temperature 1")
    for settings in ("[]", "{", '{"tokenize": true}'):
        with pytest.raises(InputError, match="--apply-chat-template-kwargs"):
            task_of(folder, [{"prompt": "hi"}], f"--apply-chat-template --apply-chat-template-kwargs {settings}")


def test_a_tokenizer_without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(InputError, match="there is no chat template in "):
        ChatTemplate(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        ChatTemplate(folder)


def test_tools_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", THINKING)
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(InputError, match=r"row 2: prompt: tools: the chat template of .*/model does not write them"):
        task_of(folder, [{"prompt": "hi", "tools": []}, {"prompt": "hi", "tools": tools}])
