"""Decoding on several ranks against one: what the tests of tensor groups and of pipeline stages share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_cases import spread
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.sampling.params import SamplingParams
from mesh_worker import copy_shards, named_parameters, run_on_ranks
from rollout_forest import NEVER, Drive, assert_same, run_forest, started
from sampling_cases import SHAPES, make_model, random_prompts, sampling_config
from speculation_exact_cases import suffix_drafting

GROUPED = SHAPES["grouped queries, QK-norm, untied"] | dict(kv_channels=16, normalization="RMSNorm")
DRIVE = Drive(seed=17)
LONGEST_S = 280
# In float32. States sum over a sequence: with them one GPU's plain passes are 1.7e-5 and its graphs 3.1e-5 away from
# float64, so that two right results may differ by both.
TOLERANCE, TOLERANCE_OF_STATES = 2e-5, 5e-5
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """An engine on a mesh: changes of the model's configuration, and settings of the engine."""

    parallel: ParallelConfig
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False


def weights_of(model: Any) -> Weights:
    return {name: parameter.detach().cpu().clone() for name, parameter in named_parameters(model).items()}


def reference(dtype: torch.dtype, **changes: Any) -> tuple[ModelConfig, Weights, Any]:
    """A model on one GPU: its configuration and weights, and itself."""
    shape = GROUPED | changes
    model = make_model(3, dtype, **shape)
    if "mixer" in changes:
        with torch.no_grad():
            spread(dict(model.named_parameters()), 3)
    return sampling_config(dtype, **shape), weights_of(model), model


def build_on(config: ModelConfig, weights: Weights, parallel: ParallelConfig) -> Any:
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import destroy_parallel, initialize_parallel

    destroy_parallel()
    model = build_model(config, initialize_parallel(5, parallel), parallel).eval()
    copy_shards(model, weights, config)
    return model


def _samples_on_rank(rank: int, argument: tuple[ModelConfig, Weights, Mapping[str, Job], SamplingParams]) -> dict:
    from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured

    config, weights, jobs, params = argument
    results = {}
    for name, job in jobs.items():
        model = build_on(replace(config, **job.changes), weights, job.parallel)
        assert why_not_captured(model) is None
        drafting = suffix_drafting() if job.drafts else None
        engine = started(model, params, drafting=drafting, **dict(static_passes=True) | job.settings)
        results[name] = run_forest(engine, replace(DRIVE, order=1)), engine.statistics()
        assert engine.pages_in_use == 0
    return results


def compare(
    jobs: Mapping[str, Job], params: SamplingParams, world_size: int, folder: Path, **changes: Any
) -> list[dict]:
    """Every job samples what one GPU samples, in float32; returns the samples and statistics of all ranks."""
    config, weights, model = reference(torch.float32, **changes)
    tolerance = TOLERANCE_OF_STATES if "mixer" in changes else TOLERANCE
    expected = run_forest(started(model, params, attention_impl="reference"), DRIVE)
    ranks = run_on_ranks(_samples_on_rank, (config, weights, jobs, params), world_size, folder, "nccl", LONGEST_S)
    for name, job in jobs.items():
        for rank in ranks:
            forest, statistics = rank[name]
            assert_same(forest, expected, tolerance)
            assert (statistics["static_forwards"] > 0) == (name != "eager")
            assert (statistics["accepted_drafts"] > 0) == job.drafts
    return ranks


def assert_reproducible(ranks: list[dict]) -> None:
    """Both of two ranks have the same logprobs, bit for bit, and so have the jobs ``graphs`` and ``again``."""
    for name, (forest, _) in ranks[0].items():
        for request_id in forest:
            assert np.array_equal(*(rank[name][0][request_id][1].logprobs for rank in ranks))
    for request_id in ranks[0]["graphs"][0]:
        assert np.array_equal(*(ranks[0][name][0][request_id][1].logprobs for name in ("graphs", "again")))


def _moved_on_rank(
    rank: int, argument: tuple[ModelConfig, Weights, ParallelConfig, int, dict[str, Any]]
) -> list[tuple[int, list]]:
    from megatron_dta.sampling.interface import GenerationRequest, generate

    *built, rows, plain = argument
    model = build_on(*built)
    prompts = random_prompts(np.random.default_rng(3), [4] * rows)
    requests = [GenerationRequest(i, prompt, 40, i) for i, prompt in enumerate(prompts)]
    engine, results = started(model, NEVER, static_passes=True), []
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
        assert tokens == [result.token_ids.tolist() for result in generate(started(model, NEVER, **plain), requests)]
        results.append((engine._steps.captures, tokens))
    return results


def check_moved_weights(
    parallel: ParallelConfig, rows: int, folder: Path, plain: dict[str, Any], **changes: Any
) -> None:
    """Weights change in place, then one rank's move: captured passes see both, as an engine of settings ``plain``."""
    config, weights, _ = reference(torch.float32, **changes)
    ranks = run_on_ranks(_moved_on_rank, (config, weights, parallel, rows, plain), 2, folder, "nccl", LONGEST_S)
    assert ranks[0] == ranks[1]
    (first, before), (second, changed), (third, moved) = ranks[0]
    assert first == second < third
    assert changed == moved != before
