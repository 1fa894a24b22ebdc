"""Measures ``--batch-invariant-mode`` on a model with random weights: what agrees, and what it costs.

    python benchmarks/batch_invariance.py [--shape smollm2-135m] [--dtype bf16] [--prompts 16] [--samples 16]
        [--prompt-tokens 256] [--response-tokens 256] [--batch 64 256] [--output FILE.json]

Groups that share a prompt are sampled with each number of running requests and with prompts in parts, and the trainer
computes the logprobs of the samples again, on trees of several segment sizes and dense, and in a training step. With
the mode off and on: how many samples and logprobs differ, tokens per second of decoding, seconds of the training step
(forward and backward, median of five). Both modes run on the same model, one after the other. On a GPU in bfloat16 the
first rows say of how many numbers of rows the library's products of several shapes differ from that of 4,096 rows, with
split-K and without, and in how many elements that differs from the kernel in Triton.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.benchmark_model import settings_of
from common.engine import MODELS
from common.report import Report
from common.training_step import StepTimer
from dta_kernels.invariant.products import set_batch_invariant
from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate
from megatron_dta.sampling.params import SamplingParams

PARAMS = SamplingParams(1, eos_id=-1, temperature=0.9, seed=1)
PRODUCTS = (
    (576, 960),
    (576, 3072),
    (1536, 576),
    (2048, 4096),
    (2048, 12288),
    (6144, 2048),
    (3072, 1024),
    (17408, 5120),
)
WAYS = {"trees": TreeConfig(), "dense": TreeConfig(tree_mode="dense")}
WAYS |= {f"trees, segments of {size}": TreeConfig(tree_segment_tokens=size) for size in (96, 1024)}


def main() -> int:
    """Measure and write the results."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--shape", choices=list(MODELS), default="smollm2-135m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    config = ModelConfig(
        **settings_of(MODELS[arguments.shape]) | dict(untie_embeddings_and_output_weights=False),
        max_position_embeddings=4096,
        bf16=arguments.dtype == "bf16",
        batch_invariant_mode=True,
    )
    timer = StepTimer(config, ParallelConfig(), 0)
    timer.engine.temperature = PARAMS.temperature
    report = Report("batch_invariance", vars(arguments), timer.device, arguments.output)
    if timer.device.type == "cuda" and config.bf16:
        for row in map(compared, PRODUCTS):
            report.add(row)
    for on in (False, True):
        set_batch_invariant(on)
        timer.engine.config.batch_invariant_mode = on
        for row in measure(timer, arguments):
            report.add({"shape": arguments.shape, "dtype": arguments.dtype, "mode": "on" if on else "off", **row})
    return 0


def compared(shape: tuple[int, int]) -> dict[str, Any]:
    """How products of ``x`` [n, K] and a weight [N, K] agree."""
    from dta_kernels.invariant.product_kernel import multiply

    K, N = shape
    generator = torch.Generator("cuda").manual_seed(K + N)
    x, weight = (torch.randn(n, K, generator=generator, device="cuda").bfloat16() for n in (4096, N))
    numbers = [*range(1, 81), *np.random.default_rng(0).integers(80, 4096, 60).tolist()]
    row = {"part": "products", "inputs": K, "outputs": N, "tried": len(numbers)}
    for name, on in (("split_k", False), ("without", True)):
        set_batch_invariant(on)
        whole = x @ weight.t()
        row[f"differ_{name}"] = sum(not torch.equal(x[:n] @ weight.t(), whole[:n]) for n in numbers)
        row[f"elements_other_than_triton_{name}"] = int((multiply(x, weight) != whole).sum())
    return row


def measure(timer: StepTimer, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one mode."""
    model, rng = timer.model, np.random.default_rng(2)
    prompts = rng.integers(0, model.true_vocab_size, (arguments.prompts, arguments.prompt_tokens)).astype(np.int32)
    requests = [
        GenerationRequest(i, prompts[i % len(prompts)], arguments.response_tokens, i)
        for i in range(arguments.prompts * arguments.samples)
    ]
    rows, first = [], None
    engines = [(f"{batch} requests", dict(max_requests=batch)) for batch in (*arguments.batch, 8)]
    for name, settings in [*engines, ("prompts in parts of 100", dict(max_requests=64, max_tokens=100))]:
        if settings["max_requests"] > len(requests):
            continue
        # Few at once take long.
        results, rate = decode(model, requests[: 4 * settings["max_requests"]], settings)
        first = first or results
        others = [r for r, s in zip(results, first, strict=False) if not np.array_equal(r.token_ids, s.token_ids)]
        rows.append({"part": "sampling", "what": name, "tokens_per_second": rate, "other_samples": len(others)})
    samples = [sample_of(*both) for both in zip(requests, first, strict=True)]
    sampled = np.concatenate([result.logprobs for result in first])
    for name, tree in WAYS.items():
        logprobs = timer.engine.compute_logprobs(timer.plan(samples, tree))
        trained = np.concatenate([row[s.loss_mask] for row, s in zip(logprobs, samples, strict=True)])
        rows.append({"part": "logprobs", "what": name} | gap_of(trained - sampled))
    rows.append(training(timer, samples))
    return rows


def gap_of(gap: np.ndarray) -> dict[str, float]:
    size = np.abs(gap)
    return {"mean_gap": float(size.mean()), "largest_gap": float(size.max()), "differ": float((gap != 0).mean())}


def sample_of(request: GenerationRequest, result: GenerationResult) -> TrainingSample:
    token_ids = np.concatenate([request.token_ids, result.token_ids])
    mask = np.arange(len(token_ids)) >= len(request.token_ids)
    logprobs = np.concatenate([np.zeros(len(request.token_ids)), result.logprobs])
    advantages = np.full(len(token_ids), request.request_id % 3 - 1.0)
    return TrainingSample(token_ids, mask, advantages=advantages, rollout_logprobs=logprobs)


def decode(
    model: Any, requests: Sequence[GenerationRequest], settings: dict[str, int]
) -> tuple[list[GenerationResult], float]:
    """The samples, and tokens per second after the prompts, of the second of two runs."""
    is_static = why_not_captured(model, "auto") is None
    engine = InProcessEngine(model, EngineSettings(static_passes=is_static, **settings))
    seconds = []
    for some in (requests, [replace(request, max_tokens=1) for request in requests], requests):
        engine.start(PARAMS, 0)
        began = time.perf_counter()
        results = generate(engine, some)
        seconds.append(time.perf_counter() - began)
    tokens = sum(len(result.token_ids) - 1 for result in results)
    return results, tokens / max(1e-9, seconds[2] - seconds[1])


def training(timer: StepTimer, samples: list[TrainingSample]) -> dict[str, Any]:
    """Seconds of a training step, and the gap in it."""
    batch, seconds = timer.plan(samples, TreeConfig()), []
    timer.model.train()
    for _ in range(6):
        timer.zero_gradients()
        began = time.perf_counter()
        result = timer.engine.forward_backward(batch, make_objective(ObjectiveConfig(objective="grpo")))
        loss = float(result.loss)
        seconds.append(time.perf_counter() - began)
    gaps = {name: float(result.metrics[f"sampler_logprob_gap{name}"]) for name in ("", "_max")}
    tokens = batch.plan.segments.tree.num_tokens
    row = {"part": "training", "seconds": median(seconds[1:]), "tokens": tokens, "segments": result.segments}
    return row | {"mean_gap": gaps[""], "largest_gap": gaps["_max"], "finite": bool(np.isfinite(loss))}


if __name__ == "__main__":
    run_entry_point(main)
