"""Where rollouts come from: stored files, or sampling on the training weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class DataConfig:
    """Stored rollouts and how a step's rollouts are chosen."""

    rollouts: list[str] | None = option(
        None,
        "Train on these stored rollouts (.jsonl, .parquet or .npz), or on text (with --tokenizer-type): conversations "
        "for --objective sft, chosen and rejected answers for --objective dpo (.jsonl, .parquet).",
    )
    eval_rollouts: list[str] | None = option(None, "Held-out stored rollouts; their loss is reported.")
    rollout_framing: str = option(
        "trajectory",
        "One training sample per trajectory, or one per assistant turn.",
        choices=("trajectory", "turn"),
    )
    seq_length: int | None = option(
        None, "Longest training sequence; stored ones are cut (default: --max-position-embeddings).", minimum=2
    )
    global_batch_size: int | None = option(
        None,
        "Rollouts in one optimizer step; groups are kept whole (default when sampling: all those sampled).",
        minimum=1,
    )


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
