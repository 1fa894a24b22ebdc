"""Loads reward functions, built-in ones by name and user functions as ``FILE.py:NAME``, and checks their results.

A reward function is an ordinary Python function. The names of its parameters determine its arguments:

    (prompt, response, response_token_ids)                         one response
    (prompts, responses, response_token_ids)                       lists of all responses at once, which returns a list
    (data_source, solution_str, ground_truth, extra_info)          one response, as verl calls it
    (data_sources, solution_strs, ground_truths, extra_infos)      all at once, as verl calls it in batches

    prompt               the prompt's record: the row of the prompt file with all its fields
    response             the response as text without special tokens, such as the end of sequence
    response_token_ids   the response as it was sampled; its last token is the end-of-sequence token unless it was cut

The function returns the reward of a response as a finite number, or as a dictionary with the reward under ``reward`` or
``score``. The other numbers of the dictionary are components, whose means become metrics. Anything else (an exception,
NaN, a string) is a failure, reported in one line that names the prompt and the response and handled by
``rewards.scoring``. It is never replaced by 0, which would train the model on it.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron_dta.common.user_code import describe_error, load_from_file
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.sampling.config.sampling import RewardConfig

BUILT_IN = ("exact_match", "math_verify", "code_tests", "remote")
REMOTE_SECONDS = 60.0
# Components at or above this size (infinities, integers beyond float range) and NaN are left out of the means.
_LARGEST = 1e300
_REWARD_NAMES = ("reward", "score")
RewardFunction = Callable[..., Any]


class Response(NamedTuple):
    """A response to score: the prompt's id and record, the text, the token ids."""

    prompt_id: str
    record: Mapping[str, Any]
    text: str
    token_ids: list[int]

    @property
    def where(self) -> str:
        """The prefix of error messages about this response."""
        return f"reward function, prompt {self.prompt_id!r}, response {self.text[:80]!r}"


@dataclass(frozen=True)
class Score:
    """A reward, and the other numbers that the function returned with it."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)


def exact_match(prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
    """1 if the response, stripped of surrounding whitespace, is the text of the record's ``answer``; else 0."""
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
    function = load_from_file(f"--reward-function {spec}", path, name)
    if inspect.iscoroutinefunction(function):
        raise InputError(f"--reward-function {spec}: {name} is asynchronous; give a function that returns its value")
    _check_parameters(f"--reward-function {spec}", name, function)
    return function


def _check_parameters(where: str, name: str, function: RewardFunction) -> None:
    """Refuse a function that cannot be called as its parameters announce, before anything is sampled."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions of other languages have none
        return
    arguments = _arguments(function, Response("", {"answer": ""}, "", []))
    named = {key: value for key, value in arguments.items() if isinstance(key, str)}
    try:
        signature.bind(**named) if named else signature.bind(*arguments.values())
    except TypeError as error:
        plural = "s" if is_batched(function) else ""
        expected = ", ".join(named) or f"prompt{plural}, response{plural}, token_ids"
        raise InputError(
            f"{where}: {one_line(f'{name}{signature}')}: {error}; give it the parameters ({expected})"
        ) from None


def _with_settings(name: str, settings: RewardConfig) -> RewardFunction:
    # Imported here because most runs need none of them.
    from megatron_dta.sampling.rewards.code_reward import CodeTests
    from megatron_dta.sampling.rewards.math_reward import MathVerify
    from megatron_dta.sampling.rewards.server_reward import RemoteReward

    if name == "math_verify":
        return MathVerify()
    if name == "code_tests":
        return CodeTests(settings)
    seconds = settings.reward_timeout or REMOTE_SECONDS
    return RemoteReward(settings.reward_server_url or [], seconds)


def compute_score(function: RewardFunction, response: Response) -> Score:
    """The checked score of one response; ``InputError`` names the prompt and shows the response."""
    if is_batched(function):
        (score,) = compute_scores(function, [response])
        if isinstance(score, InputError):
            raise score
        return score
    try:
        return _checked(_call(function, _arguments(function, response)))
    except InputError as error:
        raise InputError(f"{response.where}: {error}") from error.__cause__


def compute_scores(function: RewardFunction, responses: Sequence[Response]) -> list[Score | InputError]:
    """The scores of all responses from a batched function, with an error in place of each invalid score.

    Raises:
        InputError: the call as a whole failed.
    """
    try:
        arguments = [_arguments(function, response) for response in responses]
        together = {name: [values_by_name[name] for values_by_name in arguments] for name in arguments[0]}
        values = _call(function, together)
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if not isinstance(values, list | tuple) or len(values) != len(responses):
            description = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
            raise InputError(f"must return a list of as many values, got {description}")
    except InputError as error:
        raise InputError(f"reward function, {len(responses)} responses: {error}") from error.__cause__
    scores: list[Score | InputError] = []
    for response, value in zip(responses, values, strict=True):
        try:
            scores.append(_checked(value))
        except InputError as error:
            scores.append(InputError(f"{response.where}: {error}"))
    return scores


def is_batched(function: RewardFunction) -> bool:
    """Whether the function takes lists of all responses."""
    return _ending(function) == "s" or _parameters(function)[:2] == ["prompts", "responses"]


@lru_cache(maxsize=16)  # for every response otherwise, 20 microseconds each
def _parameters(function: RewardFunction) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # functions of other languages have none
        return []


@lru_cache(maxsize=16)
def _ending(function: RewardFunction) -> str | None:
    """The ending of verl's names of parameters, "s" if it is called with all responses; None: it has other ones."""
    return next((end for end in ("", "s") if f"solution_str{end}" in _parameters(function)), None)


def _arguments(function: RewardFunction, response: Response) -> dict[str | int, Any]:
    """The arguments of the function for one response, by name (as in verl) or by position."""
    record, plural = response.record, _ending(function)
    if plural is None:
        # A copy, so that a function that edits its record does not affect the scores of later responses.
        return {0: dict(record), 1: response.text, 2: list(response.token_ids)}
    known = {
        f"data_source{plural}": record.get("data_source"),
        f"solution_str{plural}": response.text,
        f"ground_truth{plural}": _answer(record),
        f"extra_info{plural}": record.get("extra_info"),
    }
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    return {name: value for name, value in known.items() if takes_all or name in _parameters(function)}


def _call(function: RewardFunction, arguments: Mapping[str | int, Any]) -> Any:
    try:
        return function(*arguments.values()) if 0 in arguments else function(**arguments)
    except InputError as error:
        raise InputError(one_line(str(error))) from error
    except KeyboardInterrupt:
        raise
    # Not Exception alone: a function that calls sys.exit would end the run with its status, maybe 0, and time-outs of
    # some packages (math-verify's, for one) derive from BaseException.
    except BaseException as error:
        raise InputError(f"raised {describe_error(error)}") from error


def _checked(value: Any) -> Score:
    """Convert the return value of a function to a score; ``InputError`` if it is invalid."""
    if not isinstance(value, Mapping):
        return Score(_finite(value, ""))
    names = [name for name in _REWARD_NAMES if name in value]
    if len(names) != 1:
        raise InputError(f"the dictionary must have the reward as 'reward' or 'score', got {_shown_names(value)}")
    components = {
        str(name): float(number)
        for name, number in value.items()
        if name not in names and isinstance(number, numbers.Real | np.bool_) and abs(number) < _LARGEST
    }
    return Score(_finite(value[names[0]], f"'{names[0]}': "), components)


def _shown_names(value: Mapping[Any, Any]) -> str:
    return one_line(", ".join(map(repr, list(value)[:8])))[:200] or "nothing"


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, (float, numbers.Real, np.bool_)):
        raise InputError(f"{name}must return a number, got {type(value).__name__}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise InputError(f"{name}must return a finite number, got {reward}")
    return reward


def _answer(prompt: Mapping[str, Any]) -> Any:
    if prompt.get("answer") is None:
        raise InputError("the prompt's record has no field 'answer', which this reward compares against")
    return prompt["answer"]
