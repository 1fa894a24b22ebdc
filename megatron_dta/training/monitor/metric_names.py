"""Every metric of a training step, by name, with what it means: the source of ``docs/reference.md``.

A metric that is not listed here fails the tests. ``{n}``, ``{class}`` and ``{name}`` stand for a number, a length class
and a name of the user's; what an evaluation measures has the same name behind ``eval_``. Everything under ``timing``
depends on the clock or the machine, so two equal runs may differ in it.
"""

from __future__ import annotations

import re

METRICS: dict[str, dict[str, str]] = {
    "The step": {
        "iteration": "optimizer steps done, this one included; 0 is the evaluation before the first",
        "loss": "the loss that was minimized, with its one denominator over all ranks",
        "grad_norm": "norm of the whole gradient before clipping",
        "learning_rate": "rate that the step used",
        "skipped": "whether the weights were left unchanged: loss or gradient not finite, or an outlier",
        "grad_norm_outlier": "whether the norm was above --grad-norm-outlier-factor times the median",
        "grad_norm_outliers": "such steps so far",
        "collection_step": "optimizer steps since the collection was sampled",
    },
    "Rollouts": {
        "rollouts": "rollouts that the step trains",
        "reward": "mean reward; a trajectory cut into several samples counts once",
        "response_tokens": "mean number of trained tokens of a rollout",
        "decoded_tokens": "tokens sampled for the step's rollouts, those of shared nodes of sampled trees once",
        "collected_rollouts": "rollouts before rejection sampling, or before pairs were chosen",
        "collected_reward": "mean reward of those",
        "weighted_reward": "mean reward of sampled trees, each leaf by its weight: unbiased",
        "effective_leaves": "mean number of evenly weighted leaves that a sampled tree is worth",
        "fallback_leaves": "fraction of leaves grown after their query had run out of paths",
        "sampling_rounds": "rounds of dynamic sampling for the collection",
        "degenerate_responses": "responses of the collection that --rollout-stop-degenerate has ended",
        "uniform_groups": "fraction of the groups whose rewards are all equal; with --dynamic-sampling of all sampled",
        "zero_advantages": "fraction of the rollouts whose advantages are all 0, which teach nothing",
        "ended": "fraction of the collection's sampled responses that ended by themselves",
        "left_out_decoded_tokens": "tokens sampled for groups that dynamic sampling has left out",
        "useful_groups": "groups sampled with --over-sampling-batch-size whose rewards differ",
        "rejected_groups": "groups sampled with it whose rewards are all equal",
        "overlong_penalty": "mean reward lost to --overlong-buffer-len",
        "rollout_staleness": "optimizer steps between the weights that sampled the collection and those it trains",
    },
    "Rewards and environments": {
        "reward/{name}": "mean of what the reward function returned under this name beside the reward",
        "reward_failures": "rewards of the collection that could not be determined; their rollouts were dropped",
        "reward_retries": "requests to reward servers that were sent again",
        "reward_timeouts": "requests to reward servers, or calls of an own function, that took too long",
        "math_timeouts": "responses that math_verify could not judge within its limits of time and memory; reward 0",
        "math_errors": "responses that the package math-verify raised over; their reward is 0",
        "code_timeouts": "programs of code_tests that were stopped; their reward is 0",
        "code_unisolated": "programs that ran with limits alone: neither user namespaces nor bwrap work there",
        "tool_calls": "calls of tools, of environments that derive from ToolEnvironment",
        "tool_errors": "of these, those that were answered with an error: the call was wrong, or the tool raised",
        "environment_steps": "steps of environments",
        "environment_failures": "steps that raised or took too long",
        "environment_timeouts": "of these, those that took too long",
    },
    "The policy's loss": {
        "ratio": "importance ratio of the surrogate, mean over trained tokens",
        "ratio_max": "the largest",
        "clip_fraction": "fraction of tokens (of sequences for gspo) whose gradient a clip has cut",
        "approx_kl": "KL(old, present), estimated from the ratio",
        "entropy": "entropy of the next-token distribution at trained tokens",
        "ref_kl": "KL to the reference in the loss, by --kl-loss-type",
        "kl_penalty": "what a response has lost of its reward to --kl-coef, mean",
        "tis_weight": "weights of --use-tis, mean",
        "tis_clip_fraction": "fraction of them outside of their bounds",
        "dpo_margin": "implicit reward of the chosen over that of the rejected, mean over pairs",
        "dpo_accuracy": "fraction of pairs whose margin is above 0",
        "dpo_chosen_reward": "implicit reward of the chosen",
        "dpo_rejected_reward": "implicit reward of the rejected",
        "seq_load_balancing_loss": "balancing loss of the experts, of single sequences",
        "z_loss": "z-loss of the routers",
    },
    "The critic": {
        "value_loss": "loss of the critic",
        "value": "mean value at trained tokens",
        "return": "mean return at trained tokens",
        "value_clip_fraction": "fraction of values that --value-clip has cut",
        "explained_variance": "1 - Var(return - value) / Var(return)",
        "critic_grad_norm": "norm of the critic's gradient before clipping",
        "critic_learning_rate": "the critic's rate",
        "critic_skipped": "whether the critic's step was skipped",
        "critic_seq_load_balancing_loss": "balancing loss of the critic's experts, of single sequences",
        "critic_z_loss": "z-loss of the critic's routers",
    },
    "Sampler and trainer": {
        "sampler_logprob_gap": "mean |trainer's - sampler's logprob| of trained tokens",
        "sampler_logprob_gap_max": "the largest",
        "sampler_probability_ratio": "exp of the mean; 1 where both agree",
        "sampler_mismatch_alarm": "whether it is above --sampler-mismatch-alarm, on the weights that sampled",
        "sampler_mismatch_alarms": "alarms so far",
    },
    "Trees and segments": {
        "routing_replaced": "fraction of the sampler's choices of experts that gave way to those of another rollout "
        "through the same token, with --moe-routing-replay",
        "tokens": "tokens of all sequences of the step, as training them one by one would compute",
        "unique_tokens": "tokens of the forests, which were computed",
        "token_reuse": "the former over the latter",
        "tree_tflop": "operations of forward and backward over the forests, in 10^12 (planning/step/flops.py)",
        "dense_tflop": "the same of all sequences one by one",
        "separated_tokens": "tokens that the steps of the collection compute beyond computing each once, since "
        "--num-steps-per-rollout separates rollouts that share them; data-parallel ranks apart",
        "segments": "forwards of the step, over all data-parallel ranks",
        "peak_in_flight_tokens": "most tokens in flight",
        "recomputed_tokens": "tokens of segments whose forward ran twice, on the pipeline stage with most",
    },
    "Evaluation (behind eval_)": {
        "reward": "mean reward on held-out prompts",
        "response_tokens": "mean number of sampled tokens",
        "ended": "fraction of responses that ended by themselves",
        "pass@{k}": "probability that one of k responses has a reward above 0.5, with --n-samples-per-eval-prompt",
        "loss": "mean negative logprob of trained tokens of held-out rollouts",
    },
    "Time (under timing)": {
        "step_seconds": "all of the step, without evaluation and saving",
        "collect_seconds": "sampling, or waiting for rollouts",
        "prepare_seconds": "old and reference logprobs, values, advantages",
        "logprobs_seconds": "passes for old and reference logprobs and values; part of prepare_seconds",
        "plan_seconds": "trees, segments, op lists; part of prepare_seconds where that needs the plan",
        "train_seconds": "forward, losses, backward",
        "update_seconds": "reduction of gradients, clipping, optimizer",
        "critic_seconds": "all of the critic's step",
        "evaluate_seconds": "evaluation",
        "tokens_per_second": "tokens of all sequences over the seconds of plan, train, update and critic",
        "unique_tokens_per_second": "tokens that were computed over the same",
        "sampled_tokens_per_second": "sampled tokens over collect_seconds",
        "rollout_servers": "servers that are left",
        "rollout_retried_requests": "requests to servers that were sent again, since the process began",
        "rollout_moved_requests": "requests that another server took over, since the process began",
        "rollout_decoded_tokens": "tokens that servers or recordings have given, since the process began",
        "rollout_reused_tokens": "prompt tokens that servers had in their cache, since the process began",
        "peak_memory_gib": "most memory that tensors took on the first rank's GPU since the step before",
        "rank_train_seconds": "train_seconds of every data-parallel rank, a list",
        "rank_balance": "their mean over the largest: 1 where ranks are alike",
    },
    "Drafts (under timing)": {
        "speculation_tokens_per_forward": "tokens for each step of a sequence; 1 without drafts",
        "speculation_tokens_per_forward_longest_4": "the same of the four longest samples",
        "speculation_tokens_per_forward_{class}": "the same of the samples of a length class",
        "speculation_tokens_per_forward_decile_{n}": "the same of each tenth of the samples, shortest first",
        "speculation_forwards": "forward passes",
        "speculation_plain_forwards": "forward passes that the same samples would have taken without drafts",
        "speculation_saved_forwards": "the difference",
        "speculation_saved_seconds": "about what those would have taken",
        "speculation_cost_seconds": "what drafts have cost: passes that took longer, and the host's work",
        "speculation_generated_tokens": "tokens that servers which draft have sampled",
        "speculation_makespan_seconds": "their seconds, from the first to the end of the longest sample",
        "speculation_live_batch_tenth_{n}": "mean number of live sequences in each tenth of these seconds",
        "speculation_drafted_tokens": "tokens that were drafted",
        "speculation_accepted_tokens": "drafted tokens that were what was sampled",
        "speculation_wasted_tokens": "the others",
        "speculation_wasted_tokens_{class}": "the others of the samples of a length class",
        "speculation_wasted_tokens_decile_{n}": "the others of each tenth of the samples, shortest first",
        "speculation_acceptance": "accepted over drafted",
        "speculation_draft_queries": "times that the trees were asked",
        "speculation_draft_seconds": "seconds spent in them, while the device waits",
        "speculation_hidden_seconds": "seconds of filling them beside a device that runs",
        "speculation_drafter_bytes": "memory of the trees",
        "speculation_drafter_tokens": "tokens in the trees",
    },
}
_HOLES = {"{n}": r"\d+", "{k}": r"\d+", "{class}": "[a-z]+", "{name}": ".+"}


def is_known(name: str) -> bool:
    """Whether a metric is listed; ``timing/NAME`` for those under timing."""
    topics = [topic for topic in METRICS if topic.endswith("(under timing)")]
    if name.startswith("timing/"):
        return _matches(name.removeprefix("timing/"), topics)
    topics = [topic for topic in METRICS if topic not in topics and not topic.startswith("Evaluation")]
    if name.startswith("eval_"):
        # A reward that fails is counted in an evaluation, too.
        return _matches(name.removeprefix("eval_"), ["Evaluation (behind eval_)", "Rewards and environments"])
    return _matches(name, topics)


def _matches(name: str, topics: list[str]) -> bool:
    return any(re.fullmatch(_pattern(known), name) for topic in topics for known in METRICS[topic])


def _pattern(known: str) -> str:
    for hole, pattern in _HOLES.items():
        known = known.replace(hole, pattern)
    return known
