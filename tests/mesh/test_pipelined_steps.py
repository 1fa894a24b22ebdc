"""Decoding on all pipeline stages at once gives the samples of one process, in Triton's interpreter: groups of rows of
any sizes, ends of sequences inside bursts, drafts, stages of any layers, tensor groups inside the stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from decode_layer_cases import GROUPED, few_parts, fused_model, small_parts  # noqa: F401 (a fixture)
from decode_mesh_cases import build_on, weights_of
from hybrid_cases import HYBRID, poisoned, spread
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.hybrid.decode_states import DecodeStates
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate
from mesh_worker import run_on_ranks
from rollout_forest import PARAMS, Drive, assert_same, run_forest, started
from sampling_cases import make_model, random_prompts, sampling_config
from speculation_exact_cases import Adversary
from triton_device import interpreter

FUSED = GROUPED | dict(fused_layer_impl="triton", normalization="RMSNorm", kv_channels=16)
TIED = dict(untie_embeddings_and_output_weights=False)
EXPERTS = dict(
    num_layers=2, num_experts=2, moe_router_topk=1, moe_ffn_hidden_size=16,
    moe_router_pre_softmax=True, disable_bias_linear=True,
)  # fmt: skip
STATES = HYBRID | dict(
    num_layers=2, mixer_layer_freq="[1,0]", disable_bias_linear=True, num_query_groups=2,
    fused_layer_impl="triton", normalization="RMSNorm", kv_channels=16,
)  # fmt: skip
STAGES, TENSOR = dict(pipeline_model_parallel_size=2), dict(tensor_model_parallel_size=2)
FROM_NUCLEUS = replace(PARAMS, other_eos_ids=(12, 16, 17), vocab_size=20)
DRAWN_BY_KERNELS = replace(FROM_NUCLEUS, top_p=1.0)
LENGTHS = (6, 1, 3, 4, 2)
Case = tuple[ModelConfig, dict[str, torch.Tensor]]
Samples = list[tuple[list[int], np.ndarray]]


@dataclass(frozen=True)
class Job:
    parallel: ParallelConfig
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_nucleus: bool = False
    drafts: Samples | None = None


def requests(lengths: Sequence[int] = LENGTHS) -> list[GenerationRequest]:
    prompts = random_prompts(np.random.default_rng(2), [3, 8, 5, 2, 6])
    return [GenerationRequest(i, prompt, lengths[i], 9 * i) for i, prompt in enumerate(prompts)]


def sampled(engine: Any, lengths: Sequence[int] = LENGTHS) -> Samples:
    return [_sample(result) for result in generate(engine, requests(lengths))]


def _sample(result: GenerationResult) -> tuple[list[int], np.ndarray]:
    return result.token_ids.tolist(), result.logprobs


def assert_near(actual: Samples, expected: Samples) -> None:
    for (tokens, logprobs), (others, their_logprobs) in zip(actual, expected, strict=True):
        assert tokens == others
        assert np.abs(logprobs - their_logprobs).max() <= 2e-5


def case_of(model: Any, **changes: Any) -> Case:
    return sampling_config(torch.float32, **FUSED | changes), weights_of(model)


def engine_on(model: Any, job: Job) -> Any:
    drafting = None
    if job.drafts is not None:
        answers = {
            (request.token_ids.tobytes(), request.key): np.array(tokens)
            for request, (tokens, _) in zip(requests(), job.drafts, strict=True)
        }
        drafting = Adversary("mixed", answers, 1)
    settings = dict(attention_impl="triton", static_passes=True) | job.settings
    return started(model, FROM_NUCLEUS if job.is_nucleus else DRAWN_BY_KERNELS, drafting=drafting, **settings)


def samples_on_rank(rank: int, argument: tuple[Case, dict[str, Job]]) -> dict[str, tuple]:
    (config, weights), jobs = argument
    results = {}
    with small_parts():
        for name, job in jobs.items():
            engine = engine_on(build_on(replace(config, **job.changes), weights, job.parallel), job)
            results[name] = sampled(engine), engine.statistics(), [key[:-1] for key in engine._steps._passes]
            assert engine.pages_in_use == 0
    return results


def expected_of(model: Any) -> dict[bool, Samples]:
    """From a nucleus, and not."""
    by_nucleus = {True: sampled(started(model, FROM_NUCLEUS)), False: sampled(started(model, DRAWN_BY_KERNELS))}
    # Some rows end before their length.
    assert any(len(tokens) < length for (tokens, _), length in zip(by_nucleus[False], LENGTHS, strict=True))
    return by_nucleus


def compare(case: Case, jobs: dict[str, Job], expected: dict[bool, Samples], world_size: int, folder: Path) -> None:
    ranks = run_on_ranks(samples_on_rank, (case, jobs), world_size, folder)
    for name, job in jobs.items():
        first, statistics, captured = ranks[0][name]
        assert_near(first, expected[job.is_nucleus])
        assert statistics["static_forwards"] > 0.5 * statistics["forwards"]
        assert (statistics["accepted_drafts"] > 0) == (job.drafts is not None)
        for rank in ranks[1:]:
            # All ranks capture the same sizes in the same order, and have the same samples bit for bit.
            others, _, also_captured = rank[name]
            assert captured == also_captured
            for (tokens, logprobs), (other, their_logprobs) in zip(first, others, strict=True):
                assert tokens == other
                assert np.array_equal(logprobs, their_logprobs)


@interpreter
def test_two_stages_give_the_samples_of_one_process(tmp_path):
    model = fused_model("QK-norm", num_layers=2)
    expected = expected_of(model)
    stages = ParallelConfig(**STAGES)
    jobs = {
        "bursts": Job(stages),
        "no layers": Job(
            ParallelConfig(**STAGES, pipeline_model_parallel_layout="E|ttL"),
            settings=dict(block_size=3, max_requests=3, burst=3),
        ),
        "drafts": Job(stages, drafts=expected[False]),
        "modules": Job(stages, dict(fused_layer_impl="reference"), is_nucleus=True),
    }
    compare(case_of(model, num_layers=2), jobs, expected, 2, tmp_path / "mesh")


@interpreter
def test_stages_with_experts(tmp_path):
    model = fused_model("QK-norm", **EXPERTS)
    jobs = {"experts": Job(ParallelConfig(**STAGES))}
    compare(case_of(model, **EXPERTS), jobs, expected_of(model), 2, tmp_path / "mesh")


@interpreter
def test_four_ranks_give_the_samples_of_one_process(tmp_path):
    model = fused_model("QK-norm", num_layers=2, **TIED)
    layout = dict(pipeline_model_parallel_layout="E|t|t|L")
    jobs = {
        "PP 4": Job(ParallelConfig(pipeline_model_parallel_size=4, **layout)),
        "virtual stages, SP": Job(
            ParallelConfig(**STAGES, **TENSOR, **layout, sequence_parallel=True, num_virtual_stages_per_pipeline_rank=2)
        ),
    }
    compare(case_of(model, num_layers=2, **TIED), jobs, expected_of(model), 4, tmp_path / "mesh")


def forests_on_rank(rank: int, argument: tuple[Case, Drive, dict[str, Job]]) -> dict[str, tuple]:
    """Forks, continuations and ends inside bursts on each job's mesh, and the statistics; states begin with NaN."""
    (config, weights), drive, jobs = argument
    results = {}
    with small_parts(), mock.patch.object(DecodeStates, "grow", poisoned):
        for name, job in jobs.items():
            engine = engine_on(build_on(replace(config, **job.changes), weights, job.parallel), job)
            results[name] = run_forest(engine, drive), engine.statistics()
            assert engine.pages_in_use == 0
    return results


@interpreter
def test_stages_change_the_states_of_their_layers_in_place(tmp_path):
    model, drive = make_model(5, torch.float32, **STATES), Drive(seed=9, prompts=2, depth=1, longest=7)
    with torch.no_grad():
        spread(dict(model.named_parameters()), 5)
    apart = ParallelConfig(**STAGES, pipeline_model_parallel_layout="Et|tL")
    # The first stage has no attention, the last one no states.
    jobs = {"few requests": Job(apart, settings=dict(block_size=3, max_requests=3, burst=3))}
    expected = run_forest(started(model, DRAWN_BY_KERNELS), drive)
    case = sampling_config(torch.float32, **STATES), weights_of(model)
    ranks = run_on_ranks(forests_on_rank, (case, drive, jobs), 2, tmp_path / "mesh")
    for name in jobs:
        for rank in ranks:
            actual, statistics = rank[name]
            assert_same(actual, expected, 2e-5)
            assert statistics["static_forwards"] > 0.5 * statistics["forwards"]
            assert statistics["reused_tokens"] > 0
            for request_id, (_, result) in actual.items():
                assert np.array_equal(result.logprobs, ranks[0][name][0][request_id][1].logprobs)
