"""Repositories with one wrong line, a coding agent that repairs them, and sessions of a guessing teacher.

A repository has two files, ``main.py`` and ``lib.py``, each with a function and its docstring. One operator, constant,
name or comparison is wrong. The agent shows ``main.py`` and the first test that fails, and takes one command a turn:

    open lib.py                    shows a file
    main.py 6: return min(y, 40)   replaces a line and runs the tests in the sandbox; undone if they fail

The reward is 1 if a repair within four turns passes the three tests that are shown and five that are not.

    python examples/real_model/repairs.py --output DIR

writes ``prompts.jsonl``, ``held_out.jsonl`` (no repository is in both) and ``warmup.jsonl``: sessions of a teacher who
knows the commands and changes things at random, except that a fraction (``--care``) of the commands is right.

Programs run in bubblewrap; where it does not work nothing runs, unless ``CODE_UNCONFINED=1`` accepts resource limits
as the only barrier.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.sampling import RewardConfig
from megatron_dta.sampling.rewards.code_reward import CodeTests

MOST_TURNS, SHOWN_TESTS, TESTS = 4, 3, 8
SYSTEM = "You repair a program. Answer with one command:\nopen FILE\nFILE LINE: the corrected line"
HELPERS = [
    ("{a} times {k}, plus {b}", ["return {a} * {k} + {b}"]),
    ("{a} minus {b}, plus {k}", ["return {a} - {b} + {k}"]),
    ("the larger of {a} and {b}, times {k}", ["return max({a}, {b}) * {k}"]),
    ("the smaller of {a} and {b}, plus {k}", ["return min({a}, {b}) + {k}"]),
    ("{a} times {b}, at least {k}", ["c = {a} * {b}", "return max(c, {k})"]),
    ("{a} minus {b} if {a} is larger, else {k}", ["if {a} > {b}:", "    return {a} - {b}", "return {k}"]),
    ("{b} plus the numbers from {k} to {a}", ["for i in range({k}, {a} + 1):", "    {b} = {b} + i", "return {b}"]),
]
MAINS = [
    ("{h} of {p} and {q}, at most {c}", ["y = {h}({p}, {q})", "return min(y, {c})"]),
    ("{h} of {p} and {q}, at least {c}", ["y = {h}({p}, {q})", "return max(y, {c})"]),
    ("{h} of {q} and {p}, plus {c}", ["y = {h}({q}, {p})", "return y + {c}"]),
    ("{h} of {p} and {c}, minus {q}", ["y = {h}({p}, {c})", "return y - {q}"]),
    ("{h} of {q} and {c}, times {p}", ["y = {h}({q}, {c})", "return y * {p}"]),
    ("{h} of {p} and {q} if {p} is below {c}, else {q}", ["if {p} < {c}:", "    return {h}({p}, {q})", "return {q}"]),
]
HELPER_NAMES = ["mix", "join", "scale", "rate", "blend", "shift", "grade", "merge"]
MAIN_NAMES = ["price", "score", "total", "count", "fee", "weight", "level", "points"]
VARIABLES = ["a", "b", "d", "e", "m", "n", "p", "q", "r", "s", "t", "u", "v", "w", "x", "z"]
ALTERNATIVES = {"+": "-*", "-": "+*", "*": "+-", "<": ">", ">": "<", "min": ["max"], "max": ["min"]}


def changes(line: str, names: list[str]) -> list[str]:
    """The line with one operator, constant, name or comparison replaced, in every way."""
    changed = []
    for token in re.finditer(r"\d+|\w+|[-+*<>]", line):
        text = token[0]
        options = list(ALTERNATIVES.get(text, []))
        if text.isdigit():
            options = [str(int(text) + step) for step in (-1, 1)]
        elif text in names:
            options = [name for name in names if name != text]
        changed += [line[: token.start()] + option + line[token.end() :] for option in options]
    return changed


def body_lines(source: str) -> list[tuple[int, str, list[str]]]:
    """Number and text of each line after the docstring, and its changes."""
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if '"""' in line) + 1
    names = re.findall(r"\w+", lines[first - 2].partition("(")[2])
    return [(i + 1, lines[i], changes(lines[i], names)) for i in range(first, len(lines))]


def replaced(source: str, number: int, line: str) -> str:
    """The source with one line replaced; its indentation stays."""
    lines = source.splitlines()
    indentation = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
    return "\n".join([*lines[: number - 1], indentation + line.strip(), *lines[number:]])


def function(name: str, arguments: str, task: tuple[str, list[str]], values: dict[str, Any]) -> str:
    """A function with a docstring."""
    body = "\n".join(f"    {line}" for line in task[1])
    return f'def {name}({arguments}):\n    """{task[0]}"""\n{body}'.format(**values)


def draw_record(rng: random.Random) -> dict[str, Any]:
    """A prompt's row: the files with one wrong line, the tests, and the line that was changed."""
    helper, main = rng.choice(HELPER_NAMES), rng.choice(MAIN_NAMES)
    a, b, p, q = (*rng.sample(VARIABLES, 2), *rng.sample(VARIABLES, 2))
    values = {"a": a, "b": b, "p": p, "q": q, "h": helper, "k": rng.randint(2, 9), "c": rng.randint(2, 30)}
    files = {
        "lib.py": function(helper, f"{a}, {b}", rng.choice(HELPERS), values),
        "main.py": f"from lib import {helper}\n\n" + function(main, f"{p}, {q}", rng.choice(MAINS), values),
    }
    inputs = [[rng.randint(1, 12), rng.randint(1, 12)] for _ in range(TESTS)]
    names: dict[str, Any] = {}
    exec(program_of(files), names)
    outputs = [names[main](*arguments) for arguments in inputs]
    tests = {"fn_name": main, "inputs": inputs, "outputs": outputs}
    while True:
        name = rng.choice(list(files))
        number, right, wrong = rng.choice(body_lines(files[name]))
        if not wrong:
            continue
        broken = files | {name: replaced(files[name], number, rng.choice(wrong))}
        verdict = run_trusted(broken, tests)
        if not verdict["passed"] and verdict["failed"] < SHOWN_TESTS:
            break
        inputs[:] = [[rng.randint(1, 12), rng.randint(1, 12)] for _ in range(TESTS)]
        outputs[:] = [names[main](*arguments) for arguments in inputs]
    prompt = f"{shown('main.py', broken['main.py'])}\n{failure(tests, verdict)}"
    return {"prompt": prompt, "files": broken, "tests": tests, "repair": [name, number, right.strip()]}


def shown(name: str, source: str) -> str:
    """A file with numbers of lines."""
    return "\n".join([name, *(f"{i} {line}" for i, line in enumerate(source.splitlines(), 1))])


def failure(tests: dict[str, Any], verdict: dict[str, Any]) -> str:
    """The first failed test, as the agent prints it."""
    if "failed" not in verdict:
        return "FAILED: stopped"
    index = verdict["failed"]
    call = f"{tests['fn_name']}({', '.join(map(str, tests['inputs'][index]))})"
    return f"FAILED {call}: expected {tests['outputs'][index]}, got {verdict['output'] or 'an error'}"


def program_of(files: dict[str, str]) -> str:
    """One program in which ``main.py`` can import the other files."""
    modules = [
        f"module = sys.modules[{name.removesuffix('.py')!r}] = types.ModuleType({name!r})\nexec({text!r}, vars(module))"
        for name, text in files.items()
        if name != "main.py"
    ]
    return "\n".join(["import sys, types", *modules, files["main.py"]])


def run_trusted(files: dict[str, str], tests: dict[str, Any]) -> dict[str, Any]:
    """The judge's verdict on a program that this script wrote, without a sandbox."""
    names: dict[str, Any] = {}
    exec(program_of(files), names)
    for index, (arguments, output) in enumerate(zip(tests["inputs"], tests["outputs"], strict=True)):
        try:
            value = names[tests["fn_name"]](*arguments)
        except Exception:
            value = ""
        if value != output:
            return {"passed": False, "failed": index, "output": str(value)}
    return {"passed": True}


_START = threading.Lock()


@lru_cache
def sandbox() -> CodeTests:
    """The sandbox; ``InputError`` where there is none."""
    try:
        return CodeTests(RewardConfig(code_timeout=2.0, code_unconfined=os.environ.get("CODE_UNCONFINED") == "1"))
    except InputError as error:
        raise InputError(f"{error} (here: CODE_UNCONFINED=1)") from error


@lru_cache(maxsize=100_000)
def _verdict(program: str, tests: str) -> dict[str, Any]:
    with _START:
        programs = sandbox()
    return programs.verdict({"tests": tests}, program)


def run_sandboxed(files: dict[str, str], tests: dict[str, Any]) -> dict[str, Any]:
    """The judge's verdict on a program that a model wrote; agents that try the same share one run."""
    return _verdict(program_of(files), json.dumps(tests))


def play(
    record: dict[str, Any],
    complete: Callable[[list[dict[str, str]]], str],
    run: Callable[[dict[str, str], dict[str, Any]], dict[str, Any]] = run_sandboxed,
) -> tuple[float, list[dict[str, str]]]:
    """One session; the reward, and the messages."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": record["prompt"]}]
    files, tests = record["files"], record["tests"]
    shown_tests = tests | {name: tests[name][:SHOWN_TESTS] for name in ("inputs", "outputs")}
    for _ in range(MOST_TURNS):
        command = complete(messages)
        messages.append({"role": "assistant", "content": command})
        opened = re.fullmatch(r"open (\S+)", command.strip())
        edit = re.fullmatch(r"(\S+) (\d{1,3}): (.+)", command.strip())
        if opened and opened[1] in files:
            result = shown(opened[1], files[opened[1]])
        elif edit and edit[1] in files and 1 <= int(edit[2]) <= len(files[edit[1]].splitlines()):
            edited = files | {edit[1]: replaced(files[edit[1]], int(edit[2]), edit[3])}
            # A program whose output is shown does not get the inputs of the other tests.
            verdict = run(edited, shown_tests)
            if verdict["passed"]:
                return float(run(edited, tests)["passed"]), messages
            result = f"{failure(tests, verdict)}. Undone."
        else:
            result = "No such command."
        messages.append({"role": "user", "content": result})
    return 0.0, messages[:-1]


def agent(record: dict[str, Any], access: Any) -> float:
    """Repair the record's repository by chat completions of the gateway; returns the reward."""
    url = urlsplit(access.base_url)
    connection = HTTPConnection(url.hostname or "", url.port)
    headers = {"Authorization": f"Bearer {access.api_key}", "Content-Type": "application/json"}

    def complete(messages: list[dict[str, str]]) -> str:
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        with connection.getresponse() as reply:
            answer = json.load(reply)
        if reply.status != 200:
            raise RuntimeError(f"the gateway answered with status {reply.status}: {answer}")
        return answer["choices"][0]["message"]["content"] or ""

    try:
        return play(record, complete)[0]
    finally:
        connection.close()


def guesses(record: dict[str, Any], care: float, rng: random.Random) -> Callable[[list[dict[str, str]]], str]:
    """The teacher's commands in a session."""
    visible = ["main.py"]

    def complete(_: list[dict[str, str]]) -> str:
        name, number, line = record["repair"]
        is_right = rng.random() < care
        if "lib.py" not in visible and (name == "lib.py" if is_right else rng.random() < 0.4):
            visible.append("lib.py")
            return "open lib.py"
        while not is_right:
            name = rng.choice(visible)
            number, _, wrong = rng.choice(body_lines(record["files"][name]))
            if wrong:
                line = rng.choice(wrong).strip()
                break
        return f"{name} {number}: {line}"

    return complete


def main() -> int:
    """Write the three files."""
    parser = CommandLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--prompts", type=int, default=4096, help="repositories to train with")
    parser.add_argument("--held-out", type=int, default=256, help="repositories that are never trained")
    parser.add_argument("--warmup", type=int, default=2048, help="sessions of the teacher")
    parser.add_argument("--care", type=float, default=0.05, help="fraction of the teacher's commands that are right")
    parser.add_argument("--seed", type=int, default=1, help="seed of the repositories")
    arguments = parser.parse_args()
    print(sandbox().reach)
    rng, seen = random.Random(arguments.seed), set()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in ("held_out", "prompts", "warmup"):
        rows: list[dict[str, Any]] = []
        while len(rows) < getattr(arguments, name):
            record = draw_record(rng)
            if json.dumps(record["files"]) not in seen:
                seen.add(json.dumps(record["files"]))
                rows.append(record)
        if name == "warmup":
            sessions = [play(record, guesses(record, arguments.care, rng), run_trusted) for record in rows]
            print(f"the teacher repairs {sum(reward for reward, _ in sessions) / max(1, len(sessions)):.3f}")
            rows = [{"messages": messages} for _, messages in sessions]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (arguments.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
