"""Reward functions: built-in ones by name, and the user's own by ``--reward-function FILE.py:NAME``.

A reward function is an ordinary Python function

    def reward(prompt: dict, response: str, response_token_ids: list[int]) -> float

    prompt               the prompt's record: the row of the prompt file with all its fields
    response             the response as text, special tokens (the end of sequence among them) left out
    response_token_ids   the response as it was sampled; its last token is the end-of-sequence token unless it was cut

It is called once for each response, in the order of the batch, and must return a finite number. Anything else (an
exception, NaN, a string) is a failure, with one line that names the prompt and the response; ``sampling.scoring`` says
what becomes of it. A reward that is silently replaced by 0 would train the model on it.
"""

from __future__ import annotations

import importlib.util
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.config.reward import RewardConfig
from megatron_dta.errors import InputError, one_line

BUILT_IN = ("exact_match", "math_verify", "code_tests", "remote")
REMOTE_SECONDS = 60.0
RewardFunction = Callable[[Mapping[str, Any], str, list[int]], float]


def exact_match(prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
    """1 where the response, without blanks around it, is the text of the record's ``answer``; else 0."""
    return float(response.strip() == str(_answer(prompt)).strip())


def load_reward_function(spec: str, settings: RewardConfig | None = None) -> RewardFunction:
    """The function that ``spec`` names: a built-in one or ``FILE.py:NAME`` (the file is executed)."""
    if spec == "exact_match":
        return exact_match
    if spec == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise InputError("--reward-function math_verify needs the package math-verify: pip install math-verify")
    if spec in ("math_verify", "code_tests", "remote"):
        return _with_settings(spec, settings or RewardConfig())
    path, separator, name = spec.rpartition(":")
    if not separator or not path.endswith(".py") or not name.isidentifier():
        raise InputError(f"--reward-function {spec}: must be {', '.join(BUILT_IN)} or FILE.py:NAME")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"--reward-function {spec}: no such file: {path}")
    module_spec = importlib.util.spec_from_file_location(f"megatron_dta_user_reward_{file.stem}", file)
    assert module_spec is not None  # the suffix is .py
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--reward-function {spec}: the file does not run: {_describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward-function {spec}: {path} has no function {name}")
    return function


def _with_settings(name: str, settings: RewardConfig) -> RewardFunction:
    # Not on top: most runs need none of them.
    from megatron_dta.sampling.code_reward import CodeTests
    from megatron_dta.sampling.math_reward import MathVerify
    from megatron_dta.sampling.remote_reward import RemoteReward

    if name == "math_verify":
        return MathVerify()
    if name == "code_tests":
        return CodeTests(settings)
    seconds = settings.reward_timeout_seconds or REMOTE_SECONDS
    return RemoteReward(settings.reward_server_url or [], seconds, settings.reward_attempts)


def compute_reward(
    function: RewardFunction, prompt_id: str, record: Mapping[str, Any], response: str, response_token_ids: list[int]
) -> float:
    """The function's value for one response, checked; ``InputError`` names the prompt and shows the response."""
    where = f"reward function, prompt {prompt_id!r}, response {response[:80]!r}"
    try:
        # A copy, so that a function that edits its record cannot change what the next response is judged by.
        value = function(dict(record), response, list(response_token_ids))
    except InputError as error:
        raise InputError(f"{where}: {one_line(str(error))}") from error
    except KeyboardInterrupt:
        raise
    # Not Exception alone: a function that calls sys.exit would end the run with its status, maybe 0, and time-outs of
    # some packages (math-verify's, for one) derive from BaseException.
    except BaseException as error:
        raise InputError(f"{where}: raised {_describe(error)}") from error
    if not isinstance(value, numbers.Real | np.bool_):
        raise InputError(f"{where}: must return a number, got {type(value).__name__}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InputError(f"{where}: must return a finite number, got {reward}")
    return reward


def _answer(prompt: Mapping[str, Any]) -> Any:
    if "answer" not in prompt:
        raise InputError("the prompt's record has no field 'answer', which this reward compares against")
    return prompt["answer"]


def _describe(error: BaseException) -> str:
    """Type, message and the innermost place of the error, on one line."""
    try:
        message = str(error)
    except Exception:  # the user's own class may do anything
        message = "no message"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return one_line(f"{type(error).__name__}: {message}{place}")
