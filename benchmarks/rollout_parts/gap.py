"""The part ``gap`` of the rollout benchmark: how far logprobs of the sampler are from those of the trainer.

The in-process engine samples groups that share prompts. The trainer then computes the logprobs of the sampled tokens on
trees and on dense segments of several sizes, and a float32 copy of the model computes them once more. In exact
arithmetic all would agree. Short segments have as few rows in a matrix product as a decoding pass, so the library may
choose the same kernels for them. ``--enable-fp32-lm-head`` shows what rounding of the logits adds.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from typing import Any

import numpy as np
import torch

from common.engine import Setup, build_engine, build_setup, check_arguments
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams

# Tree mode and segment tokens.
WAYS = {"trees": ("dta", 4096), "dense": ("dense", 4096), "other dense": ("dense", 1536), "short dense": ("dense", 64)}


def add_gap_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``gap``."""
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)


def trainer_logprobs(
    model: Model, samples: list[TrainingSample], tree: TreeConfig, arguments: argparse.Namespace
) -> np.ndarray:
    """Logprobs of all response tokens by the trainer's forward pass, float64."""
    engine = TreeEngine(model, arguments.temperature)
    logprobs = engine.compute_logprobs(prepare_batch(samples, tree))
    of_responses = [values[sample.loss_mask] for values, sample in zip(logprobs, samples, strict=True)]
    return np.concatenate(of_responses).astype(np.float64)


def run_gap(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """A row for each pair of ways to compute the logprobs of the same samples."""
    check_arguments(arguments, "prompt_tokens", "response_tokens", "samples_per_prompt")
    model, per_prompt = setup.model, arguments.samples_per_prompt
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(0, model.true_vocab_size, (max(1, arguments.batch // per_prompt), arguments.prompt_tokens))
    requests = [
        GenerationRequest(i, prompts[i // per_prompt].astype(np.int32), arguments.response_tokens, i)
        for i in range(len(prompts) * per_prompt)
    ]
    sampler = build_engine(setup, arguments)
    sampler.start(SamplingParams(1, eos_id=-1, temperature=arguments.temperature, seed=arguments.seed), 0)
    results = generate(sampler, requests)
    samples = []
    for request, result in zip(requests, results, strict=True):
        tokens = np.concatenate([request.token_ids, result.token_ids])
        samples.append(TrainingSample(tokens, np.arange(len(tokens)) >= len(request.token_ids)))
    logprobs = {"sampler": np.concatenate([result.logprobs for result in results]).astype(np.float64)}
    for name, (mode, size) in WAYS.items():
        logprobs[name] = trainer_logprobs(
            model, samples, TreeConfig(tree_mode=mode, tree_segment_tokens=size), arguments
        )
    if next(model.parameters()).dtype != torch.float32:
        exact = build_setup(argparse.Namespace(**vars(arguments) | {"dtype": "fp32"})).model
        exact.load_state_dict(model.state_dict())
        logprobs["float32"] = trainer_logprobs(exact, samples, TreeConfig(tree_segment_tokens=4096), arguments)
    rows = []
    for first, second in combinations(logprobs, 2):
        gap = logprobs[first] - logprobs[second]
        row = {"part": "gap", "one": first, "other": second, "tokens": len(gap), "fp32_lm_head": model.fp32_lm_head}
        row |= {"mean_logprob": float(logprobs[first].mean()), "mean_gap": float(np.abs(gap).mean())}
        rows.append(row | {"largest_gap": float(np.abs(gap).max()), "kl": float((np.exp(-gap) - 1 + gap).mean())})
    return rows
