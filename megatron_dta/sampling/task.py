"""Builds the sampling task from the flags: prompts, held-out prompts, tokenizer and reward.

The task is built before the model, whose vocabulary size may come from the tokenizer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config import RewardConfig, SamplingConfig
from megatron_dta.sampling.prompts.arithmetic import ArithmeticTask
from megatron_dta.sampling.prompts.chat_template import ChatTemplate, chat_template_settings, date_of
from megatron_dta.sampling.prompts.load import Prompt, PromptReader
from megatron_dta.sampling.prompts.tokenizer import Tokenizer, build_tokenizer
from megatron_dta.sampling.rewards.registry import Response, RewardFunction, exact_match, load_reward_function
from megatron_dta.sampling.rewards.scoring import Scorer
from megatron_dta.sampling.rewards.server_reward import RemoteReward

Key = TypeVar("Key", bound=Hashable)

REWARD_WORKERS = 8
"""Rewards of math_verify, code_tests and remote that are computed at once."""


@dataclass(frozen=True)
class SamplingTask:
    """Prompts to train on, held-out prompts (maybe none), and what turns text to tokens and responses to rewards.

    Attributes:
        notes: messages to the user about the data, one line each.
        drops_failures: whether a rollout is left out whose reward cannot be determined; otherwise the run stops.
        template: of ``--apply-chat-template``.
    """

    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    tokenizer: Tokenizer
    reward_function: RewardFunction
    reward: RewardConfig = field(default_factory=RewardConfig)
    notes: tuple[str, ...] = ()
    drops_failures: bool = False
    template: ChatTemplate | None = None

    @property
    def has_reward_function(self) -> bool:
        """Whether responses can be scored; agents and environments may give the rewards instead."""
        return self.reward_function is not _no_reward

    @cached_property
    def scorer(self) -> Scorer:
        """Calls the reward function according to the settings."""
        reward = self.reward
        # Servers have their own timeouts, and programs their own limits.
        seconds = None if isinstance(self.reward_function, RemoteReward) else reward.reward_timeout
        return Scorer(self.reward_function, self.drops_failures, REWARD_WORKERS, seconds)

    def responses(self, prompts: Iterable[Prompt], sampled: Iterable[np.ndarray]) -> list[Response]:
        """Responses with the tokens ``sampled``, one for each of ``prompts``, to be scored."""
        ids = [token_ids.tolist() for token_ids in sampled]
        texts = zip(prompts, self.tokenizer.decode_all(ids), ids, strict=True)
        return [Response(prompt.prompt_id, prompt.record, text, tokens) for prompt, text, tokens in texts]


class ResponseReader(Generic[Key]):
    """Reads responses in threads, while a device samples others: 64 in a piece, so that no thread holds up others long.
    Those that a reward function may score in threads are scored meanwhile."""

    def __init__(self, task: SamplingTask) -> None:
        self._task, self._scorer = task, task.scorer
        self._threads = ThreadPoolExecutor(4 if task.tokenizer.is_concurrent else 1, "responses")
        self._parts: list[tuple[Sequence[Key], Future[list[tuple[Response, Any]]]]] = []

    def read(self, keys: Sequence[Key], prompts: Sequence[Prompt], sampled: Sequence[np.ndarray]) -> None:
        """Begin to read responses, each of which has a key."""
        submit, pieces = self._threads.submit, (slice(begin, begin + 64) for begin in range(0, len(keys), 64))
        for piece in pieces:
            self._parts.append((keys[piece], submit(self._read, prompts[piece], sampled[piece])))

    def _read(self, prompts: Sequence[Prompt], sampled: Sequence[np.ndarray]) -> list[tuple[Response, Any]]:
        responses = self._task.responses(prompts, sampled)
        return list(zip(responses, self._scorer.begin(responses), strict=True))

    def rewards(self, keys: Iterable[Key]) -> list[float | None]:
        """The rewards of all responses in the order of their keys (``Scorer.score``); nothing is read after it."""
        self._threads.shutdown()
        parts = ((of_part, part.result()) for of_part, part in self._parts)
        pairs = {key: pair for of_part, part in parts for key, pair in zip(of_part, part, strict=True)}
        return self._scorer.score(*zip(*(pairs[key] for key in keys), strict=True)) if pairs else []


def build_task(
    sampling: SamplingConfig,
    max_position_embeddings: int,
    vocab_size: int | None = None,
    reward: RewardConfig | None = None,
    checkpoint: str | None = None,
) -> SamplingTask:
    """The task of ``--task`` or ``--prompt-data``; ``InputError`` names the flag, or the file, row and field.

    ``vocab_size`` is ``--vocab-size`` where it was given or ``checkpoint`` decides it; the tokenizer's ids must fit.
    """
    reward = reward or RewardConfig()
    max_prompt_tokens = max_position_embeddings - sampling.rollout_max_response_len
    if max_prompt_tokens < 1:
        raise InputError(
            f"--rollout-max-response-len {sampling.rollout_max_response_len} leaves no room for a prompt in "
            f"--max-position-embeddings {max_position_embeddings}; lower the former or raise the latter"
        )
    if sampling.task == "arithmetic":
        return _arithmetic(sampling, max_prompt_tokens, vocab_size)
    assert sampling.prompt_data is not None  # config.checks: one of the two is given
    kind, file = sampling.tokenizer_type or "", sampling.tokenizer_model
    tokenizer = build_tokenizer(kind, file, sampling.eos_id, vocab_size, checkpoint)
    # Without a reward function an environment or an agent gives the rewards (config.checks).
    reward_function = _no_reward
    if sampling.reward_function:
        reward_function = load_reward_function(sampling.reward_function, reward)
    template = chat_template(sampling)
    reader = PromptReader(
        tokenizer, max_prompt_tokens, template, sampling.input_key, sampling.label_key, sampling.filter_overlong_prompts
    )
    notes, drops = list[str](), sampling.rollout_failure == "drop"
    prompts = _read(sampling.prompt_data, reader, max_prompt_tokens, notes)
    eval_prompts = _read(sampling.eval_prompt_data or [], reader, max_prompt_tokens, notes)
    return SamplingTask(prompts, eval_prompts, tokenizer, reward_function, reward, tuple(notes), drops, template)


def chat_template(sampling: SamplingConfig) -> ChatTemplate | None:
    """The template of ``--apply-chat-template``; None without that flag."""
    if not sampling.apply_chat_template:
        return None
    settings = chat_template_settings(sampling.apply_chat_template_kwargs)
    return ChatTemplate(sampling.tokenizer_model or "", settings, date_of(sampling.chat_template_date))


def _read(files: list[str], reader: PromptReader, max_prompt_tokens: int, notes: list[str]) -> list[Prompt]:
    """The prompts of several files; ``notes`` gets a line for each file with prompts that are too long."""
    prompts: list[Prompt] = []
    for file in files:
        before = reader.overlong
        file_prompts = reader.read(file)
        prompts += file_prompts
        if out := reader.overlong - before:
            notes.append(
                f"{file}: left out {out} of {len(file_prompts) + out} prompts: more than {max_prompt_tokens} tokens"
            )
    return prompts


def _no_reward(prompt: Mapping[str, Any], response: str, response_token_ids: list[int]) -> float:
    raise InputError("there is no --reward-function")


def _arithmetic(sampling: SamplingConfig, max_prompt_tokens: int, vocab_size: int | None) -> SamplingTask:
    arithmetic = ArithmeticTask(sampling.arithmetic_max_operand)
    if vocab_size is not None and arithmetic.tokenizer.vocab_size > vocab_size:
        raise InputError(f"--vocab-size {vocab_size}: --task arithmetic has {arithmetic.tokenizer.vocab_size} tokens")
    if sampling.rollout_max_response_len < arithmetic.longest_answer_tokens:
        raise InputError(
            f"--rollout-max-response-len {sampling.rollout_max_response_len} cuts right answers: the longest one of "
            f"--task arithmetic has {arithmetic.longest_answer_tokens} tokens, its end included"
        )
    longest = max(len(prompt.token_ids) for prompt in arithmetic.train_prompts + arithmetic.held_out_prompts)
    if longest > max_prompt_tokens:
        raise InputError(
            f"--max-position-embeddings leaves {max_prompt_tokens} tokens for a prompt, but --task arithmetic has some "
            f"of {longest}; raise it"
        )
    return SamplingTask(arithmetic.train_prompts, arithmetic.held_out_prompts, arithmetic.tokenizer, exact_match)
