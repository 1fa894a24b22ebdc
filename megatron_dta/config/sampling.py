"""Settings of sampling: responses, rewards, environments and which groups are kept."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class SamplingConfig:
    """Sampling on the training weights. Training uses the same temperature, whoever sampled."""

    prompt_data: list[str] | None = option(None, "Sample rollouts for the prompts of these files (.jsonl, .parquet).")
    eval_prompt_data: list[str] | None = option(
        None, "Held-out prompts (.jsonl, .parquet); their mean reward is reported."
    )
    input_key: str | None = option(
        None,
        "Field of the files that holds the prompt, or a conversation for --objective sft; a.b is the field b in a "
        "(default: prompt, question or prompt_token_ids; messages for conversations).",
    )
    label_key: str | None = option(
        None,
        "Field that holds the answer that rewards compare against, or the response of text for --objective sft "
        "(default: answer, or ground_truth in verl's reward_model; response or completion).",
    )
    filter_overlong_prompts: bool = option(
        False,
        "Leave out prompts that are too long for --max-position-embeddings less --rollout-max-response-len, and say "
        "how many, instead of refusing their file.",
    )
    task: str | None = option(
        None, "Built-in task instead of files: prompts, held-out prompts, tokenizer, reward.", choices=("arithmetic",)
    )
    arithmetic_max_operand: int = option(99, "Largest operand of the arithmetic task.", minimum=1)
    arithmetic_operators: str = option("+", "Operators of the arithmetic task: some of + - *, written together.")
    reward_function: str | None = option(
        None,
        "Reward: exact_match, math_verify, code_tests (runs the program in the response), remote (asks a server), or "
        "your own as FILE.py:NAME.",
    )
    tokenizer_type: str | None = option(
        None,
        "Tokenizer of prompts and of text in --rollouts.",
        choices=("CharacterTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = option(None, "File of the tokenizer.")
    apply_chat_template: bool = option(
        False,
        "Prompts are messages (or text, which is one message of the user): write them in the chat template that stands "
        "beside the tokenizer, up to where the model's turn begins. Needs the package transformers.",
    )
    apply_chat_template_kwargs: str | None = option(
        None, "Further variables of the chat template, as a JSON object such as '{\"enable_thinking\": false}'."
    )
    eos_id: int | None = option(None, "Token that ends a response (default: the tokenizer's).", minimum=0)
    rollout_batch_size: int = option(16, "Prompts sampled per collection of rollouts.", minimum=1)
    over_sampling_batch_size: int | None = option(
        None,
        "Sample this many prompts instead, and train the first --rollout-batch-size of them whose rewards differ.",
        minimum=1,
    )
    n_samples_per_prompt: int = option(
        8, "Rollouts per prompt: the group in which advantages are normalized.", minimum=1
    )
    temperature: float = option(
        1.0, "Temperature of sampling, and of the logprobs that training uses.", flag="--rollout-temperature", above=0
    )
    rollout_top_p: float = option(
        1.0, "Sample among the most likely tokens that hold this much probability.", above=0, maximum=1
    )
    num_steps_per_rollout: int = option(
        1,
        "Optimizer steps that one collection of sampled rollouts is divided into: whole groups, cut along the tree.",
        minimum=1,
    )
    rollout_max_response_len: int = option(64, "Most tokens sampled per rollout.", minimum=1)
    eval_temperature: float | None = option(
        None, "Temperature in evaluation, 0 for greedy (default: sampling's).", minimum=0
    )
    rollout_engine: str = option(
        "in-process",
        "What samples: the training weights in this process, servers of vLLM or SGLang, or stored rollouts.",
        choices=("in-process", "vllm", "sglang", "replay"),
    )
    rollout_server_url: list[str] | None = option(
        None, "Servers of --rollout-engine vllm or sglang, like http://HOST:PORT; several share the requests."
    )
    rollout_timeout_seconds: float = option(
        600.0, "A server has so long to answer one request, or to load new weights.", above=0
    )
    rollout_attempts: int = option(
        6, "How often a request that fails is sent, to all servers together, before the step fails.", minimum=1
    )
    rollout_weights_dir: str | None = option(
        None,
        "Folder that the servers see by the same name; new weights are handed over in it (default: rollout-weights in "
        "--save).",
    )
    rollout_max_staleness: int = option(
        0,
        "Sample ahead while training: most optimizer steps between the weights that sampled a rollout and the "
        "first step that trains its collection; 0 takes turns.",
        minimum=0,
    )
    rollout_replay: list[str] | None = option(
        None, "Stored rollouts that --rollout-engine replay answers from, each once (.jsonl, .parquet or .npz)."
    )
    inference_max_requests: int = option(
        256,
        "Most sequences decoded at once, or sent to one server; bounds memory and does not change the samples.",
        minimum=1,
    )
    inference_dynamic_batching_block_size: int = option(
        16, "Positions of a page of the K/V cache; sequences share full pages of a common prefix.", minimum=1
    )
    inference_dynamic_batching_buffer_size_gb: float | None = option(
        None,
        "Memory of the K/V cache in GiB on each rank; sequences that do not fit wait (default: as much as is needed, "
        "on a GPU at most half of what is free when sampling starts).",
        above=0,
    )
    inference_dynamic_batching_max_tokens: int = option(
        4096, "Most tokens of a forward pass of the sampler; longer prompts are computed in chunks.", minimum=1
    )
    rollout_cuda_graphs: bool | None = option(
        None,
        "Decode in CUDA graphs, which does not change the samples; --no-rollout-cuda-graphs does not (default: where "
        "that is possible: one GPU per replica, dense models).",
    )
    n_samples_per_eval_prompt: int = option(1, "Rollouts per held-out prompt.", minimum=1)


@dataclass
class FilterConfig:
    """Dynamic sampling and overlong shaping (DAPO, arXiv 2503.14476), rejection sampling for supervised training."""

    dynamic_sampling: bool = option(False, "Drop groups whose rewards are all equal and sample other prompts for them.")
    dynamic_sampling_max_rounds: int = option(
        3, "Most rounds of sampling for one collection; after the last one it is smaller.", minimum=1
    )
    overlong_buffer_len: int | None = option(
        None,
        "The last tokens before --rollout-max-response-len: a response that ends within them loses reward, linearly up "
        "to --overlong-penalty-factor (default: none does).",
        minimum=1,
    )
    overlong_penalty_factor: float = option(1.0, "Reward that a response of full length loses.", above=0)
    rejection_sampling: str | None = option(
        None,
        "With --objective sft: train only the best rollout of each group, or all with --rejection-reward-threshold.",
        choices=("best", "threshold"),
    )
    rejection_reward_threshold: float | None = option(
        None, "Least reward of a rollout that is trained; with best a group whose best is below it is left out."
    )


@dataclass
class RewardConfig:
    """Settings of ``megatron_dta.sampling.rewards.scoring`` and of the reward functions code_tests and remote."""

    reward_failure: str = option(
        "stop",
        "A reward that cannot be determined (the function raises, the server does not answer) ends the run, or drops "
        "the rollout; it is counted and never taken to be 0.",
        choices=("stop", "drop"),
    )
    reward_workers: int = option(
        8, "Rewards of math_verify, code_tests and remote that are determined at once.", minimum=1
    )
    reward_server_url: list[str] | None = option(
        None, "Servers of --reward-function remote, like http://HOST:PORT/PATH; they take turns."
    )
    reward_timeout_seconds: float | None = option(
        None,
        "A reward server has so long to answer one request (default: 60), and a function of your own for one response "
        "(default: no limit; with one it runs in a thread).",
        above=0,
    )
    reward_attempts: int = option(4, "How often a request to reward servers is sent before it has failed.", minimum=1)
    code_time_seconds: float = option(
        5.0,
        "CPU time of a program of --reward-function code_tests; it is stopped after twice as long in any case.",
        above=0,
    )
    code_memory_mb: int = option(1024, "Address space of such a program, in MiB.", minimum=64)
    code_processes: int = option(8, "Processes and threads that such a program may have.", minimum=1)


@dataclass
class EnvironmentConfig:
    """Settings of ``megatron_dta.sampling.treepo.environment``."""

    environment: str | None = option(
        None,
        "Class whose reset and step answer the model's turns and give the rewards: FILE.py:NAME or a dotted name.",
    )
    environment_max_turns: int | None = option(None, "Most turns of a rollout (default: as many as fit).", minimum=1)
    environment_timeout: float = option(60.0, "Seconds that a step of the environment may take.", above=0)
    environment_workers: int = option(16, "Steps of environments that run at once.", minimum=1)
    environment_failure: str = option(
        "end",
        "A step that raises or takes too long ends its rollout, which is trained with the reward so far (end) or left "
        "out of training and of its group (drop), or stops the run; it is counted.",
        choices=("end", "drop", "stop"),
    )
