"""Reads the tests of a prompt's record, in the forms of public data sets.

    tests                 a list of {"input": text, "output": text}, one run each
                          a list of {"fn_name": name, "input": [arguments], "output": value}, one call each
                          {"inputs": [...], "outputs": [...]}, with "fn_name" for calls (TACO, APPS)
    input_output          the same, as TACO and APPS name it
    public_test_cases, private_test_cases, metadata     LiveCodeBench
    answer                the same forms (verl's ``ground_truth``)

Each of them may be JSON in a text. ProgramTests that are Python code are refused.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dta.core.common.errors import InputError


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one program.

    Attributes:
        function: the function that is called; None: the program reads standard input.
        inputs: a text, or the arguments of a call, for each test.
        accepted: for each test, the texts or values that are right.
    """

    function: str | None
    inputs: list[Any]
    accepted: list[list[Any]]


def tests_of(record: Mapping[str, Any]) -> ProgramTests:
    """The tests in a record; ``InputError`` names what is wrong with them."""
    for name in ("tests", "input_output", "answer"):
        if record.get(name) not in (None, "", [], {}):
            return _tests(_data(record[name], name), name, None)
    cases = [
        case
        for name in ("public_test_cases", "private_test_cases")
        if record.get(name)
        for case in _data(record[name], name)
    ]
    if not cases:
        raise InputError("the prompt's record has no tests ('tests', 'input_output' or 'public_test_cases')")
    metadata = _data(record.get("metadata") or {}, "metadata")
    return _tests(cases, "public_test_cases", metadata.get("func_name") if isinstance(metadata, Mapping) else None)


def _data(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        # LiveCodeBench compresses its private tests: a pickled text, which is JSON.
        return json.loads(_TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(value, validate=True)))).load())
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError):
        raise InputError(
            f"the prompt's field {name!r} is not JSON; tests that are Python code are not run, write them as inputs "
            'and outputs or as calls, such as {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}'
        ) from None


class _TextUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no text")


def _tests(data: Any, field: str, function: str | None) -> ProgramTests:
    where = f"the prompt's field {field!r}"
    if isinstance(data, Mapping):
        inputs, outputs = data.get("inputs"), data.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise InputError(f"{where}: 'inputs' and 'outputs' must be lists of the same length")
        function = data.get("fn_name") or function
        pairs = list(zip(inputs, outputs, strict=True))
    elif isinstance(data, list) and all(isinstance(case, Mapping) for case in data):
        functions = {_function(case) or function for case in data}
        if len(functions) != 1:
            raise InputError(f"{where}: all entries must call the same function, or none")
        (function,) = functions
        pairs = [(case.get("input"), case.get("output")) for case in data]
    else:
        raise InputError(f"{where}: must be a list of tests, or have 'inputs' and 'outputs'")
    read = _stdio if function is None else _call
    cases = []
    for index, pair in enumerate(pairs):
        try:
            cases.append(read(*pair))
        except ValueError as error:
            raise InputError(f"{where}: entry {index}: {error}") from None
    return ProgramTests(function, [test_input for test_input, _ in cases], [accepted for _, accepted in cases])


def _function(case: Mapping[str, Any]) -> str | None:
    metadata = case.get("metadata")
    return case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)


def _stdio(stdin: Any, output: Any) -> tuple[str, list[str]]:
    texts = ["\n".join(map(str, text)) if isinstance(text, list) else text for text in (stdin, output)]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("'input' and 'output' must both be text")
    return texts[0], [texts[1]]


def _call(arguments: Any, output: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(arguments, str):  # LiveCodeBench: one argument a line, all as JSON
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        return arguments, [json.loads(output) if isinstance(output, str) else output]
    if not isinstance(arguments, list):
        raise ValueError("'input' must be a list of arguments")
    # TACO and APPS wrap most values in a list.
    return arguments, [output, *(output if isinstance(output, list) and len(output) == 1 else [])]
