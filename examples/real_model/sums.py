"""Addition in words for a chat model: prompts, solved problems for a short warm-up, and the reward.

    python examples/real_model/sums.py --output DIR --max-operand 60 --held-out 128 --warmup 64

writes ``DIR/prompts.jsonl``, ``DIR/held_out.jsonl`` and ``DIR/warmup.jsonl`` (conversations for ``--objective sft``).
No problem of the held-out prompts, nor its mirror b + a, is in the other files. The reward,
``examples/real_model/sums.py:reward``, is 1 where the last number of the response is the sum, else 0.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError


def reward(prompt: dict[str, Any], response: str, response_token_ids: list[int]) -> float:
    """1 where the last number of the response is the sum, else 0."""
    return float(re.findall(r"\d+", response)[-1:] == [prompt["answer"]])


def record(a: int, b: int) -> dict[str, str]:
    """A row of a prompt file."""
    return {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}


def conversation(row: dict[str, str]) -> dict[str, Any]:
    """The solved problem of a prompt's row, as a row for supervised training."""
    roles = {"user": row["prompt"], "assistant": row["answer"]}
    return {"messages": [{"role": role, "content": content} for role, content in roles.items()]}


def main() -> int:
    """Write the three files."""
    parser = CommandLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--max-operand", type=int, default=60, help="largest number that is added")
    parser.add_argument("--held-out", type=int, default=128, help="problems that are never trained")
    parser.add_argument("--warmup", type=int, default=0, help="solved problems")
    parser.add_argument("--seed", type=int, default=1, help="seed of the division and the order")
    arguments = parser.parse_args()
    pairs = [(a, b) for a in range(arguments.max_operand + 1) for b in range(a, arguments.max_operand + 1)]
    if not 0 < arguments.held_out < len(pairs):
        raise InputError(f"--held-out {arguments.held_out}: there are {len(pairs)} problems; leave some for training")
    rng = random.Random(arguments.seed)
    rng.shuffle(pairs)
    # Half of the held-out problems, too, have the larger number first.
    held_out = [record(*rng.sample(pair, 2)) for pair in pairs[: arguments.held_out]]
    trained = [record(*order) for a, b in pairs[arguments.held_out :] for order in dict.fromkeys([(a, b), (b, a)])]
    rng.shuffle(trained)
    warmup = [conversation(row) for row in rng.choices(trained, k=arguments.warmup)]
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("prompts", trained), ("held_out", held_out), ("warmup", warmup)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (arguments.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
