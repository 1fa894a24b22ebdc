"""Base class of environments in which the model calls tools: the model writes a call and next sees the result.

A call has a form of ``prompts.tool_calls`` (but not harmony or llama3_json), anywhere in the model's turn; several
calls in one turn are answered in order:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>   ->   <tool_response>3</tool_response>

With ``--apply-chat-template`` the template writes the answers, as messages of the role "tool", and the beginning of the
model's next turn.

Values that a form writes as text have the types that the ``tools`` of the prompt's record give; without them a value is
JSON if it can be read as that.

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
from megatron_dta.sampling.prompts.tool_calls import MARKED, ToolCall


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
        calls = MARKED.read(action, self._shown_tools()).calls
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

    def _answer(self, call: ToolCall | None) -> tuple[str, str]:
        """Name and answer of a call."""
        name = "unknown" if call is None else call.name
        try:
            if call is None:
                raise ValueError("the call is not whole, or not of the form that it begins with")
            return name, str(self.tools[name](**call.arguments))
        except Exception as error:
            calls, errors = self.last_calls
            self.last_calls = calls, errors + 1
            return name, " ".join(f"error: {type(error).__name__}: {error}".split())

    def _record_tools(self) -> list[Any] | None:
        try:
            return checked_tools(getattr(self, "record", {}).get("tools"))
        except InputError:  # a field of the user's own
            return None

    def _shown_tools(self) -> list[Any]:
        """The tools that the model has seen; before them each with any type for its parameters."""
        tools = [{"name": name, "parameters": {"properties": _of_any_type(tool)}} for name, tool in self.tools.items()]
        return tools + (self._record_tools() or [])


_TYPES = ["integer", "number", "boolean", "null", "object", "array", "string"]


def _of_any_type(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: {"type": _TYPES} for name in inspect.signature(function).parameters}
    except (TypeError, ValueError):  # some builtin functions have no signature
        return {}
