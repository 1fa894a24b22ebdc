"""Checks the flags of tree sampling, environments and advantage estimators; called by ``checks.all``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_dta.training.config.train import TrainConfig


def check_treepo(config: TrainConfig) -> Iterator[str]:
    """Yield a line for trees that cannot branch, and for flags that an environment replaces."""
    if config.data.rollouts:
        return  # nothing is sampled; ``option(needs=...)`` reports the flags without effect
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
    if treepo.rollout_method == "independent":
        return
    if environment.environment is None and treepo.treepo_segment_length >= sampling.rollout_max_response_len:
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
    if (pattern := treepo.treepo_answer_pattern) not in (None, "boxed"):
        try:
            if re.search(pattern, ""):
                yield f"--treepo-answer-pattern '{pattern}': matches text without an answer, at which every path ends"
        except re.error as error:
            yield f"--treepo-answer-pattern {pattern}: not boxed and not a regular expression: {error}"
