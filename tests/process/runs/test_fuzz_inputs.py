"""The short version of ``fuzz_inputs.py``: some mutated inputs of each kind, and the errors that it has found."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import seed_all
from fuzz_inputs import KINDS, WrongError, fuzz, told_well
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.training.arguments import parse_arguments
from one_reward import compute_reward

COUNTS = {"files": 400, "prompts": 800, "flags": 150, "rewards": 2000}


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_one_that_helps(tmp_path: Path, kind: str) -> None:
    seed = int(seed_all(20261120).integers(1 << 30))
    outcomes, wrong = fuzz(kind, COUNTS[kind], seed, tmp_path)
    print(outcomes)
    assert wrong == []
    assert outcomes["refused"] > 10
    assert sum(outcomes.values()) - outcomes["refused"] > 3, "an input that is never right tests little"


def test_bad_answers_are_noticed() -> None:
    told_well("a.jsonl: row 1: x", ": row ")
    for message in ("a.jsonl: x", "a: row 1:\nx"):
        with pytest.raises(WrongError):
            told_well(message, ": row ")


def test_functions_that_leave_or_overflow() -> None:
    def leaves(*_: object) -> float:
        raise SystemExit(0)

    with pytest.raises(InputError, match=r"prompt 'p', response 'x': raised SystemExit: 0"):
        compute_reward(leaves, "p", {}, "x", [])
    with pytest.raises(InputError, match="must return a finite number, got inf"):
        compute_reward(lambda *_: 10**400, "p", {}, "x", [])


def test_messages_are_one_line() -> None:
    assert one_line("a\nb\x00  c\ud800") == "a b\\x00 c\\ud800"
    with pytest.raises(InputError) as caught:
        parse_arguments(["--a\nb"])
    assert "\n" not in str(caught.value)
