"""Prompts of messages: tokens equal those of the library's own tokenizer, and errors name the row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_folder import THINKING, make_chat_folder
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.task import build_task
from megatron_dta.training.arguments import parse_arguments

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
