"""Samples independent rollouts from the current weights, for training and for evaluation on held-out prompts.

Each data-parallel rank samples a share of the prompts; the results are then gathered on all ranks. The random numbers
of a sequence are keyed by its identity, which does not depend on the rank that samples it.

A rollout batch is a function of (weights, settings, seed, batch number): the prompts come from a keyed shuffle and
every token from a keyed random number. A resumed run continues bit for bit without any saved sampler state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import numpy as np

from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.rollouts.record import Rollout, parts_of
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.evaluation import pass_rates
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, RolloutEngine, generate, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.load import Prompt, prompts_at
from megatron_dta.sampling.prompts.tokenizer import Tokenizer
from megatron_dta.sampling.rewards.scoring import counted
from megatron_dta.sampling.sources.batch_source import Evaluation, RolloutError, SampledSource
from megatron_dta.sampling.task import ResponseReader, SamplingTask


class PromptSource(SampledSource):
    """Samples ``rollout_batch_size`` prompts per batch; subclasses say how. The engine's state is its state."""

    def __init__(self, engine: RolloutEngine, task: SamplingTask, config: SamplingConfig, seed: int) -> None:
        self._engine, self._task, self._sampling, self._seed = engine, task, config, seed
        self._params = sampling_params(task.tokenizer, config, seed)
        self._statistics: dict[str, float] = {}
        self._tally, self._batch, self._before = task.scorer.tally, -1, {}

    def _begin(self, rollout_batch: int, prompt_batch: int) -> tuple[int, list[Prompt]]:
        """The position of a batch's first prompt in the stream of prompts, and the prompts; updates the engine."""
        self._tally = self._task.scorer.tally
        count = self._sampling.rollout_batch_size
        first = prompt_batch * count
        if rollout_batch != self._batch:
            self._batch, self._before = rollout_batch, self._engine.statistics()
        if not self._engine.needs_checkpoint:
            self._engine.update_weights(rollout_batch)
        return first, prompts_at(self._task.prompts, first, count, self._seed)

    def _counts(self) -> dict[str, float]:
        """The scorer's counts since ``_begin``, and ``degenerate_responses``: those that the engine has ended in this
        rollout batch because their text was degenerate, including those that are not trained."""
        gather = current_mesh().gather_from_replicas
        counts = counted(self._tally, self._task.scorer.tally, gather)
        stopped = self._engine.statistics().get("stopped_degenerate")
        if stopped is None:
            return counts
        return counts | {"degenerate_responses": sum(gather(stopped - self._before["stopped_degenerate"]))}

    def statistics(self) -> dict[str, float]:
        """Metrics of the last batch over all ranks, among them the counts of the scorer (``rewards.scoring``)."""
        return dict(self._statistics)

    def state_dict(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.load_state_dict(state)

    def timing(self) -> dict[str, float]:
        counts = self._engine.statistics()
        names = ("seconds", "waiting_seconds", "tail_seconds") if "tail_seconds" in counts else ()
        seconds = {f"sampling_{name}": counts[name] - self._before.get(name, 0.0) for name in names}
        return seconds | self._engine.timing()


class HeldOutEvaluation(Evaluation):
    """Answers the first ``max_prompts`` held-out prompts ``n_samples_per_eval_prompt`` times each."""

    def __init__(self, task: SamplingTask, config: SamplingConfig, seed: int, max_prompts: int | None) -> None:
        self._task, self._samples = task, config.n_samples_per_eval_prompt
        self._params = evaluation_params(task, config, seed)
        self._prompts = task.eval_prompts[:max_prompts]


class SamplingSource(PromptSource):
    """``n_samples_per_prompt`` rollouts of each prompt, from the engine's weights.

    Metrics: ``ended``, the fraction of responses not cut at the length cap.
    """

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        """See ``SampledSource``; one group per prompt, in order.

        ``policy_version`` is the number of the rollout batch. With servers, whose weights are updated from outside, it
        is the number of optimizer steps that led to their weights.
        """
        first, prompts = self._begin(rollout_batch, prompt_batch)
        samples = self._sampling.n_samples_per_prompt
        scored = _sample_and_score(self._engine, self._task, prompts, samples, self._params, prompt_batch)
        ended = float(np.mean([result.ended for _, result, _ in scored]))
        self._statistics = {"ended": ended, **self._counts()}
        if self._task.drops_failures:
            failed = sum(len(result.token_ids) for _, result, reward in scored if reward is None)
            self._statistics["failed_decoded_tokens"] = float(failed)
        if all(reward is None for _, _, reward in scored):
            why = self._task.scorer.last_failure or "see the other ranks"
            raise RolloutError(f"every reward of a rollout batch has failed; the last one: {why}")
        # A small prompt file may repeat within one batch, so the position in the stream names the group.
        return to_rollouts(
            [
                (prompt, result, reward, f"{first + index // samples}:{prompt.prompt_id}")
                for index, (prompt, result, reward) in enumerate(scored)
                if reward is not None
            ]
        )


class SamplingEvaluation(HeldOutEvaluation):
    """Mean reward on held-out prompts.

    Every evaluation uses the same random numbers, from a domain that training never uses, so two evaluations differ
    only by their weights. With ``eval_temperature`` 0 the answers are greedy.
    """

    def __init__(
        self, engine: RolloutEngine, task: SamplingTask, config: SamplingConfig, seed: int,
        max_prompts: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(task, config, seed, max_prompts)
        self._engine = engine

    def evaluate(self, step: int) -> dict[str, float]:
        """``reward`` and ``response_tokens`` (means over all responses), ``ended`` (fraction not cut at the length
        cap), ``pass@k`` if a prompt has several samples, and the counts of the scorer. Failed rewards are left out of
        the mean, which is NaN if all have failed.
        """
        before = self._task.scorer.tally
        scored = _sample_and_score(self._engine, self._task, self._prompts, self._samples, self._params, 0)
        rewards = [reward for _, _, reward in scored if reward is not None]
        of_prompts = [
            [reward for _, _, reward in scored[first : first + self._samples] if reward is not None]
            for first in range(0, len(scored), self._samples)
        ]
        return {
            **pass_rates(of_prompts, self._samples),
            **counted(before, self._task.scorer.tally, current_mesh().gather_from_replicas),
            "reward": float(np.mean(rewards)) if rewards else math.nan,
            "response_tokens": float(np.mean([len(result.token_ids) for _, result, _ in scored])),
            "ended": float(np.mean([result.ended for _, result, _ in scored])),
        }


def sampling_params(tokenizer: Tokenizer, config: SamplingConfig, seed: int) -> SamplingParams:
    """The sampler's settings for training rollouts."""
    return SamplingParams(
        max_response_tokens=config.rollout_max_response_len,
        eos_id=tokenizer.eos_id,
        temperature=config.temperature,
        top_p=config.rollout_top_p,
        seed=seed,
        other_eos_ids=tuple(tokenizer.ends)[1:],
        vocab_size=tokenizer.vocab_size,
    )


def evaluation_params(task: SamplingTask, config: SamplingConfig, seed: int) -> SamplingParams:
    """The sampler's settings for an evaluation."""
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return replace(sampling_params(task.tokenizer, config, seed), temperature=temperature, domain=Domain.EVALUATION)


def to_rollouts(sampled: Sequence[tuple[Prompt, GenerationResult, float, str]]) -> list[Rollout]:
    """Sampled responses to prompts, with their rewards and the names of their groups, as rollouts: prompt and response
    tokens, the response trained."""
    pieces = [tokens for prompt, result, _, _ in sampled for tokens in (prompt.token_ids, result.token_ids)]
    if not pieces:
        return []
    sizes = np.array([len(tokens) for tokens in pieces])
    loss_mask = np.repeat(np.arange(len(pieces)) % 2 == 1, sizes)
    logprobs = np.zeros(len(loss_mask), np.float32)
    logprobs[loss_mask] = np.concatenate([result.logprobs for _, result, _, _ in sampled])
    whole = Rollout(np.concatenate(pieces), loss_mask, logprobs=logprobs)
    return parts_of(whole, sizes.reshape(-1, 2).sum(1), starmap(_other_fields, sampled))


def _other_fields(prompt: Prompt, result: GenerationResult, reward: float, group_id: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"reward": reward, "group_id": group_id, "teacher": prompt.teacher}
    fields["policy_version"] = result.policy_version
    if result.token_versions is not None:
        fields["token_versions"] = np.concatenate([np.full(len(prompt.token_ids), -1), result.token_versions])
    if result.routed_experts is not None:
        fields["routed_experts"] = result.routed_experts.reshape(-1)
    return fields


def _sample_and_score(
    engine: RolloutEngine, task: SamplingTask, prompts: Sequence[Prompt], samples: int, params: SamplingParams,
    iteration: int,
) -> list[tuple[Prompt, GenerationResult, float | None]]:  # fmt: skip
    """``samples`` responses to every prompt with their rewards, prompt by prompt; the same on every rank.

    A reward is None if it has failed and its rollout must be dropped.
    """
    mesh = current_mesh()
    sequence_prompt = np.repeat(np.arange(len(prompts)), samples)
    share = np.array_split(np.arange(sequence_prompt.size), mesh.data_size)[mesh.data_rank]
    requests = [
        # The position in the batch is the identity of the sequence: every rank would draw the same numbers for it.
        GenerationRequest(
            sequence, prompts[sequence_prompt[sequence]].token_ids, params.max_response_tokens, key=sequence
        )
        for sequence in share.tolist()
    ]
    reader: ResponseReader[int] = ResponseReader(task)

    def read(results: list[GenerationResult]) -> None:
        sequences = [result.request_id for result in results]
        of_prompts = [prompts[sequence_prompt[sequence]] for sequence in sequences]
        reader.read(sequences, of_prompts, [result.token_ids for result in results])

    with phase(engine, params, iteration):
        results = generate(engine, requests, read if mesh.is_first_of_replica else None)
    scored: list[tuple[GenerationResult, float | None]] = []
    # A user's reward function may be expensive or random, so only one rank of each replica calls it.
    if mesh.is_first_of_replica:
        rewards = reader.rewards(result.request_id for result in results)
        scored = list(zip(results, rewards, strict=True))
    scored = [pair for part in mesh.gather_from_replicas(scored) for pair in part]
    return [(prompts[index], *pair) for index, pair in zip(sequence_prompt, scored, strict=True)]
