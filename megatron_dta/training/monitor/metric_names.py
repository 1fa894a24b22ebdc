"""Lists every metric of a training step with its meaning; ``docs/reference.md`` is generated from this list.

The tests fail on metrics that are not listed. ``{k}`` and ``{name}`` stand for a number and a name
chosen by the user. Metrics of an evaluation have the prefix ``eval_``. Everything under ``timing`` depends
on the clock or the machine, so it may differ between two equal runs.
"""

from __future__ import annotations

import re

METRICS: dict[str, dict[str, str]] = {
    "The step": {
        "iteration": "completed optimizer steps, including this one; 0 is the evaluation before the first step",
        "loss": "the minimized loss, normalized by one denominator over all ranks",
        "grad_norm": "norm of the whole gradient before clipping",
        "learning_rate": "learning rate of the step",
        "skipped": "whether the weights were left unchanged: loss or gradient not finite",
        "rollout_batch_step": "optimizer steps since the rollout batch was sampled",
    },
    "Rollouts": {
        "rollouts": "number of rollouts that the step trains",
        "reward": "mean reward; a trajectory cut into several samples counts once",
        "response_tokens": "mean number of trained tokens per rollout",
        "decoded_tokens": "tokens sampled for the step's rollouts; shared nodes of sampled trees count once",
        "collected_rollouts": "number of rollouts before rejection sampling or before pairs were chosen",
        "collected_reward": "mean reward of these rollouts",
        "weighted_reward": "mean reward of sampled trees with each leaf weighted; an unbiased estimate",
        "effective_leaves": "mean effective number of leaves per sampled tree, given their weights",
        "fallback_leaves": "fraction of leaves that were grown after their query had run out of paths",
        "sampling_rounds": "rounds of dynamic sampling for the rollout batch",
        "degenerate_responses": "responses of the rollout batch that --rollout-stop-degenerate stopped",
        "uniform_groups": "fraction of groups with equal rewards; with --dynamic-sampling, of all sampled groups",
        "zero_advantages": "fraction of rollouts whose advantages are all 0, so that they contribute no gradient",
        "ended": "fraction of the rollout batch's sampled responses that ended by themselves",
        "left_out_decoded_tokens": "tokens sampled for groups that dynamic sampling discarded",
        "failed_decoded_tokens": "tokens sampled for rollouts that failed (--rollout-failure drop)",
        "useful_groups": "number of groups with differing rewards, with --over-sampling-batch-size",
        "rejected_groups": "number of groups whose rewards are all equal, with --over-sampling-batch-size",
        "overlong_penalty": "mean reward subtracted because of --overlong-buffer-len",
        "rollout_staleness": "optimizer steps between the weights that sampled the batch and those being trained",
        "token_staleness": "rollouts sampled ahead: the same for each trained token, averaged over the rollout batch",
        "mixed_rollouts": "rollouts sampled ahead: fraction of the batch's rollouts that several versions sampled",
        "stale_rollouts": "rollouts sampled ahead: rollouts dropped since the last batch because they were too old",
        "failed_groups": "rollouts sampled ahead: groups dropped since the last batch because all their rewards failed",
        "unfinished_groups": "rollouts sampled ahead: groups being sampled or scored when the batch was taken",
    },
    "Rewards and environments": {
        "reward/{name}": "mean of an additional value that the reward function returned under this name",
        "reward_failures": "rewards of the rollout batch that could not be determined; their rollouts were dropped",
        "reward_retries": "repeated requests to reward servers",
        "reward_timeouts": "requests to reward servers, or calls of a user's reward function, that timed out",
        "math_timeouts": "responses that math_verify could not judge within its time and memory limits; reward 0",
        "math_errors": "responses on which the package math-verify raised an error; their reward is 0",
        "code_timeouts": "programs of code_tests that were stopped; their reward is 0",
        "tool_calls": "tool calls in environments that derive from ToolEnvironment",
        "tool_errors": "tool calls that were answered with an error, because the call was invalid or the tool raised",
        "environment_steps": "environment steps",
        "environment_failures": "environment steps that raised an error or timed out",
        "environment_timeouts": "environment steps that timed out",
        "observation_border_crossings": "observations where a token of the whole text would cross the border to the "
        "turn before; the two sides are encoded apart",
    },
    "Agents": {
        "sessions": "sessions of agents in the rollout batch",
        "failed_sessions": "sessions whose agent failed or that nobody rewarded; they are not trained",
        "agent_timeouts": "agents that were stopped at --agent-timeout; they count as failed",
        "agent_calls": "calls that the gateway answered",
        "abandoned_calls": "calls whose clients did not wait for the answer; the answers are not trained",
        "session_border_crossings": "prompts that continue known text where a token of the whole text would cross the "
        "border; the two sides are encoded apart",
        "session_branches": "mean number of branches (leaves) of a session's tree",
        "session_tokens": "tokens of all sessions' trees, each stored once",
        "session_row_tokens": "tokens if every call were trained as a row of prompt and answer",
        "session_reuse": "fraction of the prompts' tokens that the session had already; they are not tokenized again",
        "branches_again": "branches that ask the same prompt once more: retries, `n`",
        "branches_tools": "branches that offer other tools than the conversations before",
        "branches_system": "branches with another system prompt: sub-agents, titles, a date or time in the prompt",
        "branches_history": "branches where a message of the user or a tool differs or is gone: compaction, edits",
        "branches_answer": "branches where the client sent an answer back changed, such as a tool call as text",
        "branches_stop": "branches after an answer without the stop string that ended it",
        "branches_template": "branches where the chat template writes an earlier answer differently, such as without "
        "its reasoning",
        "branches_text": "branches of prompts that are text or ids",
    },
    "The policy's loss": {
        "ratio": "importance ratio of the surrogate, mean over trained tokens",
        "ratio_max": "largest importance ratio",
        "ratio_bounded": "fraction of tokens whose recorded logprob is more than 20 from the trainer's",
        "clip_fraction": "fraction of tokens (of sequences for gspo) whose gradient was clipped",
        "approx_kl": "KL(old, current), estimated from the ratio",
        "entropy": "entropy of the next-token distribution at trained tokens",
        "ref_kl": "KL to the reference in the loss, by --kl-loss-type",
        "teacher_kl": "mean reverse KL divergence from the teacher, over the vocabulary or estimated from the samples",
        "kl_penalty": "mean reward that a response lost to --kl-coef",
        "tis_weight": "mean weight of --use-tis",
        "tis_clip_fraction": "fraction of these weights outside their bounds",
        "dpo_margin": "implicit reward of the chosen response minus that of the rejected one, mean over pairs",
        "dpo_accuracy": "fraction of pairs with a positive margin",
        "dpo_chosen_reward": "implicit reward of the chosen responses",
        "dpo_rejected_reward": "implicit reward of the rejected responses",
        "seq_load_balancing_loss": "load balancing loss of the experts, computed per sequence",
        "z_loss": "z-loss of the routers",
    },
    "The critic": {
        "value_loss": "loss of the critic",
        "value": "mean value at trained tokens",
        "return": "mean return at trained tokens",
        "value_clip_fraction": "fraction of values that --value-clip clipped",
        "explained_variance": "1 - Var(return - value) / Var(return)",
        "critic_grad_norm": "norm of the critic's gradient before clipping",
        "critic_learning_rate": "the critic's learning rate",
        "critic_skipped": "whether the critic's step was skipped",
        "critic_seq_load_balancing_loss": "load balancing loss of the critic's experts, computed per sequence",
        "critic_z_loss": "z-loss of the critic's routers",
    },
    "Sampler and trainer": {
        "sampler_logprob_gap": "mean |trainer's - sampler's logprob| over trained tokens",
        "sampler_logprob_gap_max": "largest |trainer's - sampler's logprob|",
        "sampler_probability_ratio": "exp(sampler_logprob_gap); 1 if sampler and trainer agree",
    },
    "Trees and segments": {
        "routing_replaced": "fraction of the sampler's expert choices that were replaced by those of another rollout "
        "through the same token, with --moe-routing-replay",
        "routing_forked_tokens": "unique tokens with --moe-routing-replay fork over those with first",
        "tokens": "tokens of all sequences of the step; training without sharing would compute these",
        "unique_tokens": "tokens of the prefix forests; the engine computed these",
        "token_reuse": "tokens / unique_tokens",
        "tree_tflop": "operations of forward and backward over the forests, in 10^12 (planning/step/flops.py)",
        "dense_tflop": "the same for all sequences one by one",
        "separated_tokens": "tokens computed again because --num-steps-per-rollout puts rollouts that share "
        "them into different steps; duplicates across data-parallel ranks are not counted",
        "segments": "segment forwards of the step, over all data-parallel ranks",
        "peak_in_flight_tokens": "largest number of tokens in flight",
        "recomputed_tokens": "tokens of segments whose forward ran twice, on the pipeline stage with the most",
    },
    "Evaluation (prefix eval_)": {
        "reward": "mean reward on held-out prompts",
        "response_tokens": "mean number of sampled tokens",
        "ended": "fraction of responses that ended by themselves",
        "pass@{k}": "probability that one of k responses has a reward above 0.5, with --n-samples-per-eval-prompt",
        "loss": "mean negative logprob of trained tokens of held-out rollouts",
    },
    "Time (under timing)": {
        "step_seconds": "the whole step without evaluation and saving",
        "collect_seconds": "time to sample rollouts or to wait for them",
        "sampling_seconds": "time of the in-process engine; the rest of collect_seconds is for prompts and rewards",
        "sampling_waiting_seconds": "part of it in which requests waited because as many ran as may",
        "sampling_tail_seconds": "part of it in which less than a quarter of the most requests ran",
        "prepare_seconds": "time for old and reference logprobs, values and advantages",
        "logprobs_seconds": "time of the passes for old and reference logprobs and values; part of prepare_seconds",
        "plan_seconds": "time for trees, segments and op lists; part of prepare_seconds if that needs the plan",
        "train_seconds": "time of forward, losses and backward",
        "update_seconds": "time of gradient reduction, clipping and the optimizer",
        "critic_seconds": "time of the critic's whole step",
        "evaluate_seconds": "time of the evaluation",
        "tokens_per_second": "tokens / (plan_seconds + train_seconds + update_seconds + critic_seconds)",
        "unique_tokens_per_second": "unique_tokens over the same time",
        "sampled_tokens_per_second": "sampled tokens / collect_seconds",
        "rollout_servers": "number of rollout servers still in use",
        "rollout_open_requests": "requests that servers sample or that wait for a place on one",
        "rollout_queued_requests": "those of them that wait, because all servers are full",
        "rollout_retried_requests": "repeated requests to servers since the process started",
        "rollout_rejected_tokens": "ids without text that were sampled and replaced, since the process started",
        "rollout_decoded_tokens": "tokens received from servers or recordings since the process started",
        "rollout_reused_tokens": "prompt tokens that servers found in their caches since the process started",
        "rollout_weight_update_seconds": "time of weight updates of the servers since the process started",
        "peak_memory_gib": "peak memory of tensors on rank 0's GPU since the previous step",
        "rank_train_seconds": "list of every data-parallel rank's train_seconds",
        "rank_balance": "mean of rank_train_seconds / their maximum; 1 if all ranks are equally busy",
    },
    "Drafts (under timing)": {
        "speculation_tokens_per_forward": "tokens per forward pass of a sequence; 1 without drafts",
        "speculation_tokens_per_forward_longest_4": "the same for the four longest samples",
        "speculation_forwards": "number of forward passes",
        "speculation_saved_seconds": "measured seconds of the passes needed without drafts, less those of all rounds",
        "speculation_generated_tokens": "sampled tokens",
        "speculation_makespan_seconds": "seconds of all passes; of servers until the longest sample has ended",
        "speculation_drafted_tokens": "drafted tokens",
        "speculation_accepted_tokens": "drafted tokens that were accepted",
        "speculation_wasted_tokens": "drafted tokens that were rejected",
        "speculation_acceptance": "accepted tokens / drafted tokens",
        "speculation_draft_queries": "number of queries to the suffix trees",
        "speculation_draft_seconds": "time to fill the trees and make the drafts, during which the device waits",
        "speculation_drafter_bytes": "memory of the suffix trees",
        "speculation_drafter_tokens": "tokens in the suffix trees",
    },
}
_HOLES = {"{k}": r"\d+", "{name}": ".+"}


def is_known(name: str) -> bool:
    """Whether a metric is listed; metrics under timing are named ``timing/NAME``."""
    topics = [topic for topic in METRICS if topic.endswith("(under timing)")]
    if name.startswith("timing/"):
        return _matches(name.removeprefix("timing/"), topics)
    topics = [topic for topic in METRICS if topic not in topics and not topic.startswith("Evaluation")]
    if name.startswith("eval_"):
        # Evaluations count reward failures, too.
        return _matches(name.removeprefix("eval_"), ["Evaluation (prefix eval_)", "Rewards and environments", "Agents"])
    return _matches(name, topics)


def _matches(name: str, topics: list[str]) -> bool:
    return any(re.fullmatch(_pattern(known), name) for topic in topics for known in METRICS[topic])


def _pattern(known: str) -> str:
    for hole, pattern in _HOLES.items():
        known = known.replace(hole, pattern)
    return known
