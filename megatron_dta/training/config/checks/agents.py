"""Checks the settings of agents and of their gateway."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.training.config.train import TrainConfig


def check_agents(config: TrainConfig) -> Iterator[str]:
    """Yield a line for everything that agents replace or cannot work with."""
    agent, sampling = config.agent, config.sampling
    if not agent.is_used:
        return
    flag = "--agent-command" if agent.agent_command is not None else "--agent-callable"
    if agent.agent_command is not None and agent.agent_callable is not None:
        yield "--agent-command conflicts with --agent-callable; keep one of them"
    if config.environment.environment is not None:
        yield f"{flag} conflicts with --environment: both answer the model's turns; keep one of them"
    if config.treepo.rollout_method == "treepo":
        yield f"{flag} conflicts with --rollout-method treepo: the agent decides where its tree branches"
    if config.speculation.rollout_speculation == "das":
        yield f"--rollout-speculation das drafts for prompts and not for the calls of {flag}; leave it out"
    if config.speculation.rollout_stop_degenerate:
        yield f"--rollout-stop-degenerate ends whole responses, but {flag} samples answers in pieces; leave it out"
    if config.filtering.overlong_buffer_len is not None:
        yield f"--overlong-buffer-len shapes rewards of single responses, not of the sessions of {flag}; leave it out"
    if sampling.rollout_engine == "in-process" and config.parallel.expert_model_parallel_size > 1:
        yield (
            f"{flag} with --expert-model-parallel-size needs --rollout-engine vllm or sglang: replicas that share "
            "experts sample in step, but agents call when they want"
        )
    if config.logging.eval_interval and not sampling.eval_prompt_data:
        yield f"--eval-interval needs --eval-prompt-data with {flag}"
    if sampling.task is not None:
        yield f"--task {sampling.task} has its own prompts, which {flag} cannot use; give --prompt-data"
