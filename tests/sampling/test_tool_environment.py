"""Environments with tools: calls in both forms, their answers, and how many went wrong."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from megatron_dta.sampling.environment import EnvironmentRunner
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
    def power(base, exponent, sign="+"):
        return f"{sign}{base!r}^{exponent!r}"

    class Powers(Calculator):
        tools: ClassVar = {"power": power}

    def call(**values):
        written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"so <tool_call>\n<function=power>\n{written}</function>\n</tool_call>"

    environment = Powers()
    environment.reset({})
    assert environment.step(call(base=2, exponent=3))[0] == "<tool_response>+2^3</tool_response>"
    assert environment.step(call(base=2, exponent=0.5, sign="1"))[0] == "<tool_response>12^0.5</tool_response>"
    # What the model was shown decides.
    properties = {"base": {"type": "string"}, "exponent": {"type": "integer"}}
    environment.reset({"tools": [{"function": {"name": "power", "parameters": {"properties": properties}}}]})
    assert environment.step(call(base=2, exponent=3))[0] == "<tool_response>+'2'^3</tool_response>"
    environment.reset({"tools": "a field of the user's own"})
    assert environment.step(call(base=2, exponent=3))[0] == "<tool_response>+2^3</tool_response>"
    answer, _, _ = environment.step(call(base=2, exponent=3).replace("</parameter>", "", 1))
    assert answer.startswith("<tool_response>error: ")


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


class AsItIs:
    """A tokenizer of bytes."""

    vocab_size = 256

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens):
        return bytes(np.asarray(tokens, np.uint8)).decode()

    def special_text(self, token_id):
        return None
