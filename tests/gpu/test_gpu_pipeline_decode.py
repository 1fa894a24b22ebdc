"""Decoding on pipeline stages of two GPUs (or four): CUDA graphs on each stage, with messages between them.

python -m pytest -m gpu -s tests/gpu/test_gpu_pipeline_decode.py
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dta.config import ModelConfig, ParallelConfig
from mesh_worker import copy_shards, named_parameters, run_on_ranks
from rollout_forest import NEVER, PARAMS, Drive, assert_same, run_forest, started
from sampling_cases import SHAPES, make_model, random_prompts, sampling_config
from speculation_exact_cases import suffix_drafting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

STAGES = dict(pipeline_model_parallel_size=2)
LAYERS = dict(num_layers=4)
GROUPED = SHAPES["grouped queries, QK-norm, untied"] | dict(kv_channels=16, normalization="RMSNorm") | LAYERS
TIED = dict(untie_embeddings_and_output_weights=False)
DRIVE = Drive(seed=17)
# The kernels draw only without a nucleus.
DRAWN_BY_KERNELS = replace(PARAMS, top_p=1.0)
LONGEST_S = 280


@dataclass(frozen=True)
class Job:
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(**STAGES))
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False


TWO = {
    "graphs": Job(),
    "again": Job(),
    "eager": Job(settings=dict(static_passes=False)),
    "small pages": Job(settings=dict(block_size=3, max_requests=5, max_tokens=11)),
    "one row": Job(settings=dict(max_requests=1)),
    "drafts": Job(drafts=True),
    "uneven": Job(ParallelConfig(**STAGES, pipeline_model_parallel_layout="Ettt|tL")),
    "no layers": Job(ParallelConfig(**STAGES, pipeline_model_parallel_layout="E|ttttL")),
    "virtual stages": Job(ParallelConfig(**STAGES, num_virtual_stages_per_pipeline_rank=2)),
    "modules": Job(changes=dict(fused_layer_impl="reference")),
}
BOTH = ParallelConfig(**STAGES, tensor_model_parallel_size=2)
FOUR = {
    "PP 4": Job(ParallelConfig(pipeline_model_parallel_size=4)),
    "PP 2 x TP 2": Job(BOTH),
    "sequence parallel": Job(replace(BOTH, sequence_parallel=True)),
    "drafts": Job(BOTH, drafts=True),
    "PP 2 x DP 2": Job(),
}


def build_on(config: ModelConfig, weights: dict[str, torch.Tensor], parallel: ParallelConfig) -> Any:
    from megatron_dta.model import build_model, destroy_parallel, initialize_parallel

    destroy_parallel()
    model = build_model(config, initialize_parallel(5, parallel), parallel).eval()
    copy_shards(model, weights, config)
    return model


def samples_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor], dict[str, Job]]) -> dict:
    from megatron_dta.sampling.engines.in_process.cuda_graphs import why_not_captured

    config, weights, jobs = argument
    found = {}
    for name, job in jobs.items():
        model = build_on(replace(config, **job.changes), weights, job.parallel)
        assert why_not_captured(model) is None
        drafting = suffix_drafting(follows_clock=True) if job.drafts else None
        engine = started(model, DRAWN_BY_KERNELS, drafting=drafting, **dict(static_passes=True) | job.settings)
        found[name] = run_forest(engine, replace(DRIVE, order=1)), engine.statistics()
        assert engine.pages_in_use == 0
    return found


def reference(dtype: torch.dtype, **changes: Any) -> tuple[ModelConfig, dict[str, torch.Tensor], Any]:
    """A model on one GPU: its configuration and weights, and itself."""
    shape = GROUPED | changes
    model = make_model(3, dtype, **shape)
    weights = {name: parameter.detach().cpu() for name, parameter in named_parameters(model).items()}
    return sampling_config(dtype, **shape), weights, model


def compare(jobs: dict[str, Job], world_size: int, folder: Path, **changes: Any) -> list[dict]:
    config, weights, model = reference(torch.float32, **changes)
    expected = run_forest(started(model, DRAWN_BY_KERNELS, attention_impl="reference"), DRIVE)
    ranks = run_on_ranks(samples_on_rank, (config, weights, jobs), world_size, folder, "nccl", LONGEST_S)
    for name, job in jobs.items():
        for rank in ranks:
            forest, statistics = rank[name]
            assert_same(forest, expected, 2e-5)
            assert (statistics["static_forwards"] > 0) == (name != "eager")
            assert (statistics["accepted_drafts"] > 0) == job.drafts
    return ranks


def test_two_stages_give_the_samples_of_one_gpu_in_float32(tmp_path):
    ranks = compare(TWO, 2, tmp_path / "mesh")
    for name in TWO:
        for request_id in ranks[0][name][0]:
            assert np.array_equal(*(rank[name][0][request_id][1].logprobs for rank in ranks))
    for request_id in ranks[0]["graphs"][0]:
        assert np.array_equal(*(ranks[0][name][0][request_id][1].logprobs for name in ("graphs", "again")))


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs")
def test_four_gpus_give_the_samples_of_one_in_float32(tmp_path):
    compare(FOUR, 4, tmp_path / "mesh", **TIED)


def moved_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor]]) -> list[tuple[int, list]]:
    """Weights change in place, then one rank's move; captured and eager passes see both."""
    from megatron_dta.sampling.engines.interface import GenerationRequest, generate

    model = build_on(*argument, ParallelConfig(**STAGES))
    prompts = random_prompts(np.random.default_rng(3), [4] * 37)
    requests = [GenerationRequest(i, prompt, 40, i) for i, prompt in enumerate(prompts)]
    engine, found = started(model, NEVER, static_passes=True), []
    for turn in range(3):
        if turn == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.2)
        elif turn == 2 and rank == 1:
            parameter = next(model.parameters())
            parameter.data = parameter.data.clone()
        engine.start(NEVER, 4)
        tokens = [result.token_ids.tolist() for result in generate(engine, requests)]
        eager = generate(started(model, NEVER, static_passes=False), requests)
        assert tokens == [result.token_ids.tolist() for result in eager]
        found.append((engine._steps.captures, tokens))
    return found


def test_groups_of_many_rows_see_the_present_weights(tmp_path):
    config, weights, _ = reference(torch.float32)
    ranks = run_on_ranks(moved_on_rank, (config, weights), 2, tmp_path / "mesh", "nccl", LONGEST_S)
    assert ranks[0] == ranks[1]
    (first, before), (second, changed), (third, moved) = ranks[0]
    assert first == second < third
    assert changed == moved != before
