"""Base class of environments in which the model calls tools: the model writes a call and next sees the result.

A call is a JSON object between tags, or has the tags of qwen3_coder (``prompts.tool_calls``), anywhere in the model's
turn; several calls in one turn are answered in order:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>   ->   <tool_response>3</tool_response>

With ``--apply-chat-template`` the template writes the answers, as messages of the role "tool", and the beginning of the
model's next turn.

The values of qwen3_coder have the types that the ``tools`` of the prompt's record give; without them a value is JSON if
it can be read as that.

Subclasses define ``tools`` (functions by name) and ``finish``, which scores a turn without a call: this turn is the
answer and ends the episode. A call that cannot be parsed, or a tool that raises, is answered with the error, to which
the model can react. The episode continues, and the error is counted (``tool_errors`` out of ``tool_calls``).

    class Calculator(ToolEnvironment):
        tools = {"add": lambda a, b: a + b}

        def finish(self, answer):
            return float(answer.strip() == str(self.record["answer"]))
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.messages import checked_tools
from megatron_dta.sampling.prompts.tool_calls import JSON_TYPES, parse_call, schemas_of, split_calls


class ToolEnvironment(ABC):
    """An environment for ``--environment``; see the top of the module.

    Attributes:
        tools: functions by name; arguments are passed by name.
        call_reward: reward of each turn that calls tools.
        last_calls: number of calls in the last turn, and how many of them were answered with an error.
        before, after: text around the answers of a turn, for models without a chat template. If one is set, the
            template writes nothing.
        write_answers: writes names and answers of calls, given the record's tools; None: there is no template.
    """

    tools: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    call_reward: float = 0.0
    last_calls: tuple[int, int] = (0, 0)
    before: str = ""
    after: str = ""
    write_answers: Callable[[Sequence[tuple[str, str]], Any], str] | None = None

    def reset(self, record: Mapping[str, Any]) -> str | None:
        """Store the prompt's record; nothing is appended to the prompt."""
        self.record = record
        return None

    def step(self, action: str) -> tuple[str, float, bool]:
        """Answer the calls of a turn, or score the turn if it has none."""
        _, calls = split_calls(action, "hermes")
        self.last_calls = len(calls), 0
        if not calls:
            return "", self.finish(action), True
        answers = [self._answer(call) for call in calls]
        if self.write_answers is not None and not self.before + self.after:
            return self.write_answers(answers, self._record_tools()), self.call_reward, False
        written = "".join(f"<tool_response>{answer}</tool_response>" for _, answer in answers)
        return self.before + written + self.after, self.call_reward, False

    @abstractmethod
    def finish(self, answer: str) -> float:
        """Reward of the last turn."""

    def _answer(self, call: str) -> tuple[str, str]:
        """Name and answer of a call."""
        name = "unknown"
        try:
            name, arguments = parse_call(call, self._schemas())
            return name, str(self.tools[name](**arguments))
        except Exception as error:
            calls, errors = self.last_calls
            self.last_calls = calls, errors + 1
            return name, " ".join(f"error: {type(error).__name__}: {error}".split())

    def _record_tools(self) -> list[Any] | None:
        try:
            return checked_tools(getattr(self, "record", {}).get("tools"))
        except InputError:  # a field of the user's own
            return None

    def _schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the tools' parameters that the model has seen, or any type for each parameter."""
        seen = schemas_of(self._record_tools())
        return {name: seen.get(name) or _of_any_type(function) for name, function in self.tools.items()}


def _of_any_type(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: {"type": [*JSON_TYPES, "string"]} for name in inspect.signature(function).parameters}
    except (TypeError, ValueError):  # some builtin functions have no signature
        return {}
