"""Samples rollouts as trees, or with an environment, for training (``--rollout-method``, ``--environment``).

This is ``sources.independent`` with trees in place of responses: each data-parallel replica samples a share of the
queries, all trees are gathered on all ranks, and a rollout batch is a function of (weights, settings, seed, batch
number). The rollouts carry the tree, so subgroup advantages and leaf weights need no further data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.rollouts.paths import decoded_tokens
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.config.run import SampledRun
from megatron_dta.sampling.environment import EnvironmentRunner, load_environment
from megatron_dta.sampling.evaluation import pass_rates
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.load import Prompt
from megatron_dta.sampling.sources.batch_source import RolloutError
from megatron_dta.sampling.sources.independent import HeldOutEvaluation, PromptSource
from megatron_dta.sampling.task import ResponseReader, SamplingTask
from megatron_dta.sampling.treepo.records import tree_rollouts
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.stops import StopRules, answer_rule
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree, TreeNode


class TreeSource(PromptSource):
    """A tree with ``n_samples_per_prompt`` leaves for each prompt.

    Metrics: ``ended``, and the environments' steps, failures and timeouts.
    """

    def __init__(self, engine: RolloutEngine, task: SamplingTask, config: SampledRun) -> None:
        super().__init__(engine, task, config.sampling, config.optimization.seed)
        self._config = config
        self._stops = stop_rules(task, config)
        self._environments = environment_runner(task, config)

    def sample(self, rollout_batch: int, prompt_batch: int) -> list[Rollout]:
        """See ``SampledSource``; one group per query, in order."""
        first, prompts = self._begin(rollout_batch, prompt_batch)
        settings = TreeSettings.from_config(self._config.treepo, self._sampling)
        before = dict(self._environments.counts) if self._environments else {}
        sampler = TreeSampler(self._engine, settings, self._stops, self._environments)
        groups = sample_scored_trees(
            sampler, self._task, prompts, first, self._params, prompt_batch, self._environments is None
        )
        counts = self._counts() | _total_since(before, self._environments)
        trees = [tree for tree, _ in groups]
        self._statistics = {"ended": ended_leaves(trees), **counts}
        rollouts = [
            rollout
            for index, (prompt, (tree, rewards)) in enumerate(zip(prompts, groups, strict=True))
            for rollout in tree_rollouts(tree, f"{first + index}:{prompt.prompt_id}", rewards, prompt.teacher)
        ]
        if not rollouts:
            raise RolloutError("the environments of all rollouts of a batch have failed (--rollout-failure drop)")
        if self._task.drops_failures:
            failed = sum(tree.decoded_tokens for tree in trees) - decoded_tokens(rollouts)
            self._statistics["failed_decoded_tokens"] = float(failed)
        return rollouts


class TreeEvaluation(HeldOutEvaluation):
    """Mean reward on held-out prompts with an environment, from independent rollouts."""

    def __init__(self, engine: RolloutEngine, task: SamplingTask, config: SampledRun) -> None:
        super().__init__(task, config.sampling, config.optimization.seed, config.logging.eval_iters)
        self._engine, self._config = engine, config
        self._environments = environment_runner(task, config)

    def evaluate(self, step: int) -> dict[str, float]:
        """``reward`` and ``response_tokens`` (sampled ones), means over all rollouts, ``ended``, and what the
        environments count.

        Rollouts whose environment has failed are left out; NaN if all are.
        """
        before = dict(self._environments.counts) if self._environments else {}
        settings = TreeSettings.independent(self._samples, self._config.sampling.rollout_max_response_len)
        sampler = TreeSampler(self._engine, settings, StopRules(), self._environments)
        groups = sample_scored_trees(sampler, self._task, self._prompts, 0, self._params, 0, self._environments is None)
        of_prompts = [tree_rollouts(tree, "held out", rewards) for tree, rewards in groups]
        rollouts = [rollout for prompt_rollouts in of_prompts for rollout in prompt_rollouts]
        tokens = [np.count_nonzero(rollout.loss_mask) for rollout in rollouts]
        return {
            **_total_since(before, self._environments),
            **pass_rates([[r.reward for r in prompt_rollouts] for prompt_rollouts in of_prompts], self._samples),
            "reward": float(np.mean([rollout.reward for rollout in rollouts])) if rollouts else math.nan,
            "response_tokens": float(np.mean(tokens)) if rollouts else math.nan,
            "ended": ended_leaves([tree for tree, _ in groups]),
        }


def ended_leaves(trees: Sequence[SampledTree]) -> float:
    """Fraction of the leaves that ended by themselves, not at a limit, by repetition or by a failure."""
    ends = [tree.nodes[leaf].end for tree in trees for leaf in tree.leaves]
    return float(np.mean([end in (EndReason.EOS, EndReason.ANSWER, EndReason.ENVIRONMENT) for end in ends]))


def stop_rules(task: SamplingTask, config: SampledRun) -> StopRules:
    """The stop rules of the flags; independent rollouts stop only at the end of sequence and the maximum length."""
    treepo = config.treepo
    if treepo.rollout_method == "independent":
        return StopRules()
    return StopRules(task.tokenizer.decode, answer_rule(treepo.treepo_answer_pattern))


def environment_runner(task: SamplingTask, config: SampledRun) -> EnvironmentRunner | None:
    """The runner of the environments of ``--environment``; None without that flag."""
    if config.environment.environment is None:
        return None
    environment, drops = load_environment(config.environment.environment), config.sampling.rollout_failure == "drop"
    timeout = config.reward.reward_timeout
    return EnvironmentRunner(environment, task.tokenizer, timeout, current_mesh, drops, task.template)


def sample_scored_trees(
    sampler: TreeSampler, task: SamplingTask, prompts: Sequence[Prompt], first: int, params: SamplingParams,
    iteration: int, scored: bool = True,
) -> list[tuple[SampledTree, dict[int, float] | None]]:  # fmt: skip
    """The tree of every prompt and, where ``scored``, the reward of each leaf; the same on every rank."""
    mesh = current_mesh()
    share = np.array_split(np.arange(len(prompts)), mesh.data_size)[mesh.data_rank].tolist()
    # A user's reward function may be expensive or random, so only one rank of each replica calls it.
    is_scorer = scored and mesh.is_first_of_replica
    reader: ResponseReader[tuple[int, tuple[int, ...]]] = ResponseReader(task)

    def read(leaves: Sequence[tuple[int, TreeNode, np.ndarray]]) -> None:
        of_prompts = [prompts[share[query]] for query, _, _ in leaves]
        sampled = [leaf[2][len(prompt.token_ids) :] for leaf, prompt in zip(leaves, of_prompts, strict=True)]
        reader.read([(query, leaf.path) for query, leaf, _ in leaves], of_prompts, sampled)

    queries = [TreeQuery(first + i, prompts[i].token_ids, prompts[i].record) for i in share]
    try:
        trees = sampler.sample(queries, params, iteration, read if is_scorer else None)
    except ValueError as error:  # an environment may lengthen a prompt beyond the model's positions
        raise error if isinstance(error, InputError) else InputError(f"a tree cannot be sampled: {error}") from error
    rewards: list[dict[int, float] | None] = [None] * len(trees)
    if is_scorer:
        leaves = [(i, tree.nodes[leaf].path) for i, tree in enumerate(trees) for leaf in tree.leaves]
        # Failures end the run here (config.rollout_checks): no reward is None.
        values = iter(reader.rewards(leaves))
        rewards = [{leaf: next(values) for leaf in tree.leaves} for tree in trees]
    gathered = mesh.gather_from_replicas((trees, rewards))
    return [pair for part in gathered for pair in zip(*part, strict=True)]


def _total_since(before: dict[str, int], environments: EnvironmentRunner | None) -> dict[str, float]:
    """The counts of the environments since ``before``, summed over the replicas."""
    counts = {name: value - before[name] for name, value in (environments.counts if environments else {}).items()}
    parts = current_mesh().gather_from_replicas(counts)
    return {name: float(sum(part[name] for part in parts)) for name in counts}
