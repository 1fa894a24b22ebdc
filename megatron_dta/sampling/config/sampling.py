"""Settings of sampling: prompts, responses, rewards, environments, and filters of groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import NO_FLAG, option

text_option = partial(option, needs="prompt_data or rollouts")
sampled_option = partial(option, needs="prompt_data or task")
server_option = partial(option, needs="rollout_engine=vllm,sglang")
code_option = partial(option, needs="reward_function=code_tests")


@dataclass
class SamplingConfig:
    """Prompts and sampling. Training uses the sampling temperature for rollouts of every source."""

    prompt_data: list[str] | None = option(None, "Files of prompts to sample rollouts for (.jsonl, .parquet).")
    eval_prompt_data: list[str] | None = option(
        None,
        "Held-out prompts (.jsonl, .parquet); their mean reward is reported.",
        needs=("prompt_data", "eval_interval"),
    )
    input_key: str | None = text_option(
        None,
        "Field of the files that contains the prompt, or the conversation for --objective sft; a.b is field b of "
        "field a (default: prompt, question or prompt_token_ids; messages for conversations).",
    )
    label_key: str | None = text_option(
        None,
        "Field that contains the answer with which rewards compare, or the response in text for --objective sft "
        "(default: answer, or ground_truth in verl's reward_model; response or completion).",
    )
    filter_overlong_prompts: bool = option(
        False,
        "Leave out prompts longer than --max-position-embeddings minus --rollout-max-response-len and report how many"
        " there are, instead of refusing their file.",
        needs="prompt_data",
    )
    task: str | None = option(
        None,
        "Built-in task that supplies prompts, held-out prompts, tokenizer and reward instead of files.",
        choices=("arithmetic",),
    )
    arithmetic_max_operand: int = option(99, "Largest operand of the arithmetic task.", minimum=1, needs="task")
    reward_function: str | None = option(
        None,
        "Reward: exact_match, math_verify, code_tests (runs the program in the response), remote (asks a server), or "
        "a function of your own as FILE.py:NAME.",
        needs="prompt_data",
    )
    tokenizer_type: str | None = text_option(
        None,
        "Tokenizer of prompts and of text in --rollouts.",
        choices=("CharacterTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = text_option(None, "File of the tokenizer.")
    apply_chat_template: bool = option(
        False,
        "Format prompts with the chat template stored with the tokenizer, up to the start of the model's turn. "
        "Prompts are messages, or text that becomes one user message. Needs the package transformers.",
        needs="tokenizer_type=HuggingFaceTokenizer",
    )
    apply_chat_template_kwargs: str | None = option(
        None,
        "Additional variables of the chat template, as a JSON object such as '{\"enable_thinking\": false}'.",
        needs="apply_chat_template",
    )
    chat_template_date: str | None = option(
        None,
        "Date that the chat template writes, as 2026-01-31 or 2026-01-31T12:00:00 (default: the time at which the run "
        "began; a continued run keeps it).",
        needs="apply_chat_template",
        flag=NO_FLAG,
    )
    eos_id: list[int] | None = option(
        None,
        "Tokens that end a response; the first one ends text that is trained (default: the tokenizer's, and those of "
        "generation_config.json beside it or in --load-hf).",
        minimum=0,
        needs="prompt_data or rollouts",
    )
    rollout_batch_size: int = sampled_option(16, "Prompts per rollout batch.", minimum=1)
    over_sampling_batch_size: int | None = sampled_option(
        None,
        "Sample this many prompts instead, and train the first --rollout-batch-size of them whose rewards differ.",
        minimum=1,
    )
    n_samples_per_prompt: int = sampled_option(
        8, "Rollouts per prompt; they form the group in which advantages are normalized.", minimum=1
    )
    temperature: float = option(
        1.0, "Temperature of sampling, and of the logprobs that training uses.", flag="--rollout-temperature", above=0
    )
    rollout_top_p: float = sampled_option(
        1.0, "Sample from the most likely tokens that together have this probability.", above=0, maximum=1
    )
    num_steps_per_rollout: int = option(
        1,
        "Optimizer steps per batch of sampled rollouts; each step trains whole groups, divided along the tree.",
        minimum=1,
    )
    rollout_max_response_len: int = sampled_option(64, "Maximum number of tokens sampled per rollout.", minimum=1)
    eval_temperature: float | None = option(
        None,
        "Temperature in evaluation; 0 is greedy (default: --rollout-temperature).",
        minimum=0,
        needs=("eval_interval", "eval_prompt_data or task"),
    )
    rollout_engine: str = sampled_option(
        "in-process",
        "Source of rollouts: the training weights in this process, or servers of vLLM or SGLang.",
        choices=("in-process", "vllm", "sglang"),
    )
    rollout_server_url: list[str] | None = option(
        None,
        "Servers of --rollout-engine vllm or sglang, such as http://HOST:PORT; requests are distributed over them.",
        needs="rollout_engine=vllm,sglang",
    )
    rollout_timeout: float = option(
        600.0,
        "Timeout in seconds for one request to a rollout server or a served teacher, or one weight update.",
        above=0,
        needs="rollout_engine=vllm,sglang or teacher_load_hf",
    )
    rollout_attempts: int = option(
        6,
        "Attempts per request, over all rollout servers together or to a served teacher, before the step fails.",
        minimum=1,
        needs="rollout_engine=vllm,sglang or teacher_load_hf",
    )
    rollout_failure: str | None = option(
        None,
        "What happens when a reward function or its server, a step of an environment, or an agent fails or exceeds its "
        "timeout: the run stops (stop), or the rollout is counted and left out of training and of its group (drop) "
        "(default: drop for agents, else stop). A failure is never taken as a reward of 0.",
        choices=("stop", "drop"),
        needs="reward_function or environment or agent_command or agent_callable",
    )
    rollout_weights_dir: str | None = server_option(
        None,
        "Folder through which the servers receive new weights; they must see it under the same path (default: "
        "rollout-weights in --save).",
    )
    rollout_weight_transfer: str = server_option(
        "folder",
        "How servers receive new weights: from a folder that both can access; through a process group that the first "
        "rank shares with them, over NCCL or, with SGLang on CPUs, gloo; or, with vLLM on the trainer's own GPUs, from "
        "memory that both map (CUDA IPC).",
        choices=("folder", "nccl", "gloo", "ipc"),
    )
    rollout_max_staleness: int = server_option(
        0,
        "Sample ahead while training, without a break between rollout batches: maximum number of optimizer steps from "
        "the weights that sampled a token to the first step that trains it. Servers get new weights while they sample, "
        "unfinished rollouts continue on these, and tokens keep their version. With 0 sampling and training alternate.",
        minimum=0,
    )
    inference_max_requests: int | None = option(
        None,
        "Maximum number of sequences decoded at once, or sent to one server; does not change the samples (default: 256 "
        "on a server; in-process what surely fits into the K/V cache, at least 256, at most 4096 or, with more than "
        "65,536 positions or with latent attention, 1024; 256 with recurrent layers).",
        minimum=1,
        needs="prompt_data or task",
    )
    inference_dynamic_batching_buffer_size_gb: float | None = option(
        None,
        "Size of the K/V cache in GiB on each rank; sequences that do not fit wait (default: as much as is needed, on"
        " a GPU at most the memory that is free when sampling starts, less what a forward pass needs and a margin).",
        above=0,
        flag=NO_FLAG,
    )
    rollout_cuda_graphs: bool | None = option(
        None,
        "Decode in CUDA graphs, which does not change the samples (default: where it is possible).",
        flag=NO_FLAG,
    )
    n_samples_per_eval_prompt: int = option(
        1, "Rollouts per held-out prompt.", minimum=1, needs="eval_prompt_data or task"
    )


@dataclass
class FilterConfig:
    """Dynamic sampling and overlong shaping (DAPO, arXiv 2503.14476); rejection sampling for supervised training."""

    dynamic_sampling: bool = sampled_option(
        False, "Drop groups whose rewards are all equal and sample other prompts in their place."
    )
    dynamic_sampling_max_rounds: int = option(
        3,
        "Maximum number of sampling rounds per rollout batch; a batch that is still incomplete after them is smaller.",
        minimum=1,
        needs="dynamic_sampling",
    )
    overlong_buffer_len: int | None = sampled_option(
        None,
        "Number of tokens before --rollout-max-response-len over which a response loses reward, linearly up to "
        "1 at the maximum (default: no penalty).",
        minimum=1,
    )
    rejection_sampling: str | None = option(
        None,
        "With --objective sft: train only the best rollout of each group, or all rollouts that reach "
        "--rejection-reward-threshold.",
        choices=("best", "threshold"),
        needs="objective=sft",
    )
    rejection_reward_threshold: float | None = option(
        None,
        "Minimum reward of a trained rollout; with best, a group whose best rollout is below it is left out.",
        needs="rejection_sampling",
    )


@dataclass
class RewardConfig:
    """Settings of rewards, and of the reward functions code_tests and remote."""

    reward_server_url: list[str] | None = option(
        None,
        "Servers of --reward-function remote, such as http://HOST:PORT/PATH; requests alternate between them.",
        needs="reward_function=remote",
    )
    reward_timeout: float | None = option(
        None,
        "Timeout in seconds for one request to a reward server or one step of an environment (default: 60), or for "
        "your own function on one response (default: no limit; with a limit it runs in a thread).",
        above=0,
        needs=("reward_function or environment", "reward_function!=exact_match,math_verify,code_tests"),
    )
    code_timeout: float = code_option(
        5.0,
        "CPU time in seconds for each test of a program of --reward-function code_tests; a program that waits for "
        "about twice this time is stopped too.",
        above=0,
    )
    code_memory_mb: int = code_option(
        1024,
        "Memory in MiB for a program of --reward-function code_tests, and for its files.",
        minimum=64,
        flag=NO_FLAG,
    )
    code_processes: int = code_option(
        8,
        "Maximum number of processes and threads of a program of --reward-function code_tests.",
        minimum=1,
        flag=NO_FLAG,
    )
    code_sandbox_url: list[str] | None = option(
        None,
        "Servers with the API of SandboxFusion that run the programs of --reward-function code_tests, such as "
        "http://HOST:PORT/run_code; requests alternate between them (default: programs run here, in bubblewrap).",
        needs="reward_function=code_tests",
    )
    code_unconfined: bool = code_option(
        False,
        "Where bubblewrap does not work, run the programs of --reward-function code_tests with resource limits only: "
        "they can do what this user can.",
    )


@dataclass
class EnvironmentConfig:
    """Settings of ``megatron_dta.sampling.environment``."""

    environment: str | None = sampled_option(
        None,
        "Class whose methods reset and step answer the model's turns and give the rewards: FILE.py:NAME or a dotted "
        "name.",
    )
