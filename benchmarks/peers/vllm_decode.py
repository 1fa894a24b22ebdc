"""Measures how fast vLLM decodes, in this process, for comparison with ``rollout.py decode``.

    python benchmarks/peers/vllm_decode.py [--shape 1.7b] [--batch 64 256] [--prompt-tokens 128] [--response-tokens 128]
        [--logprobs no yes] [--runs 3] [--output FILE.json]

The definitions are those of ``rollout.py decode``. The same requests run with --response-tokens + 1 tokens each and
with --short-tokens each; the difference is the time of decoding, without the passes that compute prompts. No request
ends early, prompts are random token ids, and the prefix cache is off. "share_of_memory_bound" compares a decoding pass
with the time to read the weights and every cached position once. Rows with logprobs also return the logprob of each
sampled token, as rollouts need it; ``rollout.py decode`` always does.

vLLM runs with its defaults (torch.compile, CUDA graphs, asynchronous scheduling) on random weights in bfloat16.
--compilation-config is passed on to it. vLLM must be installed; without FlashInfer set VLLM_USE_FLASHINFER_SAMPLER=0.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.bandwidth import measured_bandwidth
from common.benchmark_model import settings_of
from common.report import Report
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.families.named_shapes import SHAPES
from megatron_dta.training.huggingface.config.config_output import config_from_settings

if TYPE_CHECKING:
    from vllm import LLM

SIZES = ("0.6b", "1.7b", "8b", "14b", "32b")
ITEM_BYTES = 2  # of bfloat16


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--shape", choices=SIZES, default="1.7b")
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256], help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--short-tokens", type=int, default=33, help="of each request in the short runs (default 33)")
    parser.add_argument("--logprobs", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--compilation-config", type=json.loads, help="JSON (default: vLLM's own)")
    parser.add_argument("--memory-bandwidth-gbs", type=float, help="of the data sheet; default: measured by copying")
    parser.add_argument("--runs", type=int, default=3, help="timed runs; medians are reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    for name in ("prompt_tokens", "response_tokens", "short_tokens", "runs"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    if min(arguments.batch) < 1:
        raise InputError(f"--batch must be at least 1, not {min(arguments.batch)}")
    if arguments.short_tokens > arguments.response_tokens:
        raise InputError(f"--short-tokens {arguments.short_tokens} is more than --response-tokens")
    return arguments


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The model that ``rollout.py`` measures under this name."""
    settings = settings_of(SHAPES[f"qwen3-{arguments.shape}"]) | dict(untie_embeddings_and_output_weights=False)
    longest = arguments.prompt_tokens + arguments.response_tokens + 1
    return ModelConfig(**settings, max_position_embeddings=longest, bf16=True)


def build_llm(arguments: argparse.Namespace, folder: Path) -> LLM:
    """vLLM with random weights; ``folder`` gets the model's description.

    Raises:
        InputError: vLLM is not installed, or there is no GPU.
    """
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(f"vLLM cannot be imported ({error}); install it") from error
    if not torch.cuda.is_available():  # asks NVML, as vLLM tells torch: its processes are forked off this one
        raise InputError("vLLM is measured on a GPU, and there is none")
    (folder / "config.json").write_text(json.dumps(config_from_settings(model_config(arguments))), encoding="utf-8")
    compilation = arguments.compilation_config
    return LLM(
        str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max(arguments.batch),
        seed=arguments.seed,
        **({} if compilation is None else {"compilation_config": compilation}),
    )


def seconds_of_run(llm: LLM, prompts: np.ndarray, tokens: int, logprobs: bool) -> float:
    """Seconds of sampling ``tokens`` tokens after each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, ignore_eos=True, max_tokens=tokens, detokenize=False, logprobs=0 if logprobs else None
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    began = time.perf_counter()
    replies = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    short = [len(reply.outputs[0].token_ids) for reply in replies if len(reply.outputs[0].token_ids) != tokens]
    if short or len(replies) != len(prompts):
        raise ValueError(f"{len(short)} of {len(replies)} responses do not have {tokens} tokens")
    return seconds


def bound_seconds(arguments: argparse.Namespace, batch: int, bandwidth: float) -> float:
    """Time to read the weights and, on the mean of the timed passes, every cached position once."""
    model = model_config(arguments)
    shape = SHAPES[f"qwen3-{arguments.shape}"]
    sampled = (arguments.response_tokens + arguments.short_tokens - 1) / 2
    cached = batch * (arguments.prompt_tokens + sampled)
    token_bytes = 2 * model.num_layers * shape.kv_width * ITEM_BYTES
    return (num_parameters(arguments) * ITEM_BYTES + cached * token_bytes) / bandwidth


def num_parameters(arguments: argparse.Namespace) -> int:
    """Of the model with one matrix for embeddings and output."""
    shape = SHAPES[f"qwen3-{arguments.shape}"]
    second = shape.vocab_size * shape.hidden_size if shape.untie_embeddings_and_output_weights else 0
    return shape.num_parameters - second


def measure(arguments: argparse.Namespace, llm: LLM, batch: int, logprobs: bool, bandwidth: float) -> dict[str, Any]:
    """Medians over the timed runs, after one that is not."""
    vocab_size = model_config(arguments).vocab_size
    prompts = np.random.default_rng(arguments.seed).integers(0, vocab_size, (batch, arguments.prompt_tokens))
    length = arguments.response_tokens + 1
    few, many = [], []
    for _ in range(1 + arguments.runs):
        few.append(seconds_of_run(llm, prompts, arguments.short_tokens, logprobs))
        many.append(seconds_of_run(llm, prompts, length, logprobs))
    passes = length - arguments.short_tokens
    decode_seconds = max(median(many[1:]) - median(few[1:]), 1e-9)
    bound = bound_seconds(arguments, batch, bandwidth)
    return {
        "logprobs": "yes" if logprobs else "no",
        "requests": batch,
        "decode_tokens_per_second": batch * passes / decode_seconds,
        "decode_pass_ms": 1e3 * decode_seconds / passes,
        "bound_pass_ms": 1e3 * bound,
        "share_of_memory_bound": bound * passes / decode_seconds,
        "all_tokens_per_second": batch * length / median(many[1:]),
        "seconds_of_runs": many[1:],
        "seconds_of_short_runs": few[1:],
    }


def main() -> None:
    """Measure every batch, with and without logprobs."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        llm = build_llm(arguments, Path(folder))
        report, bandwidth = begin_report(arguments, time.perf_counter() - began)
        for batch in arguments.batch:
            for logprobs in arguments.logprobs:
                report.add(measure(arguments, llm, batch, logprobs == "yes", bandwidth))


def begin_report(arguments: argparse.Namespace, start_seconds: float) -> tuple[Report, float]:
    """The report and the bandwidth; only after vLLM has started, since processes that use a GPU cannot be forked."""
    device, gbs = torch.device("cuda", 0), arguments.memory_bandwidth_gbs
    bandwidth = measured_bandwidth(device) if gbs is None else gbs * 1e9
    settings = {name: value for name, value in vars(arguments).items() if name != "output"} | {
        "vllm": metadata.version("vllm"),
        "start_seconds": start_seconds,
        "weight_gib": num_parameters(arguments) * ITEM_BYTES / 2**30,
        "bandwidth_gbs": bandwidth / 1e9,
        "bandwidth_from": "copy" if gbs is None else "given",
    }
    return Report("decoding of vLLM", settings, device, arguments.output), bandwidth


if __name__ == "__main__":
    run_entry_point(main)
