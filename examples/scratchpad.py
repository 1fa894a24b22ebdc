"""A task with long prompts that a small model learns from scratch: addition in columns, shown by worked examples.

A prompt is a few worked examples and a problem; the response is the worked problem. Both numbers have as many digits.
The problem lists their columns from the right; the response has, for each column, the carry that comes in and the sum:

    47 + 85:   7+5 4+8=012 113

The teacher of the supervised warm-up is careless: in its solutions each carry is forgotten with some probability, and
what follows is worked out from that. A model that imitates it perfectly is right about as often as it; what it gains
beyond that, it has from its own samples and their rewards (1 where every column is right, else 0).

    python examples/scratchpad.py --output DIR --digits 24 --examples 2 --carelessness 0.1 --count 4096

writes ``DIR/warmup.jsonl`` (solved problems: the examples' solutions are trained, too), ``DIR/prompts.jsonl`` and
``DIR/held_out.jsonl``, for ``--tokenizer-type CharacterTokenizer`` and ``--reward-function`` with
``examples/scratchpad.py:reward``.
No problem of the held-out prompts is in the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer

SEPARATOR = " "


def reward(prompt: dict[str, Any], response: str, response_token_ids: list[int]) -> float:
    """1 where every column is right, else 0."""
    return float(response == prompt["answer"])


def problem_text(left: np.ndarray, right: np.ndarray) -> str:
    """The columns of two numbers, digits [D] from the right: ``7+5 4+8=``."""
    return SEPARATOR.join(f"{a}+{b}" for a, b in zip(left, right, strict=True)) + "="


def solution_text(left: np.ndarray, right: np.ndarray, base: int, forgets: np.ndarray | None = None) -> str:
    """Carry and two-digit sum of each column; where ``forgets`` [D] is true, the carry into it is taken for 0."""
    steps, carry = [], 0
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if forgets is not None and forgets[place]:
            carry = 0
        total = a + b + carry
        steps.append(f"{carry}{total // base}{total % base}")
        carry = total // base
    return SEPARATOR.join(steps)


def draw_prompts(
    count: int, base: int, digits: int, examples: int, random: np.random.Generator, left_out: set[str]
) -> Iterator[np.ndarray]:
    """``count`` times ``examples`` problems to show and one to solve, [examples + 1, 2, digits]; none of them is in
    ``left_out``.
    """
    while count:
        problems = random.integers(base, size=(examples + 1, 2, digits))
        if left_out.isdisjoint(problem_text(*problem) for problem in problems):
            count -= 1
            yield problems


def prompt_record(problems: np.ndarray, base: int) -> dict[str, str]:
    """A row of a prompt file: worked examples without mistakes, then the problem."""
    shown = "".join(problem_text(*p) + solution_text(*p, base) + SEPARATOR for p in problems[:-1])
    return {"prompt": shown + problem_text(*problems[-1]), "answer": solution_text(*problems[-1], base)}


def warmup_rollout(problems: np.ndarray, base: int, carelessness: float, random: np.random.Generator) -> Rollout:
    """The problems with a careless teacher's solutions; all solutions are trained, with the end of the last."""
    tokenizer = CharacterTokenizer()
    token_ids, loss_mask = [], []
    for number, problem in enumerate(problems, start=1):
        forgets = random.random(problem.shape[1]) < carelessness
        text = problem_text(*problem)
        solution = tokenizer.encode(solution_text(*problem, base, forgets)).tolist()
        is_last = number == len(problems)
        end = [tokenizer.eos_id] if is_last else tokenizer.encode(SEPARATOR).tolist()
        token_ids += tokenizer.encode(text).tolist() + solution + end
        loss_mask += [False] * len(text) + [True] * len(solution) + [is_last]
    return Rollout(token_ids=np.array(token_ids, dtype=np.int32), loss_mask=np.array(loss_mask))


def main() -> int:
    """Write the files of the task."""
    parser = CommandLineParser(main.__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--base", type=int, default=10, help="of the numbers (default: %(default)s)")
    parser.add_argument("--digits", type=int, default=24, help="of both numbers (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=2, help="worked examples of a prompt (default: %(default)s)")
    parser.add_argument(
        "--carelessness", type=float, default=0.1, help="how often the teacher forgets a carry (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, default=4096, help="solved problems to write (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4096, help="prompts to write (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=128, help="prompts to hold out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    arguments = parser.parse_args()
    if not 2 <= arguments.base <= 10:
        raise InputError(f"--base {arguments.base}: must be 2 to 10")
    if not 0 <= arguments.carelessness <= 1:
        raise InputError(f"--carelessness {arguments.carelessness}: must be 0 to 1")
    for flag, value, least in (
        # With fewer there are not enough problems to hold some out.
        ("--digits", arguments.digits, 6),
        ("--examples", arguments.examples, 0),
        ("--count", arguments.count, 1),
        ("--prompts", arguments.prompts, 1),
        ("--held-out", arguments.held_out, 1),
    ):
        if value < least:
            raise InputError(f"{flag} {value}: must be at least {least}")
    base, random = arguments.base, np.random.default_rng(arguments.seed)
    shape = base, arguments.digits, arguments.examples
    arguments.output.mkdir(parents=True, exist_ok=True)
    held_out = list(draw_prompts(arguments.held_out, *shape, random, set()))
    problems = {problem_text(*prompt[-1]) for prompt in held_out}
    prompts = list(draw_prompts(arguments.prompts, *shape, random, problems))
    solved = draw_prompts(arguments.count, *shape, random, problems)
    write_rollouts(
        arguments.output / "warmup.jsonl",
        [warmup_rollout(prompt, base, arguments.carelessness, random) for prompt in solved],
    )
    for name, drawn in (("prompts", prompts), ("held_out", held_out)):
        write_lines(arguments.output / f"{name}.jsonl", [prompt_record(prompt, base) for prompt in drawn])
    record = prompt_record(held_out[0], base)
    print(
        f"{arguments.output}: prompts of {len(record['prompt'])} tokens, right responses of {len(record['answer']) + 1}"
    )
    return 0


def write_lines(path: Path, records: list[dict[str, str]]) -> None:
    """Write a JSONL file under another name, then rename it."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    os.replace(unfinished, path)


if __name__ == "__main__":
    run_entry_point(main)
