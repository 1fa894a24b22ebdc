"""Parses the tool calls of a model's answer, in the forms that chat templates write.

    hermes       <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them (Qwen3, Hermes)
    qwen3_coder  <tool_call><function=add><parameter=a>1</parameter></function></tool_call>, with line breaks between
                 the tags, any number of them (Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3)
    llama3_json  {"name": "add", "parameters": {"a": 1}} as the whole answer (Llama 3)

qwen3_coder writes text and numbers alike, so the schemas of the tools decide what a value is: ``1`` is the text "1" for
a parameter of type string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
JSON_TYPES = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}
# Nemotron's template writes these values as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters, by function and name


def split_calls(text: str, form: str) -> tuple[str, list[str]]:
    """The text around the calls of an answer, and the text of each call; ``parse_call`` reads one."""
    if form == "llama3_json":
        return ("", [text]) if text.lstrip().startswith("{") else (text, [])
    return _TAGGED.sub("", text), _TAGGED.findall(text)


def parse_call(text: str, schemas: Schemas) -> tuple[str, dict[str, Any]]:
    """Name and arguments of one call, a JSON object or the tags of qwen3_coder; ``ValueError`` if it is neither."""
    match = _FUNCTION.fullmatch(text)
    if match is not None:
        name = match[1].strip()
        return name, _parameters(match[2], schemas.get(name, {}))
    call = json.loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("a call is an object with a name and arguments")
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are an object")
    return call["name"], arguments


def schemas_of(tools: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """The schemas of the parameters of tools in OpenAI's form."""
    schemas = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schemas[function["name"]] = dict(properties) if isinstance(properties, Mapping) else {}
    return schemas


def _parameters(text: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
    parameters, at = {}, 0
    while match := _PARAMETER.match(text, at):
        # The template puts the value between line breaks of its own.
        value = match[2].removeprefix("\n").removesuffix("\n")
        name, at = match[1].strip(), match.end()
        parameters[name] = _typed(value, _types(schemas.get(name)))
    if text[at:].strip():
        raise ValueError("text between the parameters of a call")
    return parameters


def _types(schema: Any) -> list[str]:
    """The JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ()) if isinstance(declared, list) else []
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types += _types(choice)
    return [*types, "null"] if schema.get("nullable") else types


def _typed(text: str, types: Sequence[str]) -> Any:
    """The value of a parameter: text, unless it is a value of another type that the parameter has."""
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    for name in types:
        if name == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        is_number = name in ("integer", "number") and isinstance(value, bool)
        if name in JSON_TYPES and isinstance(value, JSON_TYPES[name]) and not is_number:
            return text if isinstance(value, float) and math.isinf(value) else value
    return text


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
