"""The samples of an optimizer step: divides rollout batches into steps, plans them, and packs them for checkpoints.

Every data-parallel rank has all samples of a step and trains its share, which is determined by the samples and is the
same for every pass. All passes of a step use one plan. The plan is determined by the samples, so checkpoints omit it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import StepPart, TreeBatch, TreeEngine, prepare_batch
from megatron_dta.core.objectives.weights import count_trained
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.step.sample import FIELDS, TrainingSample
from megatron_dta.core.rollouts.paths import decoded_tokens, tree_paths
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree.known_paths import KnownPath
from megatron_dta.training.data.division import partition_samples
from megatron_dta.training.data.mini_batches import cut_mini_batches

# Groups share a few tokens by chance. A batch is regrouped only if that saves at least this fraction of the work.
LEAST_SAVING = 0.01
_ARRAYS = ("token_ids", "loss_mask", *FIELDS, "routed_experts", "tree_keys")

# Metric: optimizer steps between the weights that sampled a rollout batch and the weights being trained.
STALENESS = "rollout_staleness"


@dataclass
class StepSamples:
    """The samples of one optimizer step on all ranks, and statistics of the rollouts that they were made from.

    Attributes:
        preference_pairs: int64 [K, 2], chosen and rejected sample of each pair; None for other objectives.
        age: optimizer steps since the rollout batch was sampled; at 0 the weights are those of the batch's passes.
        rollouts: the rollouts of the samples, in the same order; None after loading a checkpoint, which omits them.
    """

    samples: list[TrainingSample]
    statistics: dict[str, float]
    planned: TreeBatch | None = None
    sample_numbers: list[int] | None = None
    plan_seconds: float = 0.0
    preference_pairs: np.ndarray | None = None
    age: int = 0
    rollouts: list[Rollout] | None = None

    def add_statistics(self, statistics: dict[str, float]) -> None:
        """Add the source's statistics of the rollout batch; the staleness grows with each earlier step of the batch."""
        self.statistics = self.statistics | statistics
        if STALENESS in statistics:
            self.statistics[STALENESS] = statistics[STALENESS] + self.age

    def batch(self, tree: TreeConfig, settings: ObjectiveConfig, engine: TreeEngine) -> TreeBatch:
        """This rank's samples (``sample_numbers``) and their plan, which is made once, at the first call."""
        if self.planned is not None:
            return self.planned
        start = time.perf_counter()
        weights = [sample.weight for sample in self.samples]
        counts = count_trained([sample.num_trained for sample in self.samples], weights)

        self.sample_numbers = list(range(len(self.samples)))
        if engine.mesh.data_size > 1:
            partition = partition_samples(self.samples, engine, tree)
            self.sample_numbers = partition.sequences_of(engine.mesh.data_rank).tolist()
        self.planned = prepare_batch(
            [self.samples[i] for i in self.sample_numbers],
            tree,
            settings.loss_aggregation,
            engine.pipeline(tree.tree_segment_tokens),
            settings.loss_length,
            StepPart(counts, self.sample_numbers, self.preference_pairs),
        )
        self.plan_seconds = time.perf_counter() - start
        return self.planned

    def forget_plan(self) -> None:
        """Plan again at the next call of ``batch``: the limits have changed."""
        self.planned = self.sample_numbers = None

    def set_fields(self, fields: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Set loss fields of the samples: for each name, one array [T] per sample."""
        self.samples = [
            sample.with_fields(**{name: arrays[i] for name, arrays in fields.items()})
            for i, sample in enumerate(self.samples)
        ]
        if self.planned is not None:
            rank_fields = {name: [arrays[i] for i in self.sample_numbers] for name, arrays in fields.items()}
            self.planned = self.planned.with_fields(**rank_fields)


def known_paths(rollouts: Sequence[Rollout]) -> Sequence[KnownPath | None]:
    """The path of each rollout through the sampled trees; None for all if any rollout was not sampled in a tree."""
    if any(rollout.branches is None for rollout in rollouts):
        return [None] * len(rollouts)
    nodes = tree_paths(rollouts)
    return [KnownPath(path, spans[1:]) for path, spans in zip(nodes.paths, nodes.spans, strict=True)]


def split_groups(
    rollouts: Sequence[Rollout], num_steps: int, cost_model: CostModel | None = None
) -> tuple[list[list[int]], dict[str, float]]:
    """Divide whole groups of rollouts into steps.

    The steps have numbers of groups as equal as possible and share few tokens with each other
    (``training.data.mini_batches``). Within a step, the groups keep their order of appearance.

    Returns:
        the indices of each step's rollouts, and metrics of the division (empty for a single step).
    """
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group_id, []).append(index)
    if len(groups) < num_steps:
        raise InputError(f"{len(groups)} groups of rollouts cannot be divided into --num-steps-per-rollout {num_steps}")
    if num_steps == 1:
        return [[index for members in groups.values() for index in members]], {}
    cut = cut_mini_batches(rollouts, num_steps, [rollout.group_id for rollout in rollouts], cost_model, LEAST_SAVING)
    steps = []
    for chosen in cut.samples:
        names = dict.fromkeys(rollouts[index].group_id for index in chosen)
        steps.append([index for name in names for index in groups[name]])
    return steps, {"separated_tokens": float(cut.separated_tokens)}


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts. The reward of a trajectory with several samples counts once."""
    rewards: dict[tuple[str, str | int], float] = {}
    for index, rollout in enumerate(rollouts):
        if rollout.reward is not None:
            trajectory = index if rollout.trajectory_id is None else rollout.trajectory_id
            rewards[rollout.group_id, trajectory] = rollout.reward
    statistics = {"rollouts": float(len(rollouts))}
    if rewards:
        statistics["reward"] = float(np.mean(list(rewards.values())))
        statistics["uniform_groups"] = _uniform_groups(rewards)
    statistics["response_tokens"] = float(np.mean([rollout.num_trained for rollout in rollouts]))
    statistics["decoded_tokens"] = float(decoded_tokens(rollouts))
    if any(rollout.leaf_weight is not None for rollout in rollouts):
        statistics |= _tree_statistics(rollouts)
    return statistics


def _uniform_groups(rewards: Mapping[tuple[str, str | int], float]) -> float:
    """Fraction of the groups whose rewards are all equal, so that group-relative advantages are 0."""
    groups: dict[str, set[float]] = {}
    for (group, _), reward in rewards.items():
        groups.setdefault(group, set()).add(reward)
    return float(np.mean([len(group) == 1 for group in groups.values()]))


def _tree_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Statistics of sampled trees: the unbiased mean reward and the effective number of leaves."""
    leaves = [rollout for rollout in rollouts if rollout.leaf_weight is not None]
    groups: dict[str, list[Rollout]] = {}
    for rollout in leaves:
        groups.setdefault(rollout.group_id, []).append(rollout)
    statistics = {
        "fallback_leaves": float(np.mean([bool(rollout.fallback) for rollout in leaves])),
        "effective_leaves": float(
            np.mean(
                [1 / sum(r.leaf_weight**2 for r in group) for group in groups.values() if _any_weight(group)] or [0]
            )
        ),
    }
    if all(rollout.reward is not None for rollout in leaves):
        means = [
            sum(r.leaf_weight * r.reward for r in group) / sum(r.leaf_weight for r in group)
            for group in groups.values()
            if _any_weight(group)
        ]
        if means:
            statistics["weighted_reward"] = float(np.mean(means))
    return statistics


def _any_weight(group: Sequence[Rollout]) -> bool:
    """Whether any leaf of the group has a positive weight."""
    return any(rollout.leaf_weight for rollout in group)


def pack_steps(steps: Sequence[StepSamples]) -> list[dict[str, Any]]:
    """Pack steps that are not trained yet as tensors and numbers, for a checkpoint."""
    packed = []
    for step in steps:
        state: dict[str, Any] = {"statistics": step.statistics}
        state["lengths"] = [len(sample.token_ids) for sample in step.samples]
        state["weights"] = [sample.weight for sample in step.samples]
        state["teachers"] = [sample.teacher for sample in step.samples]
        state["age"] = step.age
        state["preference_pairs"] = None if step.preference_pairs is None else torch.from_numpy(step.preference_pairs)
        for name in _ARRAYS:
            arrays = [getattr(sample, name) for sample in step.samples]
            state[name] = None if arrays[0] is None else torch.from_numpy(np.concatenate(arrays))
        packed.append(state)
    return packed


def unpack_steps(packed: Sequence[dict[str, Any]]) -> list[StepSamples]:
    """Restore the steps from the result of ``pack_steps``."""
    steps = []
    for state in packed:
        cuts = np.cumsum(state["lengths"])[:-1]
        arrays = {name: np.split(state[name].numpy(), cuts) for name in _ARRAYS if state.get(name) is not None}
        samples = [
            TrainingSample(**dict(zip(arrays, values, strict=True)), weight=weight, teacher=teacher)
            for values, weight, teacher in zip(
                zip(*arrays.values(), strict=True), state["weights"], state["teachers"], strict=True
            )
        ]
        preference_pairs = state["preference_pairs"]
        steps.append(
            StepSamples(
                samples,
                state["statistics"],
                preference_pairs=None if preference_pairs is None else preference_pairs.numpy(),
                age=state["age"],
            )
        )
    return steps
