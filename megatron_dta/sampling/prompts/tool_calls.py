"""Parses the model's answers by the forms in which chat templates write them: content, thoughts, calls of tools.

    hermes         <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> (Qwen3, Hermes)
    qwen3_coder    <tool_call><function=add><parameter=a>1</parameter></function></tool_call> (Qwen3.5, Nemotron 3)
    glm            <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call> (GLM-4.5 to GLM-5)
    deepseek_v3    a name and JSON between special tokens (DeepSeek V3, R1, V3.1)
    deepseek_v32   <invoke name="add"><parameter name="a" string="false">1</parameter></invoke>, each with ｜DSML｜ (V4)
    kimi_k2        an id, functions.add:0, and JSON between special tokens (Kimi K2)
    harmony        channels: analysis is thought, final is content, a message to=functions.add is a call (gpt-oss)
    llama3_json    {"name": "add", "parameters": {"a": 1}} as the whole answer (Llama 3)

Each is a response template of transformers, whose parser reads whole and unfinished answers; a tokenizer may bring its
own (``response_template`` of tokenizer_config.json). Where a form writes text and numbers alike (qwen3_coder, glm,
deepseek_v32) the schemas of the tools decide what a value is: ``1`` is the text "1" for a parameter of type string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.tokenizer import Tokenizer

# The name of a tool that no conversation has.
PROBE = "probe_name"
# What follows a whole answer for the parser: a call that it belongs to has no end.
_END = "\0"
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; ``call_id`` if the model has written one."""

    name: str
    arguments: dict[str, Any]
    call_id: str | None = None


@dataclass
class Parts:
    """What an answer consists of.

    Attributes:
        first: the content before the first call, which later parts do not change.
        calls: None for a call that cannot be parsed.
        call_text: the calls between their marks, also one without an end, which is not in ``calls``.
        has_ended: whether the last call has its end.
    """

    first: str = ""
    content: str = ""
    thought: str = ""
    calls: list[ToolCall | None] = field(default_factory=list)
    call_text: str = ""
    has_ended: bool = True


@dataclass(frozen=True, eq=False)
class AnswerForm:
    """A form of answers.

    Attributes:
        fields: those of a response template; all but content and thoughts are calls.
        probes: what a chat template of this form writes for a call of ``PROBE``, without blanks; none: the form is a
            tokenizer's own.
        settings: the rest of the response template.
    """

    fields: Mapping[str, Mapping[str, Any]]
    probes: tuple[str, ...] = ()
    settings: Any = field(default_factory=lambda: {"start_anchor": _END})

    @property
    def has_channels(self) -> bool:
        """Whether the form says what is a thought."""
        return not self.fields.keys().isdisjoint(_THOUGHTS)

    def decoder(self, tokenizer: Tokenizer) -> Callable[[np.ndarray], str]:
        """Decodes answers, with the special tokens that the form's patterns name (a tokenizer's own: with all)."""
        texts = ((token, tokenizer.special_text(token)) for token in range(tokenizer.vocab_size))
        named = str(self.fields).replace("[|]", "|")
        kept = {token: text for token, text in texts if text and (text in named or not self.probes)}

        def decode(token_ids: np.ndarray) -> str:
            at = np.flatnonzero(np.isin(token_ids, list(kept)))
            runs = np.split(token_ids, np.stack([at, at + 1], axis=1).ravel())
            return "".join(kept[int(run[0])] if i % 2 else tokenizer.decode(run) for i, run in enumerate(runs))

        return decode if kept else tokenizer.decode

    def read(self, text: str, tools: Sequence[Any] | None, is_whole: bool = True) -> Parts:
        """The parts of an answer, or, of an unfinished one, what is sure.

        Args:
            tools: those that the model has seen, whose schemas type the values that the form writes as text.
        """
        parser_class, template = self.template
        calls = [value for name, value in self.fields.items() if name not in ("content", *_THOUGHTS)]
        writes_text = any(call.get("content") == "xml-inline" for call in calls)
        has_ends = bool(self.probes) or all("close" in call for call in calls)
        parts = Parts()
        try:
            parser = parser_class(template, prefix="", tools=list(tools or ()) if writes_text else None)
            self._collect(parts, parser.feed(text + _END if is_whole and has_ends else text))
            if is_whole:
                self._collect(parts, parser.finalize()[1])
        except Exception:  # nested too deeply, schemas that are none, or a fault in a tokenizer's own template
            parts.calls.append(None)
        return parts

    def _collect(self, parts: Parts, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            name, text = event["field"], event.get("text", "")
            written = text.removesuffix(_END)
            if name == "content":
                parts.content += written
                parts.first += "" if parts.calls else written
            elif name in _THOUGHTS:
                parts.thought += written
            elif event["type"] != "region_close":
                parts.call_text += written
                parts.has_ended = written == text
            elif parts.has_ended:
                parts.calls += map(_call, event["value"] if isinstance(event["value"], list) else [event["value"]])

    @cached_property
    def template(self) -> tuple[Any, Any]:
        """The library's parser, and the template as it takes it."""
        try:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template
        except ImportError:
            raise InputError("calls of tools are parsed by transformers: pip install 'transformers>=5.15'") from None
        try:
            fields = {name: dict(value) for name, value in self.fields.items()}
            for name in fields.keys() & {"content", *_THOUGHTS}:
                fields[name]["content_args"] = {"strip": False}
            return ResponseParser, load_response_template({**self.settings, "fields": fields})
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(f"response_template of the tokenizer: {error}; leave it out of its file") from error


def _call(value: Any) -> ToolCall | None:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters", {}))
    name, call_id = function["name"].strip(), value.get("id")
    if not name or not isinstance(arguments, dict) or "" in arguments:  # see _STRAY
        return None
    try:  # no NaN and no half characters, which clients cannot read
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else None)


# Stands for what else is within a call with tags: all from there, so that broken calls are read in linear time.
_STRAY = r"|(?P<key>)(?P<value>\S.*)"


def _calls(opens: str, closes: str, tag: str | None = None) -> dict[str, Any]:
    """The field of calls between two patterns: a tag for each argument, or JSON, of which the name is a part where
    ``opens`` does not have it."""
    function = {"name": "{name}", "arguments": "{content}"} if "?P<name>" in opens else "{content}"
    call = {"function": function, **({"id": "{id}"} if "?P<id>" in opens else {})}
    body = {"content": "json", "content_args": {"allow_non_json": True}}
    if tag is not None:
        body = {"content": "xml-inline", "content_args": {"tag_pattern": tag + _STRAY}}
    return {"open_pattern": opens, "close_pattern": closes, "repeats": True, "transform": call, **body}


def _form(*probes: str, opens: str, closes: str, tag: str | None = None) -> AnswerForm:
    patterns = [None if text is None else text.replace("~", "\uff5c") for text in (opens, closes, tag)]
    return AnswerForm(
        {"content": {}, "calls": _calls(*patterns)}, tuple(probe.replace("~", "\uff5c") for probe in probes)
    )


_TO = r"to=(?:functions[.])?(?P<name>[^\s<]+)"
_CHANNEL = r"(?:<[|]start[|]>assistant\s*)?{}<[|]message[|]>"
_SPEECH = {"close_pattern": "<[|]end[|]>|<[|]return[|]>", "repeats": True}
# "~" stands for the fullwidth line in DeepSeek's tokens.
FORMS = {
    "hermes": _form(f'<tool_call>{{"name":"{PROBE}","arguments":{{', opens="<tool_call>", closes="</tool_call>"),
    "qwen3_coder": _form(
        f"<function={PROBE}>",
        opens=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        closes=r"</function>\s*</tool_call>",
        tag=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    "glm": _form(
        f"<tool_call>{PROBE}<arg_key>",
        opens=r"<tool_call>\s*(?P<name>[^\s<>{}]+)(?=\s*<)",
        closes="</tool_call>",
        tag=r"<arg_key>\s*+(?P<key>[^\s<]++(?:[^\S\n]++[^\s<]++)*+)\s*+</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    "deepseek_v3": _form(
        f"{PROBE}<~tool▁sep~>",
        f"<~tool▁sep~>{PROBE}```json",
        opens=r"(?:<~tool▁calls▁begin~>\s*)?<~tool▁call▁begin~>(?:function<~tool▁sep~>)?"
        r"\s*+(?P<name>[^\s<`]++)(?:<~tool▁sep~>|\s*+```json\n)",
        closes=r"(?:\n```\s*)?<~tool▁call▁end~>(?:\s*<~tool▁calls▁end~>)?",
    ),
    "deepseek_v32": _form(
        f'<~DSML~invokename="{PROBE}">',
        opens=r'(?:<~DSML~(?:function_calls|tool_calls)>\s*)?<~DSML~invoke name="(?P<name>[^"]+)">',
        closes=r"</~DSML~invoke>(?:\s*</~DSML~(?:function_calls|tool_calls)>)?",
        tag=r'<~DSML~parameter name="(?P<key>[^"]+)" string="(?:true|false)">(?P<value>.*?)</~DSML~parameter>',
    ),
    "kimi_k2": _form(
        "<|tool_call_argument_begin|>{",
        opens=r"(?:<[|]tool_calls_section_begin[|]>\s*)?<[|]tool_call_begin[|]>\s*"
        r"(?P<id>(?:functions[.])?(?P<name>[^\s<]+?)(?::\d+)?)\s*<[|]tool_call_argument_begin[|]>",
        closes=r"<[|]tool_call_end[|]>(?:\s*<[|]tool_calls_section_end[|]>)?",
    ),
    "harmony": AnswerForm(
        {
            # Its template takes no words beside thoughts before a call, so commentary is a thought.
            "thinking": {"open_pattern": _CHANNEL.format("<[|]channel[|]>(?:analysis|commentary)"), **_SPEECH},
            "content": {"open_pattern": _CHANNEL.format("<[|]channel[|]>final"), **_SPEECH},
            "calls": _calls(
                _CHANNEL.format(
                    rf"(?:{_TO}\s*<[|]channel[|]>\w+|<[|]channel[|]>\w+\s*{_TO})\s*(?:<[|]constrain[|]>)?\s*(?:json)?"
                ),
                "<[|]call[|]>",
            ),
        },
        (f"to=functions.{PROBE}<|channel|>", f"<|channel|>commentaryto=functions.{PROBE}"),
    ),
    "llama3_json": _form(f'{{"name":"{PROBE}","parameters":{{', opens=r"\A\s*(?=\{)", closes=_END),
}
# Those that the marks of their calls tell from the others, and from text.
_MARKED = {name: form.fields["calls"] for name, form in FORMS.items() if name not in ("harmony", "llama3_json")}
MARKED = AnswerForm({"content": {}, **_MARKED}, ("any",))
