"""The in-process engine on meshes gives the samples of one process, also with drafts and when requests lose pages."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from latent_cases import ADAPTERS, DEEPSEEK, EXPERTS, latent_weights
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from mesh_worker import copy_shards, named_parameters, run_on_ranks
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, pool_gb, run_forest, run_long, started
from sampling_cases import SHAPES, make_model, sampling_config
from speculation_exact_cases import suffix_drafting

GROUPED = SHAPES["grouped queries, QK-norm, untied"]
DRIVE = Drive(seed=12, prompts=2, depth=1, longest=8)
# Responses of 20 to 32 tokens: together they need more pages than there are.
LONG = 5


@dataclass(frozen=True)
class MeshJob:
    parallel: ParallelConfig
    settings: dict[str, Any]
    drafts: bool = False


def forest_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor], dict[str, MeshJob]]) -> dict:
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import destroy_parallel, initialize_parallel

    config, weights, jobs = argument
    results = {}
    for name, job in jobs.items():
        destroy_parallel()
        model = build_model(config, initialize_parallel(5, job.parallel), job.parallel)
        copy_shards(model, weights, config)
        engine = started(model, **job.settings, drafting=suffix_drafting() if job.drafts else None)
        forest = run_forest(engine, DRIVE)
        engine.start(NEVER, 4)
        if job.drafts:
            engine.update_weights(1)
        results[name] = (forest, run_long(engine, LONG), engine.statistics())
    return results


def test_meshes_give_the_samples_of_one_process(tmp_path):
    config = sampling_config(**GROUPED, num_layers=3)
    model = make_model(9, **GROUPED, num_layers=3)
    weights = {name: p.detach().clone() for name, p in named_parameters(model).items()}
    expected, expected_long = run_forest(started(model), DRIVE), run_long(started(model, NEVER), LONG)
    tensor = dict(tensor_model_parallel_size=2)
    stages = dict(pipeline_model_parallel_size=2)
    meshes = {
        "tp2-sp": ParallelConfig(**tensor, sequence_parallel=True),
        "pp2-vpp2": ParallelConfig(
            **stages, num_virtual_stages_per_pipeline_rank=2, pipeline_model_parallel_layout="Et|t|t|L"
        ),
    }
    jobs = {name: MeshJob(parallel, SETTINGS["small pool"]) for name, parallel in meshes.items()}
    # In this memory the stage with one layer could hold twice as many pages as the other; both take the fewer.
    small = {name: value for name, value in SETTINGS["small pool"].items() if name != "pages"}
    gib = 2 / 3 * pool_gb(model, small["block_size"], SETTINGS["small pool"]["pages"])
    jobs["pp2-vpp2"] = MeshJob(meshes["pp2-vpp2"], small | {"buffer_size_gb": gib})
    # Ranks draft alike, after each has measured its own passes too.
    jobs["tp2"] = MeshJob(ParallelConfig(**tensor), SETTINGS["small pages"], drafts=True)
    ranks = run_on_ranks(forest_on_rank, (config, weights, jobs), 2, tmp_path / "mesh")
    for name, job in jobs.items():
        for rank in ranks:
            actual, found_long, statistics = rank[name]
            assert_same(actual, expected, 1e-12)
            assert_same(found_long, expected_long, 1e-12)
            assert statistics["accepted_drafts" if job.drafts else "preemptions"] > 0
        counts = [{k: v for k, v in rank[name][2].items() if not k.endswith("seconds")} for rank in ranks]
        assert counts[0] == counts[1]
        for request_id in expected:
            first, second = (rank[name][0][request_id][1] for rank in ranks)
            assert np.array_equal(first.logprobs, second.logprobs)


def test_latents_give_the_samples_of_one_process(tmp_path):
    config = sampling_config(**DEEPSEEK, **EXPERTS, **ADAPTERS, disable_bias_linear=True)
    weights = latent_weights(config, seed=9)
    model = build_model(config, initialize_parallel(9))
    copy_shards(model, weights, config)
    expected, expected_long = run_forest(started(model), DRIVE), run_long(started(model, NEVER), LONG)
    meshes = {
        "tp2-sp": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1),
        "pp2": ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tL"),
    }
    jobs = {name: MeshJob(parallel, SETTINGS["small pages"]) for name, parallel in meshes.items()}
    for rank in run_on_ranks(forest_on_rank, (config, weights, jobs), 2, tmp_path / "mesh"):
        for actual, actual_long, _ in rank.values():
            assert_same(actual, expected, 1e-12)
            assert_same(actual_long, expected_long, 1e-12)
