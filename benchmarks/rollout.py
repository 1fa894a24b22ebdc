"""Measures rollouts of the in-process engine on a model with random weights. Each part is a subcommand.

    python benchmarks/rollout.py decode [--shape 1.7b] [--batch 64] [--prompt-tokens 512] [--response-tokens 256]
        [--samples-per-prompt 1] [--output FILE.json] [--json]
    torchrun --nproc-per-node 2 benchmarks/rollout.py decode --tensor-model-parallel-size 2 --shape 14b ...
    torchrun --nproc-per-node 2 benchmarks/rollout.py decode --pipeline-model-parallel-size 2 --shape 14b ...

decode       tokens per second of plain sampling. The same requests run with --response-tokens + 1 tokens each and with
             so few that they end soon after the last prompt is computed; the difference is the time of decoding,
             without the passes that compute prompts and decode other rows. A run of one token is the time of the
             prompts. No request ends early. "captures" counts those in the timed run. "share_of_memory_bound" compares
             a decoding pass with the time to read the weights and every cached position once. With
             --tensor-model-parallel-size and --pipeline-model-parallel-size, on as many GPUs as their product; the
             bound is that of the GPU that reads most. Pipeline stages run groups of rows, as many as there are stages,
             and read their weights once for each group; a pass is one token of every row. "share_of_stages" compares it
             with the time in which the busiest stage computes, without messages and waiting.
short        passes, computed tokens and seconds of groups whose responses have 1 to --response-tokens tokens.
tree         trees (TreePO) against the same number of independent rollouts: trajectories and tokens per second, with
             lengths from a lognormal distribution (--mean-length, --length-sigma, --max-length).
tree-tokens  the token counts of this comparison, without a model.
attention    the decoding kernel alone, with different settings; needs a GPU.
pass         a captured decoding pass alone, without the engine around it (``rollout_parts/captured_pass.py``).
das          recorded samples with and without speculation, measured and predicted (``rollout_parts/drafting.py``).
das-noise    how far rounding moves samples in bfloat16, with drafts and at other batch sizes
             (``rollout_parts/rounding.py``).
gap          how far logprobs of the sampler are from those of the trainer (``rollout_parts/gap.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.bandwidth import synchronize
from common.engine import Setup, add_arguments, build_engine, build_setup, check_arguments, counts_since
from common.profile import profile_step
from common.report import Report
from megatron_dta.common.command_line import CommandLineParser, print_json
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.tensor_sum import tensor_sum
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from rollout_parts.drafting import add_das_arguments, run_das
from rollout_parts.gap import add_gap_arguments, run_gap
from rollout_parts.paged_attention import add_attention_arguments, run_attention
from rollout_parts.rounding import add_noise_arguments, run_noise
from rollout_parts.stage_times import longest_stage_seconds
from rollout_parts.trees import add_tree_arguments, run_tree, run_tree_tokens


@dataclass(frozen=True)
class Part:
    """A subcommand: its help, its own flags, a function that returns the rows of the report, and the common flags that
    it does not have because it would not read them."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Setup | None], Iterable[dict[str, Any]]]
    needs_model: bool = True
    without: tuple[str, ...] = ()


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``decode``."""
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--samples-per-prompt", type=int, default=1, help="samples share their prompt's K and V")
    parser.add_argument("--requests", type=int, help="requests in all (default: --batch)")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="GPUs, one process each (torchrun)")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="stages, one process each or more")
    parser.add_argument("--pipeline-model-parallel-layout", help="layers of each stage, as in training")
    parser.add_argument("--profile", action="store_true", help="run once more and list the kernels by time")


def run_decode(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """One row: rates of prompts and of decoding."""
    check_arguments(arguments, "prompt_tokens", "response_tokens", "samples_per_prompt")
    if arguments.profile and setup.device.type != "cuda":
        raise InputError("--profile names kernels of a GPU, and there is none; leave it out")
    count = arguments.requests or arguments.batch
    longest = arguments.prompt_tokens + arguments.response_tokens + 1
    if longest > arguments.max_position_embeddings:
        raise InputError(f"--max-position-embeddings {arguments.max_position_embeddings} is less than {longest}")
    engine = build_engine(setup, arguments)
    length, begin = arguments.response_tokens + 1, first_timed_token(arguments, count)
    prompt_seconds, few, many, forwards, peak = [], [], [], {}, 0.0
    for run in range(arguments.runs + 1):  # the first one captures, and reserves memory
        times = [_measured_run(arguments, engine, setup, count, tokens) for tokens in (1, begin, length)]
        forwards, peak = times[2][1], engine.statistics()["peak_pages"]
        if run:
            for seconds_of, (seconds, _) in zip((prompt_seconds, few, many), times, strict=True):
                seconds_of.append(seconds)
    decode_seconds = max(median(many) - median(few), 1e-9)
    decoded = count * (length - begin)
    # With more requests than rows, passes are not all full; the mean number of rows counts.
    passes = decoded / min(count, arguments.batch)
    pass_seconds = decode_seconds / passes
    prompts = -(-min(count, arguments.batch) // arguments.samples_per_prompt)
    sampled = (arguments.response_tokens + begin - 1) / 2
    cached = prompts * arguments.prompt_tokens + min(count, arguments.batch) * sampled
    prompt_tokens = -(-count // arguments.samples_per_prompt) * arguments.prompt_tokens
    profiled = _share_of_stages(arguments, engine, setup, count, pass_seconds)
    if arguments.profile:
        run = 4 * arguments.burst + 1
        profiled["profile"] = profile_step(lambda: _measured_run(arguments, engine, setup, count, run), 40)
    return [
        {
            "part": "decode",
            "requests": count,
            "decode_tokens_per_second": decoded / decode_seconds,
            "decode_pass_ms": 1e3 * pass_seconds,
            "bound_pass_ms": 1e3 * setup.bound_seconds(cached),
            "share_of_memory_bound": setup.bound_seconds(cached) / pass_seconds,
            "prompt_tokens_per_second": prompt_tokens / median(prompt_seconds),
            "all_tokens_per_second": count * length / median(many),
            "forwards": int(forwards["forwards"]),
            "static_forwards": int(forwards["static_forwards"]),
            "captures": int(forwards["captures"]),
            "sums": _kind_of_sums(arguments),
            "cache_gib": peak * arguments.block_size * setup.token_bytes / 2**30,
            "seconds_of_runs": many,
            "tokens_of_short_runs": begin,
            "seconds_of_short_runs": few,
            **profiled,
        }
    ]


def first_timed_token(arguments: argparse.Namespace, count: int) -> int:
    """Tokens of a request in the short runs.

    No request ends before the last prompt is computed, and the long runs differ by whole bursts. 1 if the long runs are
    too short for this.
    """
    prompts = -(-min(count, arguments.batch) // arguments.samples_per_prompt)
    length = arguments.response_tokens + 1
    least = -(-prompts * arguments.prompt_tokens // arguments.max_tokens) + 4
    begin = least + (length - least) % arguments.burst
    return begin if begin < length else 1


def add_short_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``short``."""
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--response-tokens", type=int, default=4, help="of the longest responses")
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="requests in all")


def run_short(arguments: argparse.Namespace, setup: Setup) -> Iterable[dict[str, Any]]:
    """A row for each length."""
    names = ("prompt_tokens", "response_tokens", "samples_per_prompt", "requests")
    check_arguments(arguments, *names)
    engine = build_engine(setup, arguments)
    _measured_run(arguments, engine, setup, arguments.samples_per_prompt, 1)  # reserves memory
    for tokens in range(1, arguments.response_tokens + 1):
        runs = [_measured_run(arguments, engine, setup, arguments.requests, tokens)[1] for _ in range(arguments.runs)]
        counts = {name: int(runs[0][name]) for name in ("forwards", "prefilled_tokens", "decoded_tokens")}
        yield {"part": "short", "response_tokens": tokens, **counts, "seconds": median(run["seconds"] for run in runs)}


def add_pass_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``pass``."""
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256], help="sequences of a pass")
    parser.add_argument("--cached-tokens", type=int, default=192, help="cached tokens of each sequence")
    parser.add_argument("--draft-tokens", type=int, default=0, help="additional tokens of each sequence in the pass")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the pass by time")


def run_pass(arguments: argparse.Namespace, setup: Setup) -> Iterable[dict[str, Any]]:
    """See ``rollout_parts.captured_pass``, which needs Triton."""
    from rollout_parts import captured_pass

    return captured_pass.run_pass(arguments, setup)


def _share_of_stages(
    arguments: argparse.Namespace, engine: InProcessEngine, setup: Setup, count: int, pass_seconds: float
) -> dict[str, float]:
    """The time in which the busiest stage computes, and its share of the whole time; nothing if no pass is captured."""
    if arguments.pipeline_model_parallel_size == 1:
        return {}
    length = arguments.response_tokens + 1
    seconds = longest_stage_seconds(engine, lambda: _measured_run(arguments, engine, setup, count, length))
    return {} if seconds is None else {"stage_pass_ms": 1e3 * seconds, "share_of_stages": seconds / pass_seconds}


def _kind_of_sums(arguments: argparse.Namespace) -> str:
    """How the ranks of a tensor group sum in decoding passes."""
    if arguments.tensor_model_parallel_size == 1:
        return "none"
    return "peer memory" if tensor_sum().reads_peers else "all_reduce"


def _measured_run(
    arguments: argparse.Namespace, engine: InProcessEngine, setup: Setup, count: int, max_tokens: int
) -> tuple[float, dict[str, float]]:
    """Seconds of sampling ``max_tokens`` for every request, and the changes of the engine's counters."""
    rng = np.random.default_rng(arguments.seed)
    before = engine.statistics()
    engine.start(SamplingParams(max_tokens, eos_id=-1, seed=arguments.seed), 0)
    prompts = rng.integers(
        0, setup.model.true_vocab_size, (-(-count // arguments.samples_per_prompt), arguments.prompt_tokens)
    ).astype(np.int32)
    requests = [
        GenerationRequest(i, prompts[i // arguments.samples_per_prompt], max_tokens, key=i) for i in range(count)
    ]
    synchronize(setup.device)
    generate(engine, requests)
    counts = counts_since(before, engine)
    return counts["seconds"], counts


_ENGINE = ("buffer_size_gb", "max_tokens", "cuda_graphs", "burst", "attention_impl", "max_position_embeddings")
_ENGINE += ("enable_fp32_lm_head",)
PARTS = {
    "decode": Part("tokens per second of plain sampling", add_decode_arguments, run_decode),
    "short": Part("passes and computed tokens of short responses", add_short_arguments, run_short),
    "attention": Part("the decoding kernel alone", add_attention_arguments, run_attention, False, (*_ENGINE, "runs")),
    "pass": Part("a captured decoding pass alone", add_pass_arguments, run_pass, without=("runs",)),
    "das": Part("speculation on recorded samples, measured and predicted", add_das_arguments, run_das),
    "das-noise": Part(
        "how far rounding moves samples, with drafts and without", add_noise_arguments, run_noise, without=("runs",)
    ),
    "gap": Part("logprobs of the sampler against those of the trainer", add_gap_arguments, run_gap, without=("runs",)),
    "tree": Part("trees against independent rollouts, with the engine", add_tree_arguments, run_tree),
    "tree-tokens": Part(
        "tokens of trees and of independent rollouts, without a model",
        add_tree_arguments,
        run_tree_tokens,
        False,
        (*_ENGINE, "shape", "dtype", "batch", "block_size", "memory_bandwidth_gbs", "runs"),
    ),
}


def main() -> None:
    """Run the part that the command line names."""
    parser = CommandLineParser(__doc__)
    subparsers = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, part in PARTS.items():
        subparser = subparsers.add_parser(name, help=part.help)
        add_arguments(subparser, part.without)
        part.add_arguments(subparser)
    arguments = parser.parse_args()
    check_arguments(arguments)
    output = Path(arguments.output) if arguments.output else None
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"--output {output}: its folder does not exist")
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "output")}
    if not PARTS[arguments.part].needs_model:
        what, device = ("paged attention", "cuda") if arguments.part == "attention" else ("rollouts, simulated", "cpu")
        report = Report(what, settings, torch.device(device if torch.cuda.is_available() else "cpu"), output)
        _run_part(arguments, None, report)
        return
    setup = build_setup(arguments)
    settings |= {
        "dtype": str(next(setup.model.parameters()).dtype).removeprefix("torch."),
        "weight_gib": setup.weight_bytes / 2**30,
        "weight_gib_of_ranks": [weights / 2**30 for weights, _ in setup.ranks],
        "bandwidth_gbs": setup.bandwidth / 1e9,
        "bandwidth_from": setup.bandwidth_from,
    }
    report = Report("rollouts of the in-process engine", settings, setup.device, output)
    _run_part(arguments, setup, report)


def _run_part(arguments: argparse.Namespace, setup: Setup | None, report: Report) -> None:
    is_first = setup is None or current_mesh().rank == 0
    with torch.no_grad():
        for row in PARTS[arguments.part].run(arguments, setup):
            if is_first:
                report.add(row)
    if arguments.json and is_first:
        print_json(report.results)


if __name__ == "__main__":
    run_entry_point(main)
