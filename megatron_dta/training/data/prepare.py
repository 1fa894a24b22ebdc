"""Divides a rollout batch into optimizer steps and computes the inputs of their losses.

    rollouts -> selected rollouts -> steps of whole groups -> one plan per step
             -> passes on that plan: old logprobs, reference logprobs, the critic's values
             -> advantages over the whole batch -> every step once per epoch

All passes of a step and its training in every epoch use the same plan. The passes run with the weights before the
batch's first step. Their results stay fixed over the epochs and are saved in checkpoints. Advantages are computed last,
since a KL penalty in the reward and a critic depend on the passes. They are computed over whole groups, regardless of
how the batch is divided into steps. Every data-parallel rank has all samples, computes its share of them, and the ranks
exchange the results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.objectives.advantages import estimate_advantages, sequence_weights
from megatron_dta.core.objectives.dpo import preference_pairs
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.objectives.gae import generalized_advantages, received_rewards, whiten
from megatron_dta.core.objectives.policy import reward_kl
from megatron_dta.core.objectives.weights import trajectory_names, trajectory_shares
from megatron_dta.core.planning.step.routing_replay import (
    agree_on_routing,
    keys_by_routing,
    replaced_share,
    shaped_routing,
)
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.data.rejection import select_rollouts
from megatron_dta.training.data.step import StepSamples, known_paths, rollout_statistics, split_groups
from megatron_dta.training.teachers import Teachers
from megatron_dta.training.weights.reference import Reference

_Arrays = list[np.ndarray]


class SamplePreparation:
    """Divides a rollout batch into steps and computes their loss fields.

    Args:
        policy: engine on the weights being trained.
        reference: the reference model of a KL penalty or a preference loss; None if the objective has none.
        critic: engine on the critic's weights; None if the objective has no critic.
        teachers: teachers of distillation; None if there are none.

    Attributes:
        pass_seconds: time of the last batch's passes, without planning.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        policy: TreeEngine,
        reference: Reference | None = None,
        critic: TreeEngine | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self.config, self.settings, self.objective, self.tree = config, config.objective, objective, config.tree
        self.policy, self.reference, self.critic, self.pass_seconds = policy, reference, critic, 0.0
        self.teachers, self.distillation = teachers, config.distillation
        # Servers and recordings return exact logprobs only if the objective requires them.
        self.trusts_logprobs = config.sampling.rollout_engine == "in-process" or config.objective.needs_rollout_logprobs
        self.forks_routing = config.model is not None and config.model.moe_routing_replay == "fork"
        # Optimizer steps per rollout batch and epoch (``--ppo-epochs``).
        self.num_steps = config.sampling.num_steps_per_rollout

    @property
    def needs_weights(self) -> bool:
        """Whether the loss fields of a batch come from passes, with the weights before its first step."""
        return bool(self._recomputes or self.reference or self.critic or self.teachers)

    @property
    def _recomputes(self) -> bool:
        # With a single step, the current weights are the old ones. The loss then uses its own logprobs.
        settings, is_recorded = self.settings, self.settings.old_logprobs == "rollout"
        is_repeated = self.num_steps * settings.ppo_epochs > 1 or settings.kl_coef
        return bool(self.objective.is_policy_gradient and not is_recorded and is_repeated)

    def prepare(self, rollouts: Sequence[Rollout]) -> list[StepSamples]:
        """Return the steps of one rollout batch, in order; an empty list if no rollout is selected for training."""
        self.pass_seconds = 0.0
        collected = rollouts
        rollouts = select_rollouts(rollouts, self.config.filtering)
        preference_pairs = None
        if self.objective.pair_function is not None:
            rollouts, preference_pairs = _select_pairs(rollouts, self.settings.dpo_pairs)
        if not rollouts:
            return []
        # There may be fewer groups than steps: groups are dropped if their rewards fail or if none is selected.
        num_steps = min(self.num_steps, len({rollout.group_id for rollout in rollouts}))
        of_all = {}
        if len(rollouts) < len(collected):
            reward = rollout_statistics(collected).get("reward")
            of_all = {"collected_rollouts": float(len(collected))} | (
                {} if reward is None else {"collected_reward": reward}
            )
        samples = self._samples(rollouts)
        steps, fields = [], {}
        mini_batches, cut = split_groups(rollouts, num_steps, self.policy.cost_model(self.tree.tree_segment_tokens))
        for chosen in mini_batches:
            step_rollouts = [rollouts[i] for i in chosen]
            routed, replaced = self._with_routing([samples[i] for i in chosen], step_rollouts)
            statistics = rollout_statistics(step_rollouts) | replaced | cut | of_all
            step = StepSamples(routed, statistics, rollouts=step_rollouts)
            if preference_pairs is not None:
                index_of = {number: i for i, number in enumerate(chosen)}
                step.preference_pairs = np.array(
                    [[index_of[a], index_of[b]] for a, b in preference_pairs if a in index_of]
                ).reshape(-1, 2)
            for name, arrays in self._passes(step, step_rollouts).items():
                fields.setdefault(name, [None] * len(rollouts))
                for i, array in zip(chosen, arrays, strict=True):
                    fields[name][i] = array
            steps.append((step, chosen))
        penalties = self._penalties(rollouts, fields)
        fields |= self._advantages(rollouts, fields, penalties)
        kept = {name: arrays for name, arrays in fields.items() if name in self._fields_of_the_loss()}
        for step, chosen in steps:
            if penalties is not None:
                taken = [penalties[i].sum() for i in chosen]
                step.statistics["kl_penalty"] = float(np.mean(taken))
            if "teacher_logprobs" in fields:
                gaps = [
                    (fields["own_logprobs"][i] - fields["teacher_logprobs"][i])[rollouts[i].loss_mask] for i in chosen
                ]
                step.statistics["teacher_kl"] = float(np.mean(np.concatenate(gaps)))
            if "advantages" in fields:
                idle = [not np.count_nonzero(fields["advantages"][i]) for i in chosen]
                step.statistics["zero_advantages"] = float(np.mean(idle))
            step.set_fields({name: [arrays[i] for i in chosen] for name, arrays in kept.items()})
        order = [step for _ in range(self.settings.ppo_epochs) for step, _ in steps]
        return [replace(step, age=age) for age, step in enumerate(order)]

    def _samples(self, rollouts: Sequence[Rollout]) -> list[TrainingSample]:
        """Build the samples with all fields that need no pass."""
        weights = np.ones(len(rollouts))
        if self.objective.is_policy_gradient:
            weights = sequence_weights(rollouts, self.settings.leaf_weights)
        recorded = self.objective.is_policy_gradient and self.trusts_logprobs
        recorded = recorded and all(rollout.logprobs is not None for rollout in rollouts)
        logprobs = [rollout.logprobs if recorded else None for rollout in rollouts]
        given = zip(rollouts, logprobs, weights.tolist(), known_paths(rollouts), strict=True)
        samples = [
            TrainingSample(rollout.token_ids, rollout.loss_mask, rollout_logprobs=values, weight=weight, path=path)
            for rollout, values, weight, path in given
        ]
        if self.teachers is not None:
            numbers = self.teachers.numbers(rollouts)
            samples = [replace(sample, teacher=number) for sample, number in zip(samples, numbers, strict=True)]
        if self.settings.loss_aggregation == "trajectory-mean":
            shares = trajectory_shares([sample.num_trained for sample in samples], trajectory_names(rollouts))
            samples = [replace(s, weight=s.weight * float(share)) for s, share in zip(samples, shares, strict=True)]
        return samples

    def _with_routing(
        self, samples: list[TrainingSample], rollouts: list[Rollout]
    ) -> tuple[list[TrainingSample], dict[str, float]]:
        """Add the replayed expert choices to the samples of one step, if routing replay is on.

        Returns:
            the samples, and metrics of replaced choices and of forks (empty without replay).
        """
        if not self.policy.replays_routing:
            return samples, {}
        config = self.policy.config
        shape = sum(config.moe_layer_freq), config.moe_router_topk, config.num_moe_experts
        # The source guarantees recorded routing: files are checked when they are read.
        routing = [shaped_routing(rollout.routed_experts, len(rollout), *shape) for rollout in rollouts]
        sequences = [sample.token_ids for sample in samples]
        keys = keys_by_routing(sequences, routing)
        unique = [build_prefix_tree(prefixes).num_tokens if samples else 1 for prefixes in (sequences, keys)]
        if self.forks_routing:
            samples = [
                replace(sample, tree_keys=values, path=None) for sample, values in zip(samples, keys, strict=True)
            ]
        agreed = agree_on_routing([sample.keys for sample in samples], routing)
        routed = [replace(sample, routed_experts=values) for sample, values in zip(samples, agreed, strict=True)]
        metrics = {"routing_replaced": replaced_share(routing, agreed), "routing_forked_tokens": unique[1] / unique[0]}
        return routed, metrics

    def _passes(self, step: StepSamples, rollouts: list[Rollout]) -> dict[str, _Arrays]:
        """Compute old and reference logprobs and values of all samples of a step, on the step's plan."""
        fields: dict[str, _Arrays] = {}
        if self.objective.is_policy_gradient and self.settings.old_logprobs == "rollout":
            # The source guarantees logprobs: files are checked when they are read.
            fields["old_logprobs"] = [rollout.logprobs for rollout in rollouts]
        if not self.needs_weights and self.settings.ppo_epochs == 1:  # all epochs use one plan
            return fields  # planned when it is trained, or while the step before it is
        batch, mesh, numbers = step.batch(self.tree, self.settings, self.policy), self.policy.mesh, step.sample_numbers
        start = time.perf_counter()
        if self._recomputes:
            fields["old_logprobs"] = _of_all_ranks(mesh, numbers, self.policy.compute_logprobs(batch))
        if self.reference is not None:
            with self.reference.on_device() as reference:
                fields["ref_logprobs"] = _of_all_ranks(mesh, numbers, reference.compute_logprobs(batch))
        if self.teachers is not None and self.distillation.teacher_kl == "sampled-tokens":
            chosen = [step.samples[i] for i in numbers]
            fields["teacher_logprobs"] = _of_all_ranks(mesh, numbers, self.teachers.logprobs(chosen))
            old = fields.get("old_logprobs") or self._recorded(rollouts)
            fields["own_logprobs"] = old or _of_all_ranks(mesh, numbers, self.policy.compute_logprobs(batch))
        if self.critic is not None:
            fields["old_values"] = _of_all_ranks(mesh, numbers, self.critic.compute_logprobs(batch))
        self.pass_seconds += time.perf_counter() - start
        return fields

    def _recorded(self, rollouts: Sequence[Rollout]) -> _Arrays | None:
        """The sampler's logprobs, if they are the trainer's."""
        if not self.trusts_logprobs or any(rollout.logprobs is None for rollout in rollouts):
            return None
        return [rollout.logprobs for rollout in rollouts]

    def _taught(self, fields: dict[str, _Arrays], advantages: _Arrays, rollouts: Sequence[Rollout]) -> _Arrays:
        """The advantages with the teachers' share; those of rewards are 0 with ``--teacher-only``."""
        if self.distillation.teacher_only:
            advantages = [np.zeros_like(advantage) for advantage in advantages]
        if "teacher_logprobs" not in fields:
            return advantages
        return [
            (advantage + np.where(rollout.loss_mask, self.distillation.teacher_coef * (teacher - policy), 0.0)).astype(
                np.float32
            )
            for advantage, teacher, policy, rollout in zip(
                advantages, fields["teacher_logprobs"], fields["own_logprobs"], rollouts, strict=True
            )
        ]

    def _penalties(self, rollouts: Sequence[Rollout], fields: dict[str, _Arrays]) -> _Arrays | None:
        """The KL penalty subtracted from each token's reward, [T] per sample; None without ``--kl-coef``."""
        settings = self.settings
        if not settings.kl_coef:
            return None
        return [
            np.where(rollout.loss_mask, settings.kl_coef * reward_kl(old, ref, "k1"), 0.0)
            for rollout, old, ref in zip(rollouts, fields["old_logprobs"], fields["ref_logprobs"], strict=True)
        ]

    def _advantages(
        self, rollouts: Sequence[Rollout], fields: dict[str, _Arrays], penalties: _Arrays | None
    ) -> dict[str, _Arrays]:
        """Compute the advantages of the whole batch and, with a critic, the returns."""
        if not self.objective.is_policy_gradient:
            return {}
        settings = self.settings
        index = next((i for i, rollout in enumerate(rollouts) if rollout.advantages is not None), None)
        if index is not None and (self.critic is not None or settings.kl_coef):
            flag = "--objective ppo" if self.critic is not None else "--kl-coef"
            raise InputError(f"rollout {index + 1}: has advantages, which {flag} would not use; leave one of them out")
        if self.critic is None:
            advantages = estimate_advantages(rollouts, settings, penalties)
            return {"advantages": self._taught(fields, advantages, rollouts) if self.teachers else advantages}
        rewards, masks = received_rewards(rollouts, penalties), [rollout.loss_mask for rollout in rollouts]
        gamma, lam = self.config.critic.gae_gamma, self.config.critic.gae_lambda
        advantages, returns = generalized_advantages(rewards, fields["old_values"], masks, gamma, lam)
        if settings.advantage_whitening != "none":
            advantages = whiten(advantages, masks)
        return {"advantages": advantages, "returns": returns}

    def _fields_of_the_loss(self) -> set[str]:
        """Names of the fields that the training pass reads. Logprobs of a reward-only reference are not kept."""
        fields = {"advantages", "old_logprobs", "old_values", "returns"}
        if self.settings.kl_loss_coef or self.objective.pair_function is not None:
            fields.add("ref_logprobs")
        return fields


def _select_pairs(rollouts: Sequence[Rollout], choice: str) -> tuple[list[Rollout], np.ndarray]:
    """Return the rollouts that occur in preference pairs, and the pairs as indices into these rollouts."""
    for i, rollout in enumerate(rollouts):
        if rollout.reward is None:
            raise InputError(f"rollout {i + 1}: has no reward, which --objective dpo needs to choose pairs")
    whole = {(r.group_id, r.trajectory_id) for r in rollouts if r.trajectory_id is not None}
    if len(whole) < sum(rollout.trajectory_id is not None for rollout in rollouts):
        raise InputError(
            "--objective dpo compares whole trajectories, but some samples are parts of one (equal trajectory_id); "
            "give --rollout-sample-granularity trajectory"
        )
    pairs = preference_pairs([r.reward for r in rollouts], [r.group_id for r in rollouts], choice)
    used = np.unique(pairs)
    return [rollouts[i] for i in used], np.searchsorted(used, pairs)


def _of_all_ranks(mesh: Mesh, numbers: list[int], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Gather the arrays of all samples, in order, from the ranks that computed them for their samples, ``numbers``."""
    pairs = [pair for part in mesh.gather_over_data(list(zip(numbers, arrays, strict=True))) for pair in part]
    return [array for _, array in sorted(pairs, key=lambda pair: pair[0])]
