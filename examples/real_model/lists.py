"""Lists to be edited and copied by a chat model: prompts, solved ones for a warm-up, and the reward.

    python examples/real_model/lists.py --output DIR --lines 20 --prompts 512 --held-out 64 --warmup 1024

writes ``DIR/prompts.jsonl``, ``DIR/held_out.jsonl`` and ``DIR/warmup.jsonl`` (conversations for ``--objective sft``).
An answer repeats most of its prompt. The reward, ``examples/real_model/lists.py:reward``, is 1 where every line is
right, else 0; the fraction of right lines is the metric ``reward/lines``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point

COLOURS = ("red", "blue", "green", "black", "white", "yellow")
THINGS = ("box", "cup", "lamp", "coat", "chair", "book", "ball", "shoe", "hat", "door", "clock", "plate")


def reward(prompt: dict[str, Any], response: str, response_token_ids: list[int]) -> dict[str, float]:
    """1 where the response is the edited list, else 0."""
    lines, right = response.strip().split("\n"), prompt["answer"].split("\n")
    return {
        "reward": float(lines == right),
        "lines": sum(a == b for a, b in zip(lines, right, strict=False)) / max(len(lines), len(right)),
    }


def record(lines: int, rng: random.Random) -> dict[str, str]:
    """A row of a prompt file: a list of coloured things, and what to change in it."""
    rows = [(rng.choice(COLOURS), rng.choice(THINGS), rng.randint(2, 99)) for _ in range(lines)]
    old, new, dropped = rng.sample(COLOURS, 3)
    edited = [(new if colour == old else colour, thing, count) for colour, thing, count in rows if colour != dropped]
    task = f"Write this list again, but leave out every {dropped} line, and write {new} instead of {old}."
    return {"prompt": f"{task}\n\n{as_text(rows)}", "answer": as_text(edited)}


def as_text(rows: list[tuple[str, str, int]]) -> str:
    """One line a row."""
    return "\n".join(f"{colour} {thing} {count}" for colour, thing, count in rows)


def main() -> int:
    """Write the three files."""
    parser = CommandLineParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--lines", type=int, default=20, help="lines of a list")
    parser.add_argument("--prompts", type=int, default=512, help="prompts to train with")
    parser.add_argument("--held-out", type=int, default=64, help="prompts that are never trained")
    parser.add_argument("--warmup", type=int, default=1024, help="solved prompts")
    parser.add_argument("--seed", type=int, default=1, help="seed of the lists")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in ("prompts", "held_out", "warmup"):
        rows: list[dict[str, Any]] = [record(arguments.lines, rng) for _ in range(getattr(arguments, name))]
        if name == "warmup":
            rows = [
                {
                    "messages": [
                        {"role": "user", "content": row["prompt"]},
                        {"role": "assistant", "content": row["answer"]},
                    ]
                }
                for row in rows
            ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (arguments.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
