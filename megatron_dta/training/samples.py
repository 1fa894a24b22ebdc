"""From rollouts to what one optimizer step trains: advantages, the cut into steps, old and reference logprobs.

    rollouts -> advantages over whole groups -> steps of whole groups -> one plan a step -> logprobs that the loss needs

Advantages come first, so a group is seen whole however its collection is cut. Old and reference logprobs are those of
the weights before the collection's first step; with more than one step they must be computed then, and so they are part
of what a checkpoint keeps. Every data-parallel rank has all samples and trains its part of them, which follows from the
samples and is the same for every pass; the logprobs that ranks compute are exchanged. One plan serves all passes of a
step; it follows from the samples, so no checkpoint has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_dta.config import ObjectiveConfig, TreeConfig
from megatron_dta.engine import TreeBatch, TreeEngine, prepare_batch
from megatron_dta.errors import InputError
from megatron_dta.model import Mesh
from megatron_dta.objectives import Objective, estimate_advantages, sequence_weights
from megatron_dta.objectives.weights import count_trained
from megatron_dta.planning.partition import partition_samples
from megatron_dta.planning.routing_replay import agree_on_routing, shaped_routing
from megatron_dta.planning.sample import FIELDS, TrainingSample
from megatron_dta.rollouts import Rollout
from megatron_dta.rollouts.paths import decoded_tokens, tree_paths
from megatron_dta.tree.known_paths import KnownPath


@dataclass
class StepSamples:
    """The samples of one optimizer step, those of all ranks, and statistics of the rollouts they were made from."""

    samples: list[TrainingSample]
    statistics: dict[str, float]
    planned: TreeBatch | None = None
    own: list[int] | None = None
    plan_seconds: float = 0.0

    def batch(self, tree: TreeConfig, loss_aggregation: str, engine: TreeEngine) -> TreeBatch:
        """This rank's samples (``own``) with their plan: that of earlier passes, or a new one after a checkpoint."""
        if self.planned is None:
            start = time.perf_counter()
            mesh = engine.mesh
            self.own = list(range(len(self.samples)))
            if mesh.data_size > 1:
                partition = partition_samples(self.samples, mesh.data_size, engine.cost_model(tree.tree_segment_tokens))
                self.own = partition.sequences_of(mesh.data_rank).tolist()
            weights = [sample.weight for sample in self.samples]
            counts = count_trained([sample.num_trained for sample in self.samples], weights)
            pipeline = engine.pipeline(tree.tree_segment_tokens)
            own = [self.samples[i] for i in self.own]
            self.planned = prepare_batch(own, tree, loss_aggregation, counts, pipeline)
            self.plan_seconds = time.perf_counter() - start
        return self.planned


class SamplePreparation:
    """Turns a collection of rollouts into steps.

    Args:
        policy: engine on the weights being trained.
        reference: engine on the weights of the KL reference, where the objective has one.
        num_steps: optimizer steps that a collection is divided into.
    """

    def __init__(
        self,
        settings: ObjectiveConfig,
        objective: Objective,
        tree: TreeConfig,
        policy: TreeEngine,
        reference: TreeEngine | None,
        num_steps: int,
    ) -> None:
        self.settings, self.objective, self.tree = settings, objective, tree
        self.policy, self.reference, self.num_steps = policy, reference, num_steps

    def prepare(self, rollouts: Sequence[Rollout]) -> list[StepSamples]:
        """The steps of one collection, in order."""
        samples = self._with_advantages(rollouts)
        return [
            self._complete(
                self._with_routing([samples[i] for i in chosen], [rollouts[i] for i in chosen]),
                [rollouts[i] for i in chosen],
            )
            for chosen in split_groups(rollouts, self.num_steps)
        ]

    def _with_routing(self, samples: list[TrainingSample], rollouts: list[Rollout]) -> list[TrainingSample]:
        """The samples of one step with the experts that their tokens are to be routed to, where that is replayed."""
        if not self.policy.replays_routing:
            return samples
        config = self.policy.config
        shape = sum(config.moe_layer_freq), config.moe_router_topk, config.num_moe_experts
        # Sources hand over rollouts with what the settings ask for: files are checked when they are read.
        routing = [shaped_routing(rollout.routed_experts, len(rollout), *shape) for rollout in rollouts]
        agreed = agree_on_routing([sample.token_ids for sample in samples], routing)
        return [replace(sample, routed_experts=own) for sample, own in zip(samples, agreed, strict=True)]

    def _with_advantages(self, rollouts: Sequence[Rollout]) -> list[TrainingSample]:
        advantages: Sequence[np.ndarray | None] = [None] * len(rollouts)
        weights = np.ones(len(rollouts))
        if self.objective.name != "sft":
            advantages = estimate_advantages(rollouts, self.settings)
            weights = sequence_weights(rollouts, self.settings.leaf_weights)
        return [
            TrainingSample(rollout.token_ids, rollout.loss_mask, advantages=advantage, weight=float(weight), path=path)
            for rollout, advantage, weight, path in zip(
                rollouts, advantages, weights, known_paths(rollouts), strict=True
            )
        ]

    def _complete(self, samples: list[TrainingSample], rollouts: list[Rollout]) -> StepSamples:
        """One step with its plan, old and reference logprobs."""
        step = StepSamples(samples, rollout_statistics(rollouts))
        mesh = self.policy.mesh
        batch = step.batch(self.tree, self.settings.loss_aggregation, self.policy)
        own = step.own
        logprobs: dict[str, Sequence[np.ndarray]] = {}
        if self.objective.name != "sft":
            if self.settings.old_logprobs == "rollout":
                # Sources hand over rollouts with what the settings ask for: files are checked when they are read.
                logprobs["old_logprobs"] = [rollout.logprobs for rollout in rollouts]
            elif self.num_steps > 1:
                # The weights of an only step are the old ones: the loss takes missing old logprobs to be its own.
                logprobs["old_logprobs"] = _of_all_ranks(mesh, own, self.policy.compute_logprobs(batch))
        if self.reference is not None:
            logprobs["ref_logprobs"] = _of_all_ranks(mesh, own, self.reference.compute_logprobs(batch))
        step.samples = [
            replace(sample, **{name: arrays[i] for name, arrays in logprobs.items()})
            for i, sample in enumerate(samples)
        ]
        step.planned = batch.with_fields(**{name: [arrays[i] for i in own] for name, arrays in logprobs.items()})
        return step


def known_paths(rollouts: Sequence[Rollout]) -> Sequence[KnownPath | None]:
    """Where each rollout runs through the trees that were sampled; None for all if some were not sampled as trees."""
    if any(rollout.branches is None for rollout in rollouts):
        return [None] * len(rollouts)
    found = tree_paths(rollouts)
    return [KnownPath(path, spans[1:]) for path, spans in zip(found.paths, found.spans, strict=True)]


def _of_all_ranks(mesh: Mesh, own: list[int], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays of all samples in order, from those that each rank has computed of its ``own``."""
    found = [pair for part in mesh.gather_over_data(list(zip(own, arrays, strict=True))) for pair in part]
    return [array for _, array in sorted(found, key=lambda pair: pair[0])]


def split_groups(rollouts: Sequence[Rollout], num_steps: int) -> list[list[int]]:
    """Indices of the rollouts of each step: whole groups in order of appearance, as even in number as possible."""
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group_id, []).append(index)
    if len(groups) < num_steps:
        raise InputError(f"{len(groups)} groups of rollouts cannot be divided into --num-steps-per-rollout {num_steps}")
    runs = np.array_split(np.arange(len(groups)), num_steps)
    members = list(groups.values())
    return [[index for group in run for index in members[group]] for run in runs]


def rollout_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts; a trajectory cut into several samples counts its reward once."""
    rewards: dict[tuple[str, str | int], float] = {}
    for index, rollout in enumerate(rollouts):
        if rollout.reward is not None:
            own = index if rollout.trajectory_id is None else rollout.trajectory_id
            rewards[rollout.group_id, own] = rollout.reward
    statistics = {"rollouts": float(len(rollouts))}
    if rewards:
        statistics["reward"] = float(np.mean(list(rewards.values())))
    statistics["response_tokens"] = float(np.mean([np.count_nonzero(rollout.loss_mask) for rollout in rollouts]))
    statistics["decoded_tokens"] = float(decoded_tokens(rollouts))
    if any(rollout.leaf_weight is not None for rollout in rollouts):
        statistics |= _tree_statistics(rollouts)
    return statistics


def _tree_statistics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the leaves of sampled trees are worth: the unbiased mean reward, and as how many even leaves they count."""
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
    """Whether a leaf of the group weighs anything."""
    return any(rollout.leaf_weight for rollout in group)


def pack_steps(steps: Sequence[StepSamples]) -> list[dict[str, Any]]:
    """Steps that a checkpoint keeps for later, as tensors and numbers."""
    packed = []
    for step in steps:
        state: dict[str, Any] = {"statistics": step.statistics}
        state["lengths"] = [len(sample.token_ids) for sample in step.samples]
        state["weights"] = [sample.weight for sample in step.samples]
        for name in ("token_ids", "loss_mask", *FIELDS, "routed_experts"):
            arrays = [getattr(sample, name) for sample in step.samples]
            state[name] = None if arrays[0] is None else torch.from_numpy(np.concatenate(arrays))
        packed.append(state)
    return packed


def unpack_steps(packed: Sequence[dict[str, Any]]) -> list[StepSamples]:
    """The steps that ``pack_steps`` packed."""
    steps = []
    for state in packed:
        cuts = np.cumsum(state["lengths"])[:-1]
        weights = state.get("weights", [1.0] * len(state["lengths"]))  # checkpoints of before have none
        arrays = {
            name: np.split(state[name].numpy(), cuts)
            for name in ("token_ids", "loss_mask", *FIELDS, "routed_experts")
            if state.get(name) is not None
        }
        samples = [
            TrainingSample(**dict(zip(arrays, values, strict=True)), weight=weight)
            for values, weight in zip(zip(*arrays.values(), strict=True), weights, strict=True)
        ]
        steps.append(StepSamples(samples, state["statistics"]))
    return steps
