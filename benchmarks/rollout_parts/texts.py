"""Prompts whose answers repeat text, and prompts with long answers, for ``benchmarks/real_rollouts.py``.

    python benchmarks/rollout_parts/texts.py functions|stories --output DIR [--prompts N]

functions: a function of Python's standard library is to be written again with comments. stories: a long story.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import random
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = "argparse bisect calendar cmd configparser csv difflib fnmatch fractions glob heapq json.decoder json.encoder"
MODULES += " mimetypes netrc queue sched shlex statistics string textwrap"
WHO = ("a fox", "a young sailor", "two sisters", "an old clock maker", "a lost robot", "a baker", "a king", "a teacher")
WHERE = ("on a mountain", "in a desert", "by the sea", "in a big city", "in a library", "on a train", "in the snow")
WHAT = ("a lost letter", "a hidden door", "a strange bird", "a golden key", "a broken boat", "a secret map", "a storm")


def reward(prompt: dict[str, Any], response: str, response_token_ids: list[int]) -> float:
    """The share of the prompt's lines that the response has."""
    lines = {line.strip() for line in prompt["prompt"].split("\n")[2:] if line.strip()}
    return len(lines & {line.strip() for line in response.split("\n")}) / max(1, len(lines))


def functions() -> list[str]:
    """Functions of 300 to 900 characters."""
    prompts = []
    for name in MODULES.split():
        source = inspect.getsource(import_module(name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
                if 300 < len(text) < 900:
                    prompts.append(f"Write this function again, with a comment above every line.\n\n{text}")
    return prompts


def stories() -> list[str]:
    """A prompt for each combination."""
    return [
        f"Write a long story about {who} {where} and {what}. Tell it in many chapters."
        for who, where, what in itertools.product(WHO, WHERE, WHAT)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("functions", "stories"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, help="number of prompts; default: all")
    arguments = parser.parse_args()
    texts = {"functions": functions, "stories": stories}[arguments.kind]()
    random.Random(1).shuffle(texts)
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": text}) + "\n" for text in texts[: arguments.prompts]]
    (arguments.output / "prompts.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
