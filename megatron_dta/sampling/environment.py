"""Runs multi-turn environments with an engine, and defines the interface of a user's environment class.

    class Environment:
        def reset(self, record: dict) -> str | list[int] | None
        def step(self, action: str) -> tuple[str | list[int], float, bool]

``--environment`` names the class, as ``FILE.py:NAME`` (the file is executed) or as a dotted name; it is called without
arguments. ``reset`` receives the prompt's record and may return text or token ids to append to the prompt. ``step``
receives a turn of the model without special tokens and returns what the model sees next (text or token ids; context,
never trained), the reward of the turn, and whether the episode is over. A turn ends with an end of sequence.

A tree continues one episode in several ways, so every step runs on a copy, made by ``fork()`` if the class has it and
else by ``copy.deepcopy``. Several steps run at once, each in its own thread. A step that raises, takes longer than
``--reward-timeout`` or returns an invalid value fails. By ``--rollout-failure`` the run then stops, or the path
ends (``EndReason.ENVIRONMENT_FAILED``), is counted and left out of training, and the first failure is logged.
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_dta.common.futures import in_daemon_thread
from megatron_dta.common.user_code import describe_error, load_from_file
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import Continuation, encode_after, text_before
from megatron_dta.sampling.prompts.tokenizer import Tokenizer
from megatron_dta.sampling.tool_environment import ToolEnvironment

if TYPE_CHECKING:
    from megatron_dta.core.model.parallel.mesh import Mesh

logger = logging.getLogger(__name__)
STEPS_AT_ONCE = 16
STEP_SECONDS = 60.0


class Environment(Protocol):
    """The interface of the class that ``--environment`` names; see the module's docstring."""

    def reset(self, record: Mapping[str, Any]) -> str | list[int] | None:
        """Begin an episode for one prompt."""

    def step(self, action: str) -> tuple[str | list[int], float, bool]:
        """Return the observation, the reward of this turn, and whether the episode is over."""


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step; if ``failure`` is set, it is the reason and the other fields keep their defaults."""

    observation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    tool_calls: int = 0
    tool_errors: int = 0
    crosses: bool = False


class EnvironmentRunner:
    """Runs the steps of many environments.

    Args:
        factory: makes an environment.
        seconds: time limit of a step; None for ``STEP_SECONDS``.
        mesh: returns the mesh; the first rank of each replica runs the environments and sends the results to the
            others. None: there is one process.
        drops_failures: whether a failed step ends its path, which is left out; otherwise the run stops.
        template: writes answers of tools (``ToolEnvironment``).

    Attributes:
        counts: steps, failures and timeouts (which are also failures), and observations whose beginning a token of the
            whole text would cross; for environments with tools also the calls and the calls that were answered with an
            error.
    """

    def __init__(
        self,
        factory: Callable[[], Environment],
        tokenizer: Tokenizer,
        seconds: float | None = None,
        mesh: Callable[[], Mesh] | None = None,
        drops_failures: bool = False,
        template: ChatTemplate | None = None,
    ) -> None:
        self._write_answers = None if template is None else _writer(template, tokenizer)
        self._drops_failures = drops_failures
        self._factory, self._tokenizer, self._mesh = factory, tokenizer, mesh
        self._seconds = seconds or STEP_SECONDS
        names = ("environment_steps", "environment_failures", "environment_timeouts", "observation_border_crossings")
        self.counts = dict.fromkeys(names, 0)
        self._has_tools = isinstance(factory, type) and issubclass(factory, ToolEnvironment)
        if self._has_tools:
            self.counts |= {"tool_calls": 0, "tool_errors": 0}

    def reset(
        self, records: Sequence[Mapping[str, Any]], prompts: Sequence[np.ndarray]
    ) -> tuple[list[Environment | None], list[np.ndarray]]:
        """An environment per record, and the tokens it appends to the prompt; ``InputError`` if a reset fails."""

        def begin(record: Mapping[str, Any], prompt: np.ndarray) -> tuple[Environment, Continuation]:
            environment = self._factory()
            observation = environment.reset(dict(record))
            return environment, self._tokens("" if observation is None else observation, prompt)

        results: list[tuple[Environment, Continuation] | str] = []
        if self._is_first():
            results = self._run([(begin, pair) for pair in zip(records, prompts, strict=True)])
        failures = [f"prompt {i + 1}: {result}" for i, result in enumerate(results) if isinstance(result, str)]
        appended = [] if failures else [result[1] for result in results]
        failures, appended = self._share((failures, appended))
        if failures:
            raise InputError(f"--environment: reset failed: {failures[0]}")
        self.counts["observation_border_crossings"] += sum(tokens.crosses for tokens in appended)
        observations = [tokens.token_ids for tokens in appended]
        return [result[0] for result in results] if results else [None] * len(records), observations

    def step(
        self, environments: Sequence[Environment | None], actions: Sequence[np.ndarray]
    ) -> tuple[list[Environment | None], list[StepOutcome]]:
        """Take each action on a copy of its environment; returns the copies and the outcomes, in order."""

        def take(environment: Environment, action: np.ndarray) -> tuple[Environment, StepOutcome]:
            fork = environment.fork() if hasattr(environment, "fork") else copy.deepcopy(environment)
            if self._has_tools:
                fork.write_answers = self._write_answers
            outcome = self._checked(fork.step(self._tokenizer.decode(action)), action)
            if self._has_tools:
                calls, errors = fork.last_calls
                outcome = replace(outcome, tool_calls=calls, tool_errors=errors)
            return fork, outcome

        results: list[tuple[Environment, StepOutcome] | str] = []
        if self._is_first():
            results = self._run([(take, pair) for pair in zip(environments, actions, strict=True)])
        outcomes = [StepOutcome(failure=r) if isinstance(r, str) else r[1] for r in results]
        outcomes = self._share(outcomes)
        self._count(outcomes)
        forks = [None if isinstance(result, str) else result[0] for result in results] or [None] * len(outcomes)
        return forks, outcomes

    def _count(self, outcomes: Sequence[StepOutcome]) -> None:
        self.counts["environment_steps"] += len(outcomes)
        for outcome in outcomes:
            self.counts["observation_border_crossings"] += outcome.crosses
            if self._has_tools:
                self.counts["tool_calls"] += outcome.tool_calls
                self.counts["tool_errors"] += outcome.tool_errors
            if outcome.failure is not None:
                self.counts["environment_failures"] += 1
                self.counts["environment_timeouts"] += outcome.failure.startswith(_TIMEOUT)
                if not self._drops_failures:
                    raise InputError(f"--environment: a step failed: {outcome.failure}")
                # The first one only: some steps may fail in every batch, and the metrics count them.
                if self.counts["environment_failures"] == 1 and self._is_first():
                    logger.warning("--environment: a step failed (--rollout-failure drop): %s", outcome.failure)

    def _run(self, calls: Sequence[tuple[Callable, tuple]]) -> list[Any]:
        """The values of the calls, or an error line for each failed call."""
        values: list[Any] = []
        for first in range(0, len(calls), STEPS_AT_ONCE):
            group = calls[first : first + STEPS_AT_ONCE]
            running = [in_daemon_thread(partial(function, *arguments), "environment") for function, arguments in group]
            # The calls started together, so they share one deadline.
            wait(running, self._seconds)
            values += [self._value(call) for call in running]
        return values

    def _value(self, call: Future[Any]) -> Any:
        if not call.done():
            return f"{_TIMEOUT} {self._seconds:g} s"
        error = call.exception()
        return call.result() if error is None else " ".join(f"{type(error).__name__}: {error}".split())

    def _checked(self, result: Any, action: np.ndarray) -> StepOutcome:
        if not isinstance(result, tuple) or len(result) != 3:
            description = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"step must return (observation, reward, done), got {description}")
        observation, reward, done = result
        if not isinstance(reward, numbers.Real | np.bool_) or not math.isfinite(float(reward)):
            raise TypeError(f"step must return a finite reward, got {reward!r}")
        if not isinstance(done, bool | np.bool_):
            raise TypeError(f"step must return whether the episode is over as a bool, got {done!r}")
        tokens = self._tokens(observation, action)
        return StepOutcome(tokens.token_ids, float(reward), bool(done), crosses=tokens.crosses)

    def _tokens(self, observation: str | Sequence[int] | np.ndarray, before: np.ndarray) -> Continuation:
        """The tokens of an observation, which follows the tokens ``before``."""
        if isinstance(observation, str):
            context = text_before(self._tokenizer, before) if observation else ""
            return encode_after(self._tokenizer, context, observation)
        tokens = np.asarray(observation)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(f"an observation must be text or token ids, got {type(observation).__name__}")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size:
            raise ValueError(f"an observation has token ids outside of the vocabulary of {self._tokenizer.vocab_size}")
        return Continuation(tokens.astype(np.int32), False)

    def _is_first(self) -> bool:
        return self._mesh is None or self._mesh().is_first_of_replica

    def _share(self, value: Any) -> Any:
        """The first rank's ``value``, on all ranks of the replica."""
        return value if self._mesh is None else self._mesh().from_first_of_replica(value)


def _writer(template: ChatTemplate, tokenizer: Tokenizer) -> Callable[[Sequence[tuple[str, str]], Any], str]:
    """``ToolEnvironment.write_answers``: a function, so that copies of environments share template and tokenizer."""
    texts = [tokenizer.special_text(token) for token in tokenizer.ends]
    ends = [text for text in texts if text is not None]
    return lambda answers, tools: template.tool_answers(answers, tools, ends)


_TIMEOUT = "took longer than"


def load_environment(spec: str) -> Callable[[], Environment]:
    """The class that ``spec`` names, ``FILE.py:NAME`` or a dotted name; ``InputError`` if it does not exist."""
    path, separator, name = spec.rpartition(":")
    where = f"--environment {spec}"
    if separator:
        environment = load_from_file(where, path, name)
    else:
        package, _, name = spec.rpartition(".")
        if not package:
            raise InputError(f"{where}: must be FILE.py:NAME or a dotted name such as package.module.Name")
        try:
            environment = getattr(importlib.import_module(package), name, None)
        except (Exception, SystemExit) as error:
            raise InputError(f"{where}: the module does not load: {describe_error(error)}") from error
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise InputError(f"{where}: {name} must be a class with the methods reset and step")
    return environment
