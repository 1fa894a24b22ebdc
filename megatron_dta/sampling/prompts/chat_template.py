"""Renders messages with the chat template of their tokenizer (``--apply-chat-template``).

The template is in tokenizer_config.json or chat_template.jinja next to ``tokenizer.json``, and the package transformers
renders it. All messages are normalized first (``messages``). The text is encoded like any other text: special tokens
are recognised, and no token is added in front.

A template may write the date or the time. It always gets the same one, ``date``, so that a run that is continued, and
every rank of it, renders the same prompts.
"""

from __future__ import annotations

import importlib.util
import json
import string
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron_dta.common.time_limit import TimeLimitError, within_limit
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.sampling.prompts.messages import ContentForm, checked_tools, normalized, words_to_continue
from megatron_dta.sampling.prompts.tool_calls import FORMS, PROBE, AnswerForm

_CLOCK = "strftime_now"
_PROBE_TOOL = "another"
# What no tool answers.
_MARK = "7d2f80c1e94b"
_SCHEMA = {"type": "object", "properties": {"key": {"type": "string", "description": "key"}}, "required": []}
_TOOL = {"type": "function", "function": {"name": _PROBE_TOOL, "description": "do it", "parameters": _SCHEMA}}


class ChatTemplate:
    """The template of the tokenizer in ``folder``, or in the folder of a ``tokenizer.json``.

    Args:
        settings: additional variables of the template, such as enable_thinking.
        date: the date and time that the template writes, if it does (default: now).

    Attributes:
        writes_date: whether the template may write a date or time.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any] | None = None, date: datetime | None = None
    ) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise InputError("--apply-chat-template needs the package transformers: pip install transformers")
        from transformers import PreTrainedTokenizerFast

        path = Path(folder)
        path = path if path.is_dir() else path.parent
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            template = self._tokenizer.chat_template and self._tokenizer.get_chat_template()
        except Exception as error:  # the library raises many kinds
            raise InputError(
                f"--apply-chat-template: the tokenizer in {path} cannot be read: {_reason(error)}"
            ) from error
        if not template:
            raise InputError(
                f"--apply-chat-template: there is no chat template in {path} (tokenizer_config.json or "
                "chat_template.jinja); leave the flag out and write the markers into the prompts"
            )
        self._folder, self._settings, self.date = path, dict(settings or {}), date or datetime.now()
        self.writes_date = _CLOCK in template
        self._clock = _fixed_clock(self.date)

    def messages(self, prompt: Any) -> list[dict[str, Any]]:
        """A list of messages, or text as the user's message, in the form that the template reads."""
        return normalized(prompt, self._form)

    def prompt(self, messages: Any, tools: Any = None) -> str:
        """The text of a prompt up to where the model goes on: where its turn begins, or after its own last words.

        Args:
            messages: a list of messages with ``role`` and ``content``, or text, which is the user's message.
            tools: a list, or the JSON text of one.

        Raises:
            InputError: the messages are neither, or the template refuses them, or does not write tools.
        """
        messages, tools = self.messages(messages), self._written_tools(tools)
        if words_to_continue(messages):
            return self._render(messages, tools, continue_final_message=True)
        return self._render(messages, tools, add_generation_prompt=True)

    def text(self, messages: Any, tools: Any = None, generation_prompt: bool = True) -> str:
        """The text of whole messages, ending where the model's next turn begins or after the last message."""
        messages, tools = self.messages(messages), self._written_tools(tools)
        return self._render(messages, tools, add_generation_prompt=generation_prompt)

    def tool_answers(self, answers: Sequence[tuple[str, str]], tools: Any, ends: Sequence[str]) -> str:
        """The text between a turn that calls tools and the next turn of the model.

        Args:
            answers: name and answer of every call.
            tools: see ``prompt``.
            ends: the tokens one of which has ended the turn.

        Raises:
            InputError: the template refuses such messages, or leaves out the answers or the end of the turn.
        """
        calls = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": {"key": _MARK}}}
            for i, (name, _) in enumerate(answers)
        ]
        asked = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _MARK, "tool_calls": calls}]
        answered = [
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": answer}
            for call, (name, answer) in zip(calls, answers, strict=True)
        ]
        try:
            _, mark, after = self.text([*asked, *answered], tools).rpartition(_MARK)
            cuts = [after.find(end) + len(end) for end in ends if mark and end in after]
            if not cuts:
                raise InputError(f"the chat template of {self._folder} writes no end of a turn ({' or '.join(ends)})")
            if not self._writes_answers:
                raise InputError(f"the chat template of {self._folder} does not write answers of tools")
        except InputError as error:
            raise InputError(f"{error}; give the environment before and after, the text around answers") from error
        return after[min(cuts) :]

    @cached_property
    def _writes_answers(self) -> bool:
        talk = [{"role": "user", "content": "ask"}, _calling({})]
        return _MARK in self.text([*talk, {"role": "tool", "tool_call_id": "call00001", "content": _MARK}])

    def _written_tools(self, tools: Any) -> list[Any] | None:
        """``checked_tools``, if the template writes them."""
        tools = checked_tools(tools)
        if tools and not self._writes_tools:
            raise InputError(
                f"tools: the chat template of {self._folder} does not write them, so the model would not see them; "
                "describe them in a message, or use a template that writes tools"
            )
        return tools

    @cached_property
    def _writes_tools(self) -> bool:
        try:
            talk = self.messages("ask")
            return _PROBE_TOOL in self._render(talk, [_TOOL], add_generation_prompt=True)
        except TimeLimitError:
            raise
        except InputError:  # the template refuses it; what it says about the user's own tools is of more use
            return True

    @cached_property
    def tool_call_form(self) -> str:
        """The form in which the template writes tool calls, a name of ``tool_calls``; none if it is another."""
        if self.response_form is not None:
            return "response_template"
        talk = self.messages([{"role": "user", "content": "ask"}, _calling({"key": "value"})])
        written = "".join(self._tried(talk, [_TOOL], False).split())
        return next((name for name, form in FORMS.items() if any(probe in written for probe in form.probes)), "none")

    @cached_property
    def response_form(self) -> AnswerForm | None:
        """The form of answers that the tokenizer brings along, if it does."""
        template = getattr(self._tokenizer, "response_template", None)
        if template is None:
            return None
        return AnswerForm(template.get("fields") if isinstance(template, dict) else {}, settings=template)

    @cached_property
    def _form(self) -> ContentForm:
        """The contents that the template reads, by trying them."""
        words = ("probe of text", "probe of parts")

        def shows(content: Any) -> bool:
            rendered = self._tried([{"role": "user", "content": content}], None, True)
            return all(word in rendered for word in words) and "'text'" not in rendered and '"text"' not in rendered

        def takes(arguments: Any) -> bool:
            return PROBE in self._tried([{"role": "user", "content": "ask"}, _calling(arguments)], [_TOOL], False)

        reads_parts = shows([{"type": "text", "text": word} for word in words])
        json_text = not takes({"key": "value"}) and takes('{"key": "value"}')
        return ContentForm(shows(" ".join(words)) or not reads_parts, reads_parts, json_text)

    def _tried(self, messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool) -> str:
        """The text of messages, empty if the template refuses them."""
        try:
            return self._render(messages, tools, add_generation_prompt=generation_prompt)
        except TimeLimitError:
            raise
        except InputError:
            return ""

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **ends: bool) -> str:
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
            call = partial(
                self._tokenizer.apply_chat_template,
                messages,
                tools=tools,
                chat_template=self._clock + template if _CLOCK in template else template,
                tokenize=False,
                **ends,
                **self._settings,
            )
            return within_limit(call, "the chat template does not end")
        except TimeLimitError:
            raise
        except Exception as error:  # templates may raise anything
            raise InputError(f"the chat template refuses it: {_reason(error)}") from error


def _calling(arguments: Any) -> dict[str, Any]:
    """A turn that calls a tool of a name that templates do not write otherwise."""
    call = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _fixed_clock(date: datetime) -> str:
    """A macro for the top of a template that hides the library's function of the same name, which reads the clock."""
    codes = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
    values = {"%%": "\0", **{code: date.strftime(code) for code in codes}, "\0": "%"}
    replaced = "".join(f"|replace({json.dumps(code)}, {json.dumps(value)})" for code, value in values.items())
    # The library drops a line break after a block, so the template itself is unchanged.
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"


def may_write_date(folder: str | Path) -> bool:
    """Whether a template beside the tokenizer in ``folder`` may write a date or time."""
    path = Path(folder)
    path = path if path.is_dir() else path.parent
    files = [path / "tokenizer_config.json", *path.glob("*.jinja"), *path.glob("*/*.jinja")]
    return any(_CLOCK.encode() in file.read_bytes() for file in files if file.is_file())


def date_of(text: str | None) -> datetime | None:
    """The date of ``chat_template_date``."""
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"chat_template_date {text}: must be a date such as 2026-01-31 or 2026-01-31T12:00:00"
        ) from None


def chat_template_settings(text: str | None) -> dict[str, Any]:
    """The variables of ``--apply-chat-template-kwargs``, a JSON object."""
    try:
        settings = json.loads(text or "{}")
    except ValueError as error:
        raise InputError(f"--apply-chat-template-kwargs {text}: not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise InputError(f"--apply-chat-template-kwargs {text}: must be a JSON object")
    reserved = sorted(_RESERVED & set(settings))
    if reserved:
        raise InputError(f"--apply-chat-template-kwargs: {reserved[0]} is not a setting of the template")
    return settings


_RESERVED = {
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
}


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:200]
