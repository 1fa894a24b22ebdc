"""Decoding on a tensor group with kernels: passes at fixed addresses (captured on a GPU) give the samples of one
process. In Triton's interpreter."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from decode_layer_cases import MODELS, few_parts, fused_model, passes, small_parts  # noqa: F401 (a fixture)
from decode_mesh_cases import Job, build_on, weights_of
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.parallel.tensor_sum import _why_apart
from mesh_worker import run_on_ranks
from rollout_forest import Drive, assert_same, run_forest, started
from sampling_cases import sampling_config
from speculation_exact_cases import suffix_drafting
from triton_device import interpreter

TENSOR = dict(tensor_model_parallel_size=2)
MESHES = {"tp2": ParallelConfig(**TENSOR), "tp2-sp": ParallelConfig(**TENSOR, sequence_parallel=True)}
FUSED = dict(fused_layer_impl="triton", normalization="RMSNorm", kv_channels=16)


JOBS = {
    "tp2-sp": Job(MESHES["tp2-sp"], settings=dict(block_size=3, max_requests=5)),
    "drafts": Job(MESHES["tp2"], drafts=True),
    "modules": Job(MESHES["tp2"], dict(fused_layer_impl="reference")),
}


def samples_on_rank(
    rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor], dict[str, Job], Drive]
) -> dict[str, tuple]:
    config, weights, jobs, drive = argument
    results = {}
    with small_parts():
        for name, job in jobs.items():
            model = build_on(replace(config, **job.changes), weights, job.parallel)
            drafting = suffix_drafting() if job.drafts else None
            settings = dict(attention_impl="triton", static_passes=True, max_tokens=11) | job.settings
            engine = started(model, drafting=drafting, **settings)
            forest = run_forest(engine, replace(drive, order=1))
            results[name] = forest, engine.statistics(), list(engine._steps._passes)
            assert engine.pages_in_use == 0
    return results


@interpreter
@pytest.mark.parametrize(("architecture", "jobs", "prompts"), [("QK-norm", list(JOBS), 2), ("biases", ["tp2-sp"], 1)])
def test_static_passes_give_the_samples_of_one_process(tmp_path, architecture, jobs, prompts):
    """The vocabulary has an odd number of tokens, so that of the last rank is padded."""
    model = fused_model(architecture, num_layers=1)
    dtype, shape = MODELS[architecture]
    config = sampling_config(dtype, **FUSED | shape | dict(num_layers=1))
    drive = Drive(seed=17, prompts=prompts, depth=1, longest=6)
    with mock.patch.object(type(model), "decodes_directly", False):
        expected = run_forest(started(model, attention_impl="triton"), drive)
    jobs = {name: JOBS[name] for name in jobs}
    ranks = run_on_ranks(samples_on_rank, (config, weights_of(model), jobs, drive), 2, tmp_path / "mesh")
    for name, job in jobs.items():
        for rank in ranks:
            forest, statistics, _ = rank[name]
            assert_same(forest, expected, 2e-5)
            assert statistics["static_forwards"] > 0.3 * statistics["forwards"]
            assert (statistics["accepted_drafts"] > 0) == job.drafts
        # The ranks capture the same passes in the same order, and draw the same tokens with the same logprobs.
        assert ranks[0][name][2] == ranks[1][name][2]
        assert ranks[0][name][1]["captures"] == ranks[1][name][1]["captures"]
        for request_id in expected:
            first, other = (rank[name][0][request_id][1] for rank in ranks)
            assert np.array_equal(first.logprobs, other.logprobs)


def test_gpus_apart_are_recognized():
    assert "several hosts" in _why_apart([("a", 0), ("b", 0)], 0)
    # Each process sees one GPU, which it calls 0.
    assert "each other's GPUs" in _why_apart([("a", 0), ("a", 0)], 0)
    if torch.cuda.device_count() < 2:
        assert "cannot access" in _why_apart([("a", 0), ("a", 1)], 0)
