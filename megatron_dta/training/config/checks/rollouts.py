"""Checks the settings of rollout engines, rewards and speculation."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.sampling.config.speculation import SpeculationConfig
from megatron_dta.training.config.train import TrainConfig

SERVERS = ("vllm", "sglang")


def samples(config: TrainConfig) -> bool:
    """Whether rollouts are sampled instead of read from files."""
    return bool(config.sampling.prompt_data or config.sampling.task)


def check_rollout_engine(config: TrainConfig) -> Iterator[str]:
    """Yield a line for every missing requirement of the engine and for a staleness that is impossible."""
    sampling, checkpoint = config.sampling, config.checkpoint
    engine = sampling.rollout_engine
    if not samples(config):
        return
    if config.model.batch_invariant_mode and (engine in SERVERS or config.agent.is_used):
        yield "--batch-invariant-mode is for --rollout-engine in-process without agents; leave one of them out"
    if engine in SERVERS:
        if not sampling.rollout_server_url:
            yield f"--rollout-engine {engine} needs --rollout-server-url http://HOST:PORT"
        if checkpoint.load_hf is None and checkpoint.hf_checkpoint is None:
            yield (
                f"--rollout-engine {engine} needs --load-hf or --hf-checkpoint: the servers receive new weights in "
                "Hugging Face format, with its configuration"
            )
        yield from _check_weight_transfer(config)
        tempered = sampling.temperature != 1 and sampling.rollout_top_p < 1
        if engine == "vllm" and tempered and config.objective.needs_rollout_logprobs:
            fix = "add --old-logprobs recompute"
            if config.objective.old_logprobs != "rollout":
                fix = "leave out --use-tis"
            yield (
                f"--rollout-temperature {sampling.temperature:g} and --rollout-top-p {sampling.rollout_top_p:g}: vLLM "
                f"returns no logprobs of the tempered softmax before the nucleus; {fix}"
            )
    if sampling.reward_function == "remote" and not config.reward.reward_server_url:
        yield "--reward-function remote needs --reward-server-url http://HOST:PORT/PATH"
    if config.model.moe_routing_replay and engine not in SERVERS:
        yield "--moe-routing-replay needs --rollouts, or --rollout-engine vllm or sglang, which return experts"
    if config.model.moe_routing_replay:
        for flag, is_set in (
            ("--rollout-method treepo", config.treepo.rollout_method == "treepo"),
            ("--agent-command and --agent-callable", config.agent.is_used),
        ):
            if is_set:
                yield f"--moe-routing-replay conflicts with {flag}, which do not collect experts; leave one of them out"
    if sampling.rollout_failure == "drop" and config.treepo.rollout_method == "treepo":
        yield (
            "--rollout-failure drop would remove leaves from sampled trees, whose leaves are compared; leave it out "
            "with --rollout-method treepo"
        )
    if engine in SERVERS and config.speculation.rollout_speculation == "das":
        yield (
            f"--rollout-speculation das drafts in this process, but --rollout-engine {engine} samples on servers; "
            "leave it out here and give it to rollout-server-command: servers draft by themselves"
        )
    yield from _check_draft_length(config.speculation)
    if sampling.rollout_max_staleness:
        yield from _check_staleness(config)
    if config.speculation.rollout_stop_degenerate:
        if config.treepo.rollout_method == "treepo":
            yield (
                "--rollout-stop-degenerate ends whole responses, but --rollout-method treepo requests segments; "
                "leave it out"
            )
        if config.environment.environment is not None:
            yield ("--rollout-stop-degenerate ends whole responses, but --environment requests turns; leave it out")


def _check_weight_transfer(config: TrainConfig) -> Iterator[str]:
    sampling = config.sampling
    way, engine = sampling.rollout_weight_transfer, sampling.rollout_engine
    if way == "folder" and sampling.rollout_weights_dir is None and config.checkpoint.save is None:
        yield f"--rollout-engine {engine} needs --rollout-weights-dir (or --save), a folder visible to the servers"
    if way != "folder" and sampling.rollout_weights_dir is not None:
        yield f"--rollout-weights-dir has no effect on --rollout-weight-transfer {way}; leave it out"
    if way == "gloo" and engine == "vllm":
        yield ("--rollout-weight-transfer gloo: vLLM's weight transfer is over NCCL; give nccl, or folder on CPUs")
    if way == "ipc" and engine == "sglang":
        yield (
            "--rollout-weight-transfer ipc: SGLang does not say when it has copied out of the shared memory; give nccl "
            "on other GPUs, or folder"
        )


def _check_draft_length(speculation: SpeculationConfig) -> Iterator[str]:
    """Yield a line for a given draft length that ``das_depth`` rules out; the default length is reduced silently."""
    tokens, depth = speculation.das_draft_tokens, speculation.das_depth
    if tokens >= depth and tokens != SpeculationConfig().das_draft_tokens:
        yield (
            f"--das-draft-tokens {tokens} is not below --das-depth {depth}, the tokens of a match and its draft "
            f"together; raise that to at least {tokens + 1}"
        )


def _check_staleness(config: TrainConfig) -> Iterator[str]:
    sampling, bound = config.sampling, config.sampling.rollout_max_staleness
    if sampling.rollout_engine == "in-process":
        yield (
            f"--rollout-max-staleness {bound} needs --rollout-engine vllm or sglang: the engine in this process "
            "samples from the weights that are being trained"
        )
    if config.objective.old_logprobs != "rollout" and not config.objective.use_tis:
        yield (
            f"--rollout-max-staleness {bound} with --old-logprobs {config.objective.old_logprobs} takes old logprobs "
            "from newer weights than those that sampled; add --use-tis, which weights tokens by the difference between "
            "(decoupled PPO), or leave --old-logprobs out"
        )
    if bound < sampling.num_steps_per_rollout:
        yield (
            f"--rollout-max-staleness {bound} is below --num-steps-per-rollout {sampling.num_steps_per_rollout}, so no "
            f"rollout batch could be sampled ahead; raise it to {sampling.num_steps_per_rollout} or leave it out"
        )
    for flag, is_set in (
        ("--rollout-method treepo", config.treepo.rollout_method == "treepo"),
        ("--environment", config.environment.environment is not None),
        ("--agent-command and --agent-callable", config.agent.is_used),
        ("--dynamic-sampling", config.filtering.dynamic_sampling),
        ("--over-sampling-batch-size", sampling.over_sampling_batch_size is not None),
        ("--overlong-buffer-len", config.filtering.overlong_buffer_len is not None),
        ("--moe-routing-replay", config.model.moe_routing_replay),
    ):
        if is_set:
            yield (
                f"--rollout-max-staleness {bound} samples independent rollouts and conflicts with {flag}; leave one of "
                "them out"
            )
