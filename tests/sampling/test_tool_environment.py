"""Environments with tools: calls in both forms, their answers, and how many went wrong."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from chat_folder import CHATML, THINKING, make_chat_folder
from megatron_dta.sampling.environment import EnvironmentRunner
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import whole_text
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.tool_environment import ToolEnvironment

PROMPT = np.array([5])


class Calculator(ToolEnvironment):
    tools: ClassVar = {"add": lambda a, b: a + b}
    call_reward = 0.25

    def finish(self, answer):
        return float(answer.strip() == str(self.record["answer"]))


def test_tool_calls():
    environment = Calculator()
    environment.reset({"answer": 3})
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert environment.step(f"let me see {call}") == ("<tool_response>3</tool_response>", 0.25, False)
    for bad in ("no json", '{"name": "mul", "arguments": {}}', '{"name": "add", "arguments": {"a": 1}}', "[]"):
        answer, _, done = environment.step(f"<tool_call>{bad}</tool_call>")
        assert answer.startswith("<tool_response>error: ")
        assert not done
        assert environment.last_calls == (1, 1)
    assert environment.step(" 3 ") == ("", 1.0, True)
    assert environment.step("4")[1] == 0.0
    assert environment.last_calls == (0, 0)


def test_calls_in_tags_have_the_types_of_the_tools():
    class Powers(Calculator):
        tools: ClassVar = {"power": lambda base, exponent: f"{base!r}^{exponent!r}"}

    environment = Powers()
    call = "<function=power><parameter=base>2</parameter><parameter=exponent>0.5</parameter></function>"
    call = f"<tool_call>{call}</tool_call>"
    for tools in (None, "a field of the user's own"):
        environment.reset({"tools": tools})
        assert environment.step(call)[0] == "<tool_response>2^0.5</tool_response>"
    assert environment.step(call.replace("</parameter>", "", 1))[0].startswith("<tool_response>error: ")


def test_calls_and_their_errors_are_counted():
    runner = EnvironmentRunner(Calculator, AsItIs())
    states, _ = runner.reset([{"answer": 3}] * 3, [PROMPT] * 3)
    good = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    turns = [good + "<tool_call>what?</tool_call>" + good, "3", "<tool_call>[]</tool_call>"]
    runner.step(states, [np.frombuffer(turn.encode(), np.uint8).astype(np.int32) for turn in turns])
    assert runner.counts["tool_calls"] == 4
    assert runner.counts["tool_errors"] == 2
    assert runner.counts["environment_steps"] == 3
    assert runner.counts["environment_failures"] == 0
    assert "tool_calls" not in EnvironmentRunner(object, AsItIs()).counts


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
# Answers of tools in turns of the user, as Qwen3 has them, and a beginning that only the last answer has.
QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE = "\n<|im_start|>tool\n3<|im_end|>\n"
NEXT = "<|im_start|>assistant\n"


def answered(folder: Path, environment: type[ToolEnvironment], turn: str) -> str:
    """What a model sees between ``turn`` and its next one."""
    tokenizer = HuggingFaceTokenizer(folder)
    runner = EnvironmentRunner(environment, tokenizer, template=ChatTemplate(folder), drops_failures=True)
    states, _ = runner.reset([{"answer": 3}], [tokenizer.encode("<|im_start|>user\nask<|im_end|>\n" + NEXT)])
    _, (outcome,) = runner.step(states, [tokenizer.encode(turn)])
    return outcome.failure or whole_text(tokenizer, outcome.observation)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (CHATML, ONE + ONE[1:] + NEXT),
        (THINKING, ONE + ONE[1:] + NEXT),
        (QWEN, "\n<|im_start|>user" + 2 * "\n<tool_response>\n3\n</tool_response>" + "<|im_end|>\n" + NEXT),
    ],
)
def test_the_chat_template_writes_answers(template: str, written: str, tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", template)
    assert answered(folder, Calculator, f"I add{CALL}{CALL}<|im_end|>") == written
    assert "error: KeyError: 'no'" in answered(folder, Calculator, "<tool_call>no</tool_call><|im_end|>")

    class Marked(Calculator):
        before, after = "[", "]"

    assert answered(folder, Marked, CALL + "<|im_end|>") == "[<tool_response>3</tool_response>]"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("messages %}", "messages if m.role != 'tool' %}"), "does not write answers of tools"),
        (CHATML.replace("<|im_end|>", "<|over|>"), r"writes no end of a turn \(<|im_end|>\)"),
        ("{% if messages[2] %}{{ raise_exception('no tools') }}{% endif %}" + CHATML, "the chat template refuses it"),
    ],
)
def test_templates_without_answers_are_refused(template: str, message: str, tmp_path: Path) -> None:
    failure = answered(make_chat_folder(tmp_path / "model", template), Calculator, CALL + "<|im_end|>")
    assert message.replace("\\", "") in failure
    assert failure.endswith("give the environment before and after, the text around answers")


class AsItIs:
    """A tokenizer of bytes."""

    vocab_size = 256

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens):
        return bytes(np.asarray(tokens, np.uint8)).decode()

    def special_text(self, token_id):
        return None
