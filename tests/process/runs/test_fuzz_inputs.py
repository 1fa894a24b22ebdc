"""Random damage to prompt files and command lines: each is used, or refused by one line that says where."""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from chat_folder import make_chat_folder
from conftest import seed_all
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.load import PromptReader
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.arguments import build_parser, parse_arguments
from megatron_dta.wiring.dry_run import dry_run
from rollout_cases import VALUES, damage

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
NUMBERS = [0, 1, 2, 3, 4, 8, 16, 100, -1, 4096, 10**6]
STRANGE = ["", " ", "x", "-", "nan", "inf", "-inf", "1e400", "9" * 30, "0x10", "None", "ü\n", "http://x:1/", "a|b"]


def refusal(act: Callable[[], object]) -> str:
    """The message of the ``InputError``, one printable line; nothing where there is none."""
    try:
        act()
    except InputError as error:
        # A path in it may hold a line end, which the entry point escapes.
        message = one_line(str(error))
        return message if message.isprintable() else f"not printable: {message!r}"
    return ""


def test_damaged_prompts(tmp_path: Path) -> None:
    rng, path = random.Random(int(seed_all(1).integers(1 << 30))), tmp_path / "prompts.jsonl"
    tokenizer = HuggingFaceTokenizer(make_chat_folder(tmp_path / "model"))
    good = [{"prompt": "1 + 1 = ?", "answer": 2}, {"prompt_token_ids": [5, 6], "id": "b"}]
    good.append({"question": "x\u00e4", "answer": "[1]", "tests": ["a"]})
    refused = 0
    for _ in range(400):
        rows, is_edited = json.loads(json.dumps(good)), rng.random() < 0.5
        if is_edited:
            row = rng.choice(rows)
            row[rng.choice([*row, "id", "prompt"])] = rng.choice(VALUES)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8", "replace")
        path.write_bytes(content if is_edited else damage(content, rng) or b"x")
        message = refusal(lambda: PromptReader(tokenizer, rng.choice((None, 20))).read(path))
        assert not message or message.startswith((f"{path}: row ", f"{path}: no prompts"))
        refused += bool(message)
    assert 10 < refused < 397


def value_of(action: argparse.Action, rng: random.Random) -> str:
    if action.choices and rng.random() < 0.8:
        return str(rng.choice(list(action.choices)))
    if action.type in (int, float) and rng.random() < 0.85:
        return str(rng.choice(NUMBERS if action.type is int else [*NUMBERS, 0.5, 1e-6, -0.25, 1e300]))
    return rng.choice(STRANGE)


def test_random_flags(tmp_path: Path) -> None:
    """What is accepted goes on to the checks of ``--dry-run``."""
    rng, accepted = random.Random(int(seed_all(2).integers(1 << 30))), 0
    rollouts = [Rollout([1, 2, i], [False, True, True], reward=float(i), logprobs=[0, -1, -1]) for i in range(4)]
    write_rollouts(tmp_path / "flags.jsonl", rollouts)
    sampled = "--task arithmetic --arithmetic-max-operand 4 --rollout-max-response-len 4"
    stored = f"--rollouts {tmp_path}/flags.jsonl --global-batch-size 4 --vocab-size 40"
    actions = [action for action in build_parser()._actions if action.dest != "help"]
    for _ in range(150):
        line = f"{MODEL} {rng.choice((sampled, stored))}".split()
        for _ in range(rng.randrange(1, 3)):
            if rng.random() < 0.15:
                line.pop(rng.randrange(len(line)))
                continue
            action = rng.choice(actions)
            line.append(action.option_strings[0])
            if action.nargs != 0 or rng.random() < 0.03:
                line += [value_of(action, rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 0)))]
        message = refusal(lambda line=line: dry_run(parse_arguments(line), lambda text: None))
        accepted += not message
        # A file that was typed says where, too.
        is_file = any(message.startswith(one_line(f"{Path(value)}: ")) for value in line)
        names = ("--", str(tmp_path), "config.json", "objective", "memory")
        assert not message or is_file or any(name in message for name in names), message
    assert 3 < accepted < 140


def test_messages_are_one_line() -> None:
    assert one_line("a\nb\x00  c\ud800") == "a b\\x00 c\\ud800"
    with pytest.raises(InputError) as caught:
        parse_arguments(["--a\nb"])
    assert "\n" not in str(caught.value)
