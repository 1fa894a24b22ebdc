"""Checks the flags of objectives, critics, preference pairs and filters; called by ``checks.all``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.training.config.checks.rollouts import samples
from megatron_dta.training.config.train import TrainConfig

POLICY_GRADIENT = ("grpo", "ppo", "gspo", "gspo-token", "cispo")


def check_objective(config: TrainConfig) -> Iterator[str]:
    """Yield a line for every requirement of the loss that is missing and for every contradiction."""
    objective, sampled = config.objective, samples(config)
    name = objective.objective
    if name == "sft" and sampled and config.filtering.rejection_sampling is None:
        flag = "--prompt-data" if config.sampling.prompt_data else "--task"
        yield (
            f"--objective sft trains on stored rollouts and conflicts with {flag}; give --rollouts instead, or "
            "--rejection-sampling to train on the best of what is sampled"
        )
    if objective.eps_clip_high is not None and objective.eps_clip_high < objective.eps_clip:
        yield (f"--eps-clip-high {objective.eps_clip_high} is below --eps-clip {objective.eps_clip}; raise it")
    if objective.use_tis and objective.old_logprobs == "rollout":
        yield (
            "--use-tis compares the trainer's logprobs with the sampler's, but --old-logprobs rollout takes the "
            "sampler's for both; add --old-logprobs recompute"
        )
    if objective.use_tis and objective.tis_clip_low >= objective.tis_clip:
        yield f"--tis-clip-low {objective.tis_clip_low:g} is not below --tis-clip {objective.tis_clip:g}"
    if name == "cispo" and objective.dual_clip is not None:
        yield "--dual-clip has no effect with --objective cispo, which clips every weight; leave it out"
    if objective.ppo_epochs > 1 and name in ("sft", "dpo"):
        yield f"--ppo-epochs {objective.ppo_epochs} has no effect with --objective {name}; leave it out"
    yield from _check_critic(config)
    yield from _check_filters(config, sampled)


def _check_critic(config: TrainConfig) -> Iterator[str]:
    if config.objective.objective != "ppo":
        return
    if config.objective.advantage_estimator != "grpo" or config.objective.disable_grpo_std_normalization:
        flag = "--advantage-estimator" if config.objective.advantage_estimator != "grpo" else ""
        flag = flag or "--disable-grpo-std-normalization"
        yield f"{flag} has no effect with --objective ppo, whose critic estimates advantages; leave it out"
    if config.objective.leaf_weights in ("advantages", "both"):
        yield (
            f"--leaf-weights {config.objective.leaf_weights} weights the means of groups, which --objective ppo does "
            "not use; give loss or leave it out"
        )
    steps = config.critic.num_critic_only_steps
    if steps and steps >= config.optimization.train_iters:
        yield f"--num-critic-only-steps {steps} is not below --train-iters; the policy would never train"


def _check_filters(config: TrainConfig, sampled: bool) -> Iterator[str]:
    filtering, sampling = config.filtering, config.sampling
    length = filtering.overlong_buffer_len
    if length is not None and sampled and length > sampling.rollout_max_response_len:
        yield (
            f"--overlong-buffer-len {length} is more than --rollout-max-response-len "
            f"{sampling.rollout_max_response_len}; lower it"
        )
    if filtering.dynamic_sampling and sampling.over_sampling_batch_size is not None:
        yield ("--dynamic-sampling and --over-sampling-batch-size both replace prompts of one reward; keep one of them")
    if filtering.dynamic_sampling and sampling.n_samples_per_prompt == 1:
        yield (
            "--dynamic-sampling would drop every group: a single rollout cannot differ; raise --n-samples-per-prompt"
        )
    if filtering.rejection_sampling == "threshold" and filtering.rejection_reward_threshold is None:
        yield "--rejection-sampling threshold needs --rejection-reward-threshold"
