"""Two threads that take turns: one at a time, in a fixed order, and an error in either ends both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_dta.model.parallel.turns import Turn, TurnRunner


@pytest.fixture
def runner():
    made = TurnRunner(torch.device("cpu"))
    yield made
    made.close()


def work(name: str, steps: int, seen: list[str], fails_at: int | None = None) -> Callable[[Turn], None]:
    def piece(turn: Turn) -> None:
        for step in range(steps):
            seen.append(f"{name}{step}")
            if step == fails_at:
                raise ValueError(f"{name} failed")
            turn.pass_on()
        turn.end_in_order()
        seen.append(f"{name}.")

    return piece


@pytest.mark.parametrize(
    ("steps", "last", "wanted"),
    [
        ((2, 2), 1, "a0 b0 a1 b1 a. b."),
        ((2, 2), 0, "a0 b0 a1 b1 b. a."),
        ((1, 3), 0, "a0 b0 b1 b2 b. a."),
        ((3, 1), 1, "a0 b0 a1 a2 a. b."),
        ((0, 2), 1, "a. b0 b1 b."),
        ((0, 0), 0, "b. a."),
    ],
)
def test_order(runner, steps, last, wanted):
    for _ in range(3):
        seen: list[str] = []
        runner.run(work("a", steps[0], seen), work("b", steps[1], seen), last=last)
        assert " ".join(seen) == wanted


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_error_ends_both(runner, name, fails_at):
    seen: list[str] = []
    pieces = [work(each, 3, seen, fails_at if each == name else None) for each in ("a", "b")]
    with pytest.raises(ValueError, match=f"{name} failed"):
        runner.run(*pieces)
    assert not {"a.", "b."} & set(seen)
    runner.run(work("c", 1, seen), work("d", 1, seen))
    assert seen[-4:] == ["c0", "d0", "c.", "d."]


def test_grad_mode_is_each_pieces_own(runner):
    found = []

    def without(turn: Turn) -> None:
        with torch.no_grad():
            turn.pass_on()
            found.append(torch.is_grad_enabled())

    def with_gradient(turn: Turn) -> None:
        found.append(torch.is_grad_enabled())
        turn.pass_on()

    runner.run(without, with_gradient)
    assert found == [True, False]
