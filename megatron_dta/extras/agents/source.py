"""Rollouts from agents, for training (``--agent-command``, ``--agent-callable``) and for evaluation.

Every prompt is given to ``n_samples_per_prompt`` agents. The sessions of a prompt form a group. A session's reward is
what the agent gave (its output, its return value, a request to the gateway) or else what ``--reward-function`` gives
its last answer. Sessions that fail, or that nobody rewards, are counted and left out.

An agent that makes the same calls gets the same answers, since their random numbers follow from the session's place in
the batch and the prompts; a batch that was interrupted is sampled again from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.core.common.files import replacing
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.agents.gateway.branches import REASONS
from megatron_dta.extras.agents.gateway.records import SessionSizes, context_of, session_record, session_rollouts
from megatron_dta.extras.agents.gateway.session import Session
from megatron_dta.extras.agents.runs import AgentEnd
from megatron_dta.extras.agents.service import AgentJob, AgentService
from megatron_dta.sampling.evaluation import pass_rates
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.continuation import whole_text
from megatron_dta.sampling.prompts.load import Prompt
from megatron_dta.sampling.rewards.registry import Response
from megatron_dta.sampling.sources.batch_source import RolloutError
from megatron_dta.sampling.sources.independent import HeldOutEvaluation, PromptSource
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.training.config import TrainConfig

FOLDER = "sessions"


@dataclass(frozen=True)
class SessionResult:
    """What a session gave.

    Attributes:
        rollouts: none if it failed.
        reward: of the session; the mean of its calls' if only they have rewards.
        record: the tree for reports, if it is wanted.
    """

    group: int
    rollouts: list[Rollout]
    reward: float | None
    sizes: SessionSizes
    failure: str | None
    is_timeout: bool
    record: dict[str, Any] | None = None


class AgentSource(PromptSource):
    """``n_samples_per_prompt`` sessions of each prompt. Metrics: ``session_statistics``."""

    def __init__(
        self, engine: RolloutEngine, task: SamplingTask, config: TrainConfig, service: AgentService | None = None
    ) -> None:
        super().__init__(engine, task, config.sampling, config.optimization.seed)
        self._config = config
        self._service = service or AgentService(engine, task, config)

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        """See ``SampledSource``; one group per prompt, in order."""
        first, prompts = self._begin(rollout_batch, prompt_batch)
        folder = self._folder_of_records(rollout_batch)
        groups = [f"{first + i}:{prompt.prompt_id}" for i, prompt in enumerate(prompts)]
        work = Work(prompts, groups, self._sampling.n_samples_per_prompt, folder is not None)
        results = run_sessions(self._service, self._task, work, self._params, prompt_batch)
        self._statistics = session_statistics(results) | self._counts()
        if folder is not None and current_mesh().rank == 0:
            write_records(folder / f"batch_{rollout_batch + 1:07d}.jsonl", results)
        failed = next((result.failure for result in results if result.failure is not None), None)
        if failed is not None and self._sampling.rollout_failure == "stop":
            raise RolloutError(f"an agent failed (--rollout-failure stop): {failed}")
        rollouts = [rollout for result in results for rollout in result.rollouts]
        if not rollouts:
            raise RolloutError(f"all agents of a batch have failed; the first one: {failed}")
        return rollouts

    def _folder_of_records(self, rollout_batch: int) -> Path | None:
        """Where the trees of a batch's sessions are written; None if they are not."""
        interval, save = self._config.logging.save_rollouts_interval, self._config.checkpoint.save
        if interval is None or save is None or rollout_batch % interval:
            return None
        return Path(save) / FOLDER

    def close(self) -> None:
        """Stop the gateway."""
        self._service.close()


class AgentEvaluation(HeldOutEvaluation):
    """Mean reward of agents on held-out prompts."""

    def __init__(self, task: SamplingTask, config: TrainConfig, service: AgentService) -> None:
        super().__init__(task, config.sampling, config.optimization.seed, config.logging.eval_iters)
        self._service = service

    def evaluate(self, step: int) -> dict[str, float]:
        """``reward`` (mean over sessions, NaN if all have failed), ``response_tokens`` and ``session_statistics``."""
        groups = [f"held out {i}" for i in range(len(self._prompts))]
        work = Work(self._prompts, groups, self._samples, False)
        results = run_sessions(self._service, self._task, work, self._params, 0)
        of_prompts: list[list[float]] = [[] for _ in self._prompts]
        for result in results:
            if result.reward is not None:
                of_prompts[result.group].append(result.reward)
        rewards = [reward for prompt_rewards in of_prompts for reward in prompt_rewards]
        return {
            **pass_rates(of_prompts, self._samples),
            **session_statistics(results),
            "reward": float(np.mean(rewards)) if rewards else math.nan,
            "response_tokens": float(np.mean([result.sizes.trained_tokens for result in results])),
        }


@dataclass(frozen=True)
class Work:
    """The prompts of a batch with the names of their groups, the sessions of each, and whether trees are recorded."""

    prompts: Sequence[Prompt]
    groups: Sequence[str]
    samples: int
    records: bool


def run_sessions(
    service: AgentService, task: SamplingTask, work: Work, params: SamplingParams, iteration: int
) -> list[SessionResult]:
    """Run the agents of all prompts, a share on each replica; the results in order, the same on every rank."""
    mesh = current_mesh()
    place_of = np.repeat(np.arange(len(work.prompts)), work.samples)
    share = np.array_split(np.arange(place_of.size), mesh.data_size)[mesh.data_rank].tolist()
    jobs = [AgentJob(work.prompts[place_of[index]], work.groups[place_of[index]], index) for index in share]
    done = service.run(jobs, params, iteration)
    rank_results: list[SessionResult] = []
    if done is not None:
        rewards = _rewards(done, jobs, task)
        for index, (session, end), reward in zip(share, done, rewards, strict=True):
            result = _result(int(place_of[index]), session, end, reward, task if work.records else None)
            teacher = work.prompts[result.group].teacher
            rank_results.append(
                replace(result, rollouts=[replace(rollout, teacher=teacher) for rollout in result.rollouts])
            )
    return [result for part in mesh.gather_from_replicas(rank_results) for result in part]


def _rewards(
    done: Sequence[tuple[Session, AgentEnd]], jobs: Sequence[AgentJob], task: SamplingTask
) -> list[float | None]:
    """The reward of each session that has not failed: the agent's own or else the reward function's."""
    rewards = [session.reward if end.reward is None else end.reward for session, end in done]
    open_places = [
        i
        for i, (session, end) in enumerate(done)
        if rewards[i] is None and end.failure is None and len(session.rewards) < len(session.calls)
    ]
    if not task.has_reward_function:
        return rewards
    responses = []
    for i in open_places:
        prompt, session = jobs[i].prompt, done[i][0]
        output = session.calls[-1].output.tolist()
        responses.append(Response(prompt.prompt_id, prompt.record, session.last_text, output))
    for index, reward in zip(open_places, task.scorer.score(responses), strict=True):
        rewards[index] = reward
    return rewards


def _result(
    group: int, session: Session, end: AgentEnd, reward: float | None, task: SamplingTask | None
) -> SessionResult:
    failure, rollouts = end.failure, []
    if failure is None:
        try:
            rollouts = session_rollouts(session, reward)
        except ValueError as error:
            failure = f"{error}: the agent must give one, or --reward-function"
    if reward is None and failure is None:
        reward = float(np.mean(list(session.rewards.values())))
    record = None
    if task is not None:
        record = session_record(session, reward) | {"failure": failure}
        for call, entry in zip(session.calls, record["calls"], strict=True):
            entry["context_text"] = whole_text(task.tokenizer, context_of(call))
            entry["output_text"] = whole_text(task.tokenizer, call.output)
    return SessionResult(
        group, rollouts, None if failure else reward, SessionSizes.of(session), failure, end.is_timeout, record
    )


def session_statistics(results: Sequence[SessionResult]) -> dict[str, float]:
    """Counts of sessions, and sizes of their trees against a row for every call."""
    sizes = [result.sizes for result in results]
    stored = sum(size.stored_tokens for size in sizes)
    prompts = sum(size.tokenized_tokens + size.reused_tokens for size in sizes)
    return {
        "sessions": float(len(results)),
        "failed_sessions": float(sum(result.failure is not None for result in results)),
        "agent_timeouts": float(sum(result.is_timeout for result in results)),
        "agent_calls": float(sum(size.calls for size in sizes)),
        "abandoned_calls": float(sum(size.abandoned_calls for size in sizes)),
        "session_border_crossings": float(sum(size.crossed_borders for size in sizes)),
        "session_branches": float(np.mean([size.branches for size in sizes])) if sizes else 0.0,
        "session_tokens": float(stored),
        "session_row_tokens": float(sum(size.row_tokens for size in sizes)),
        "session_reuse": sum(size.reused_tokens for size in sizes) / prompts if prompts else 0.0,
        **{f"branches_{reason}": float(sum(size.reasons[reason] for size in sizes)) for reason in REASONS},
    }


def write_records(path: Path, results: Sequence[SessionResult]) -> None:
    """Write the trees of the sessions, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for result in results:
            if result.record is not None:
                file.write(json.dumps(result.record) + "\n")
