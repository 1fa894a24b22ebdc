"""Mathematical answers: bare ``answer`` fields, responses that never finish, processes that die or do not start.

Most tests run against a stand-in for the package math-verify that does what its text says; the last ones against the
package itself, where it is installed.
"""

import importlib.util
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.rewards.math_reward import WALL_SECONDS, MathVerify
from megatron_dta.sampling.rewards.math_worker import answer_text
from megatron_dta.sampling.rewards.registry import load_reward_function
from megatron_dta.sampling.rewards.scoring import Response, Scorer
from one_reward import compute_reward

STAND_IN = """
import os, time

class Slow(BaseException):
    pass

def parse(text, parsing_timeout=5, raise_on_error=False):
    assert parsing_timeout is None and raise_on_error
    text = text.removeprefix("\\\\boxed{").removesuffix("}")
    if text == "spin":
        return [9 ** 9 ** 9]
    if text == "sleep":
        time.sleep(60)
    if text == "leave":
        os._exit(0)
    if text == "fill":
        return [bytearray(1 << 40)]
    if text == "raise":
        raise KeyError("two\\nlines")
    print("noise", flush=True)
    return [text] if text else []

def verify(gold, target, timeout_seconds=5, raise_on_error=False):
    assert timeout_seconds is None and raise_on_error
    return bool(target) and gold[0] == target[0]
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``import math_verify`` finds the stand-in, in the processes that are started too."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (42, "\\boxed{42}"),
        (1e-05, "\\boxed{0.00001}"),
        (" 1/2 ", "\\boxed{1/2}"),
        ("2\\sqrt{3}", "\\boxed{2\\sqrt{3}}"),
        ("(1, 2)", "\\boxed{(1, 2)}"),
        ("east", "\\boxed{east}"),
        ("$\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("48 / 2 = 24\n#### 72", "48 / 2 = 24\n#### 72"),
        ("3/4 cups", "3/4 cups"),
        ("", ""),
    ],
)
def test_a_bare_answer_is_mathematics(answer: object, text: str) -> None:
    assert answer_text(answer) == text


def test_replies(stand_in: None) -> None:
    function = MathVerify()
    for answer, response, reward in (("4", "4", 1), ("4", "5", 0), (4, "4", 1), ("4", "", 0), ("4", "\ud800", 0)):
        assert compute_reward(function, "p", {"answer": answer}, response, []) == reward
    assert function.counts == {"math_timeouts": 0, "math_errors": 0}
    assert compute_reward(function, "p", {"answer": "4"}, "raise", []) == 0
    assert function.counts == {"math_timeouts": 0, "math_errors": 1}
    for answer in ("", "raise", [4], True, float("nan"), float("inf"), {"a": 1}):
        with pytest.raises(InputError, match=r"prompt 'p'.*the prompt's answer .* cannot be compared with: "):
            compute_reward(function, "p", {"answer": answer}, "4", [])
    for record in ({}, {"answer": None}):
        with pytest.raises(InputError, match="no field 'answer'"):
            compute_reward(function, "p", record, "4", [])
    # One process has served all of them, and it is well.
    assert len(function._idle) == 1
    assert compute_reward(function, "p", {"answer": "4"}, "4", []) == 1
    function.close()


@pytest.mark.parametrize("response", ["leave", "sleep", "fill"])
def test_what_does_not_end_is_ended_and_counted(stand_in: None, response: str) -> None:
    """A process that is gone; one that waits; one that fills the memory."""
    function, began = MathVerify(cpu_seconds=1), time.monotonic()
    assert compute_reward(function, "p", {"answer": "4"}, "4", []) == 1
    with mock.patch.object(function, "_wall_seconds", 0.5 if response == "sleep" else WALL_SECONDS):
        assert compute_reward(function, "p", {"answer": "4"}, response, []) == 0
    assert function.counts == {"math_timeouts": 1, "math_errors": 0}
    assert compute_reward(function, "p", {"answer": "4"}, "4", []) == 1
    assert time.monotonic() - began < 30
    function.close()


def test_threads_have_processes_of_their_own(stand_in: None) -> None:
    """Rewards in threads come out in order, with the limits that signals would not give there: a computation in C."""
    function = MathVerify(cpu_seconds=1)
    scorer = Scorer(function, workers=3)
    texts = [str(i) for i in np.random.default_rng(5).integers(0, 3, 20)]
    texts[7] = "spin"
    rewards = scorer.score([Response("p", {"answer": "1"}, text, []) for text in texts])
    assert rewards == [float(text == "1") for text in texts]
    assert scorer.counts == {"reward_failures": 0, "math_timeouts": 1, "math_errors": 0}
    assert 1 <= len(function._idle) <= 3
    function.close()


def test_processes_that_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "math_verify.py").write_text("raise ImportError('half of it is missing')")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(InputError, match="does not start: half of it is missing"):
        compute_reward(MathVerify(), "p", {"answer": "4"}, "4", [])
    (folder / "math_verify.py").write_text("import os; os._exit(3)")
    with pytest.raises(InputError, match="does not start: it has ended"):
        compute_reward(MathVerify(), "p", {"answer": "4"}, "4", [])


def test_users_functions_may_raise_anything() -> None:
    """Time-outs of some packages are no ``Exception``; Ctrl-C stays what it is."""

    class Slow(BaseException):
        pass

    def raising(error: BaseException):
        def reward(prompt, response, ids):
            raise error

        return reward

    for error in (Slow("too slow"), SystemExit(0), GeneratorExit()):
        with pytest.raises(InputError, match=f"raised {type(error).__name__}"):
            compute_reward(raising(error), "p", {}, "4", [])
    with pytest.raises(KeyboardInterrupt):
        compute_reward(raising(KeyboardInterrupt()), "p", {}, "4", [])


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_the_package_reads_answers_as_they_are_meant() -> None:
    function = load_reward_function("math_verify")
    assert isinstance(function, MathVerify)
    for answer, right, wrong in (
        ("2\\sqrt{3}", "\\boxed{2\\sqrt{3}}", "\\boxed{2}"),
        ("(1, 2)", "so it is $(1,2)$", "\\boxed{2}"),
        ("\\frac{3\\pi}{4}", "$0.75\\pi$", "$\\pi$"),
        ("1,000", "it costs 1000.", "it costs 1."),
        (1e-05, "\\boxed{0.00001}", "\\boxed{5}"),
        ("48 / 2 = 24\n#### 72", "the answer is 72", "the answer is 24"),
    ):
        assert compute_reward(function, "p", {"answer": answer}, right, []) == 1
        assert compute_reward(function, "p", {"answer": answer}, wrong, []) == 0
    with pytest.raises(InputError, match="holds nothing that math-verify can compare"):
        compute_reward(function, "p", {"answer": ""}, "4", [])
    for response in ("", "\\frac{1}{", "$$\\boxed{", "()" * 200, "\x00", "no number"):
        assert compute_reward(function, "p", {"answer": "4"}, response, []) == 0.0
    function.close()
