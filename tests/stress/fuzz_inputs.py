"""Mutated rollout files, command lines and rewards: each is used, or refused by one line that says where and why.

    python tests/stress/fuzz_inputs.py [--count 10000] [--seed 0] [--kinds files prompts flags rewards]

For each kind a number of inputs, each made from a good one by a few random edits; all follow from the seed.

    files     JSONL, Parquet and npz: bytes damaged, or values of fields replaced. Refused with file and reason, JSONL
              and Parquet also with the row where it is a row's fault; what is read goes on to advantages and a tree
    prompts   files of prompts, damaged likewise. Refused with file and row
    flags     random flags with random values, of sampled and of stored rollouts. Refused with a flag; what is accepted
              goes on to the checks of ``--dry-run``
    rewards   what reward functions return and raise, and what reward servers reply. Refused with the prompt

Anything else (a traceback, several lines, a message without its place) is printed and counted. Status 0 if there is
none.
"""

from __future__ import annotations

import argparse
import decimal
import fractions
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import shared  # noqa: F401 (before the helpers)
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_dta.training.arguments import build_parser, parse_arguments
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.core.objectives.advantages import group_advantages
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.sampling.prompts.load import PromptReader
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.rewards.scoring import Response, Scorer
from megatron_dta.sampling.rewards.server_reward import _reward_in
from megatron_dta.wiring.dry_run import dry_run
from megatron_dta.core.tree import build_prefix_tree
from one_reward import compute_reward
from rollouts_fuzz_cases import VALUES, damage

KINDS = ("files", "prompts", "flags", "rewards")
MOST_SHOWN = 10


class WrongError(Exception):
    """An input was answered in a way that nobody can act on."""


def told_well(message: str, *places: str) -> None:
    """One printable line that holds one of the places; all of them if they are required."""
    if not message.isprintable():
        raise WrongError(f"not one printable line: {message!r}")
    if not any(place in message for place in places):
        raise WrongError(f"does not say where: {message!r}")


class Files:
    """Mutated rollout files in a folder."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng, self._folder = rng, folder
        draw = np.random.default_rng(rng.randrange(1 << 30))
        rollouts = []
        for i in range(6):
            # Rollouts of a group begin with its prompt, the root of the tree they say they come from.
            length = int(draw.integers(4, 12))
            mask = np.arange(length) >= draw.integers(3, length)
            tokens = draw.integers(0, 40, length)
            tokens[:3] = i // 3
            rollouts.append(
                Rollout(
                    tokens,
                    mask,
                    reward=float(draw.standard_normal()),
                    logprobs=np.where(mask, -draw.random(length), 0),
                    group_id=str(i // 3),
                    trajectory_id=f"t{i}",
                    policy_version=i,
                    segment_ends=[3, length],
                    branches=[0, i],
                    leaf_weight=0.5,
                )
            )
        self._rows = []
        self._good: dict[str, bytes] = {}
        for form in (".jsonl", ".parquet"):
            path = folder / f"good{form}"
            write_rollouts(path, rollouts)
            self._good[form] = path.read_bytes()
        self._rows = [json.loads(line) for line in self._good[".jsonl"].splitlines()]
        from rollout_cases import GOOD_NPZ

        np.savez(folder / "good.npz", **GOOD_NPZ)
        self._good[".npz"] = (folder / "good.npz").read_bytes()

    def one(self) -> str:
        """Make one file and read it; "read" or "refused"."""
        rng = self._rng
        form = rng.choice((".jsonl", ".jsonl", ".jsonl", ".parquet", ".npz"))
        is_edited = form == ".jsonl" and rng.random() < 0.6
        content = self._edited_rows() if is_edited else self._good[form]
        if not is_edited:
            for _ in range(rng.randrange(1, 4)):
                content = damage(content, rng) or b"x"
        path = self._folder / f"mutated{form}"
        path.write_bytes(content)
        try:
            rollouts = load_rollouts(
                path, sample_granularity=rng.choice(("trajectory", "turn")), vocab_size=rng.choice((None, 41))
            )
        except InputError as error:
            told_well(str(error), f"{path}: ")
            if is_edited:
                told_well(str(error), ": row ")
            return "refused"
        try:
            rewards = [rollout.reward for rollout in rollouts]
            if None not in rewards:
                group_advantages(rewards, [r.group_id for r in rollouts], [r.trajectory_id for r in rollouts])
        except InputError as error:
            told_well(str(error), "rollout", "group")
            return "refused"
        build_prefix_tree([rollout.token_ids for rollout in rollouts])
        return "read"

    def _edited_rows(self) -> bytes:
        """Values of fields replaced, entries of arrays replaced, fields left out, added or renamed."""
        rng = self._rng
        rows = json.loads(json.dumps(self._rows))
        for _ in range(rng.randrange(1, 4)):
            row = rng.choice(rows)
            name, edit = rng.choice(list(row) or ["x"]), rng.randrange(12)
            if edit == 0:
                row.pop(name, None)
            elif edit == 1:
                row[name + rng.choice("s_ ")] = row.get(name)
            elif edit == 2 and isinstance(row.get(name), list) and row[name]:
                row[name][rng.randrange(len(row[name]))] = rng.choice(VALUES)
            elif edit == 3 and isinstance(row.get(name), list):
                row[name] = row[name][: rng.randrange(len(row[name]) + 1)]
            elif edit == 4 and isinstance(row.get(name), list):
                row[name] = row[name] + [rng.choice(VALUES)]
            elif edit in (6, 7):  # these may well be right
                row["reward"] = rng.choice((0, 1, rng.gauss(0, 1)))
            elif edit in (8, 9):
                row["group_id"] = row["trajectory_id"] = rng.choice("abcdef")
            elif edit == 10:
                rows.append(dict(row))
            elif edit == 11:
                row.pop(rng.choice(("leaf_weight", "policy_version", "trajectory_id", "logprobs")), None)
            else:
                row[name] = rng.choice(VALUES)
        return "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "replace")


class Prompts:
    """Mutated files of prompts, for a tokenizer of bytes."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng, self._path = rng, folder / "prompts.jsonl"
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "</s>"])}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.save(str(folder / "tokenizer.json"))
        self._tokenizer = HuggingFaceTokenizer(folder)
        self._rows: list[dict[str, Any]] = [
            {"prompt": "1 + 1 = ?", "answer": 2},
            {"prompt_token_ids": [5, 6], "id": "b"},
        ]
        self._rows.append({"question": "x\u00e4", "answer": "[1]", "tests": ["a"]})

    def one(self) -> str:
        """Make one file and read it; "read" or "refused"."""
        rng, rows = self._rng, json.loads(json.dumps(self._rows))
        if rng.random() < 0.5:
            row = rng.choice(rows)
            row[rng.choice([*row, "id", "prompt"])] = rng.choice(VALUES)
            content = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "replace")
        else:
            content = damage("".join(json.dumps(row) + "\n" for row in rows).encode(), rng) or b"x"
        self._path.write_bytes(content)
        try:
            PromptReader(self._tokenizer, rng.choice((None, 20))).read(self._path)
        except InputError as error:
            told_well(str(error), f"{self._path}: row ", f"{self._path}: no prompts")
            return "refused"
        return "read"


class Flags:
    """Mutated command lines."""

    MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
    SAMPLED = "--task arithmetic --arithmetic-max-operand 4 --rollout-max-response-len 4"

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng, self._folder = rng, folder
        rollouts = [Rollout([1, 2, i], [False, True, True], reward=float(i), logprobs=[0, -1, -1]) for i in range(4)]
        write_rollouts(folder / "flags.jsonl", rollouts)
        stored = f"--rollouts {folder}/flags.jsonl --global-batch-size 4 --vocab-size 40"
        self._starts = [f"{self.MODEL} {each}".split() for each in (self.SAMPLED, stored)]
        # Every flag but --help, with what it takes.
        self._actions = [action for action in build_parser()._actions if action.dest != "help"]
        self._flags = [action.option_strings[0] for action in self._actions]

    def one(self) -> str:
        """Make one command line and check it; "accepted" or "refused"."""
        rng = self._rng
        line = list(rng.choice(self._starts))
        for _ in range(rng.randrange(1, 5)):
            if rng.random() < 0.15:
                line.pop(rng.randrange(len(line)))
                continue
            action = rng.choice(self._actions)
            line.append(action.option_strings[0])
            if action.nargs != 0 or rng.random() < 0.03:
                line += [self._value(action) for _ in range(rng.choice((1, 1, 1, 1, 2, 0)))]
        try:
            config = parse_arguments(line)
            dry_run(config, lambda text: None)
        except InputError as error:
            # A path in it may hold a line end, which the entry point escapes.
            message = one_line(str(error))
            # A file that was typed is a place.
            if not any(message.startswith(one_line(f"{Path(value)}: ")) for value in line):
                told_well(message, "--", str(self._folder), "config.json", "objective", "memory")
            return "refused"
        except Exception as error:
            raise WrongError(f"{type(error).__name__}: {error} from {' '.join(line)}") from error
        return "accepted"

    def _value(self, action: argparse.Action) -> str:
        rng = self._rng
        if action.choices and rng.random() < 0.8:
            return str(rng.choice(list(action.choices)))
        if action.type in (int, float) and rng.random() < 0.85:
            numbers = [0, 1, 2, 3, 4, 8, 16, 100, -1, 4096, 10**6]
            return str(rng.choice(numbers if action.type is int else [*numbers, 0.5, 1e-6, -0.25, 1e300]))
        strange = ["", " ", "x", "-", "nan", "inf", "-inf", "1e400", "9" * 30, "0x10", "None", "ü\n", "http://x:1/"]
        strange += ["a|b"]
        return str(
            rng.choice([*strange, str(self._folder), f"{self._folder}/flags.jsonl", f"{self._folder}/none.py:f"])
        )


class _UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Rewards:
    """Odd results of reward functions, and odd replies of reward servers."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        del folder
        self._rng, self._where = rng, "reward server http://127.0.0.1:1/x"

    def one(self) -> str:
        """One reward; "taken" or "refused"."""
        function = self._function if self._rng.random() < 0.5 else self._reply
        outcome = self._outcome()
        name = self._rng.choice(("p7", "pü\n", ""))
        text = self._rng.choice(("answer", "\x00\n\ud800", ""))
        call = function(outcome)
        try:
            reward = compute_reward(call, name, {"answer": 1}, text, [1])
        except InputError as error:
            told_well(str(error), f"prompt {name!r}")
            if Scorer(call, drop=True).score([Response(name, {}, text, [1])]) != [None]:
                raise WrongError(f"not dropped: {outcome!r}") from error
            return "refused"
        if not isinstance(reward, float) or not np.isfinite(reward):
            raise WrongError(f"took {reward!r} for a reward")
        return "taken"

    def _function(self, outcome: Any) -> Callable[..., Any]:
        def reward(prompt: Mapping[str, Any], response: str, ids: list[int]) -> Any:
            prompt.clear()
            ids.clear()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return reward

    def _reply(self, outcome: Any) -> Callable[..., Any]:
        """A server's reply: JSON of the outcome, or damaged JSON."""
        rng = self._rng
        try:
            content = json.dumps(rng.choice(({"reward": outcome}, outcome, {"score": outcome}))).encode()
        except (TypeError, ValueError):
            content = rng.randbytes(rng.randrange(60))
        if rng.random() < 0.3:
            content = damage(content or b"x", rng)
        return lambda *_: _reward_in(content, self._where)

    def _outcome(self) -> Any:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return rng.choice(VALUES)
        if kind == 1:
            return rng.choice((rng.gauss(0, 1), rng.randrange(-9, 9), 10 ** rng.randrange(1, 500), rng.random() < 0.5))
        if kind == 2:
            odd = [
                np.float32(rng.gauss(0, 1)),
                np.float64("nan"),
                np.int64(3),
                np.bool_(True),
                np.array(1.0),
                np.zeros(2),
            ]
            odd += [
                decimal.Decimal("0.5"),
                fractions.Fraction(1, 3),
                fractions.Fraction(10**400),
                1j,
                object(),
                "1",
                b"1",
            ]
            return rng.choice([*odd, float("inf"), -0.0, 5e-324, [1], (1,), {1}, lambda: 1, Rewards, ...])
        errors: list[BaseException] = [
            ValueError("a\nb"),
            KeyError("x"),
            _UnprintableError(),
            RecursionError(),
            MemoryError(),
        ]
        errors += [
            SystemExit(0),
            SystemExit("bye"),
            StopIteration(),
            OSError(2, "no file"),
            ZeroDivisionError(),
            InputError("x"),
        ]
        return rng.choice(
            [*errors, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), Exception(), AssertionError("\x00")]
        )


def fuzz(kind: str, count: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """``count`` inputs of a kind: how they were answered, and what was wrong about the answers."""
    rng = random.Random(f"{seed} {kind}")
    source = {"files": Files, "prompts": Prompts, "flags": Flags, "rewards": Rewards}[kind](folder, rng)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        try:
            outcomes[source.one()] += 1
        except WrongError as error:
            wrong.append(f"{kind} {number}: {error}")
        except Exception as error:
            wrong.append(f"{kind} {number}: {type(error).__name__}: {error}")
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    total = 0
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            outcomes, wrong = fuzz(kind, options.count, options.seed, Path(folder))
        counted = ", ".join(f"{number} {name}" for name, number in sorted(outcomes.items()))
        print(
            f"{kind}: {options.count} inputs in {time.monotonic() - began:.0f} s: {counted}, {len(wrong)} wrong",
            flush=True,
        )
        for line in wrong[:MOST_SHOWN]:
            print(f"  {line[:400]}")
        total += len(wrong)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
