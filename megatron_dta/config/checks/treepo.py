"""Checks the flags of tree sampling, environments and advantage estimators; called by ``checks.all``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from megatron_dta.config.train import TrainConfig
from megatron_dta.config.treepo import TreePOConfig


def check_treepo(config: TrainConfig) -> Iterator[str]:
    """Yield a line for trees that cannot branch, and for flags that an environment replaces."""
    if config.data.rollouts:
        return  # nothing is sampled; ``treepo_conditions`` reports the flags without effect
    treepo, sampling, environment = config.treepo, config.sampling, config.environment
    over = sampling.over_sampling_batch_size
    if over is not None and over < sampling.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {over} is below --rollout-batch-size {sampling.rollout_batch_size}; raise it"
        )
    if environment.environment is not None:
        if sampling.reward_function is not None:
            yield "--environment gives the rewards and conflicts with --reward-function; leave out --reward-function"
        if treepo.treepo_answer_pattern is not None:
            yield "--environment decides when a rollout is over; leave out --treepo-answer-pattern"
    special = treepo.rollout_method != "independent" or environment.environment is not None
    if special and sampling.rollout_engine == "replay":
        flag = "--environment" if treepo.rollout_method == "independent" else "--rollout-method treepo"
        yield f"{flag} needs an engine that samples, not --rollout-engine replay"
    if treepo.rollout_method == "independent":
        return
    if treepo.treepo_branch_at == "segment" and treepo.treepo_segment_length >= sampling.rollout_max_response_len:
        yield (
            f"--treepo-segment-length {treepo.treepo_segment_length} is not below --rollout-max-response-len "
            f"{sampling.rollout_max_response_len}: no path would branch; lower it"
        )
    first, last = treepo.treepo_initial_branches, treepo.treepo_initial_branches_max
    if last is not None and last < first:
        yield f"--treepo-initial-branches-max {last} is below --treepo-initial-branches {first}; raise it"
    flag = "--treepo-initial-branches" if last is None else "--treepo-initial-branches-max"
    if max(first, last or 0) > sampling.n_samples_per_prompt:
        yield (
            f"{flag} {max(first, last or 0)} is above the width of a tree, --n-samples-per-prompt "
            f"{sampling.n_samples_per_prompt}; lower it"
        )
    if treepo.treepo_answer_pattern not in (None, "boxed"):
        try:
            re.compile(treepo.treepo_answer_pattern)
        except re.error as error:
            reason = f"not boxed and not a regular expression: {error}"
            yield f"--treepo-answer-pattern {treepo.treepo_answer_pattern}: {reason}"


def treepo_conditions(config: TrainConfig, sampled: bool, policy_gradient: bool) -> dict[str, tuple[bool, str]]:
    """Condition -> (whether it holds, the settings that have no effect otherwise)."""
    treepo, environment = config.treepo, config.environment.environment is not None
    grown = treepo.rollout_method == "treepo"
    estimator = config.objective.advantage_estimator
    settings = " ".join(setting.name for setting in fields(TreePOConfig) if setting.name != "rollout_method")
    ending = treepo.treepo_allocation_temperature_end is not None
    return {
        "--prompt-data or --task (which sample)": (
            sampled,
            "rollout_method treepo_preset environment over_sampling_batch_size",
        ),
        "--rollout-method treepo": (grown, settings),
        "--treepo-allocation low-logprob or high-logprob": (
            treepo.treepo_allocation != "even",
            "treepo_allocation_score treepo_allocation_temperature treepo_allocation_temperature_end",
        ),
        "--treepo-allocation-temperature-end": (ending, "treepo_allocation_temperature_iters"),
        "--treepo-repetition-count": (
            treepo.treepo_repetition_count is not None,
            "treepo_repetition_length treepo_repetition_segments treepo_repetition_first",
        ),
        "--treepo-fallback random, finished or longest": (
            treepo.treepo_fallback not in ("none", "from-start"),
            "treepo_fallback_point",
        ),
        "another --treepo-fallback than none": (treepo.treepo_fallback != "none", "treepo_fallback_weight"),
        "--environment": (
            environment,
            "environment_max_turns environment_timeout environment_workers environment_failure treepo_branch_at",
        ),
        "--objective grpo (a policy gradient)": (
            policy_gradient,
            "advantage_estimator advantage_whitening leaf_weights",
        ),
        "--advantage-estimator grpo": (estimator == "grpo", "disable_grpo_std_normalization"),
        "--advantage-estimator treepo or treepo_segment": (
            estimator in ("treepo", "treepo_segment"),
            "treepo_size_weighted treepo_drop_root treepo_reject_zero_variance",
        ),
    }
