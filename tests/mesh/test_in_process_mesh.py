"""The in-process engine on meshes gives the samples of one process, also when requests lose their pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_dta.config import ModelConfig, ParallelConfig
from megatron_dta.parity.shards import shard_weights
from mesh_worker import named_parameters, run_on_ranks
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, run_forest, run_long, started
from sampling_cases import SHAPES, make_model, sampling_config

GROUPED = SHAPES["grouped queries, QK-norm, untied"]


@dataclass(frozen=True)
class MeshJob:
    model: ModelConfig
    parallel: ParallelConfig
    weights: dict[str, torch.Tensor]
    settings: dict[str, Any]
    drive: Drive


def forest_on_rank(rank: int, jobs: dict[str, MeshJob]) -> dict[str, Any]:
    from megatron_dta.model import build_model, current_mesh, destroy_parallel, initialize_parallel

    found = {}
    for name, job in jobs.items():
        destroy_parallel()
        model = build_model(job.model, initialize_parallel(5, job.parallel), job.parallel)
        mesh = current_mesh()
        shard = shard_weights(job.weights, job.model, mesh.tensor_rank, mesh.tensor_size)
        with torch.no_grad():
            for parameter_name, parameter in named_parameters(model).items():
                parameter.copy_(shard[parameter_name])
        # Each replica calls in an order of its own.
        drive = replace(job.drive, order=job.drive.order + mesh.data_rank)
        engine = started(model, **job.settings)
        forest = run_forest(engine, drive)
        engine.start(NEVER, 4)
        found[name] = (forest, run_long(engine), engine.statistics())
    return found


def test_meshes_give_the_samples_of_one_process(tmp_path):
    config = sampling_config(**GROUPED, num_layers=4)
    whole = make_model(9, **GROUPED, num_layers=4)
    weights = {name: p.detach().clone() for name, p in named_parameters(whole).items()}
    drive = Drive(seed=12, prompts=3, depth=2)
    expected, expected_long = run_forest(started(whole), drive), run_long(started(whole, NEVER))
    tensor = dict(tensor_model_parallel_size=2)
    stages = dict(pipeline_model_parallel_size=2)
    meshes = {
        "tp2": ParallelConfig(**tensor),
        "tp2-sp": ParallelConfig(**tensor, sequence_parallel=True),
        "pp2": ParallelConfig(**stages),
        "pp2-uneven": ParallelConfig(**stages, pipeline_model_parallel_layout="Ettt|tL"),
        "pp2-vpp2": ParallelConfig(**stages, num_virtual_stages_per_pipeline_rank=2),
        "dp2": ParallelConfig(),
    }
    small = SETTINGS["small pool"]
    jobs = {name: MeshJob(config, parallel, weights, small, drive) for name, parallel in meshes.items()}
    ranks = run_on_ranks(forest_on_rank, jobs, 2, tmp_path / "mesh")
    for name in meshes:
        for rank in ranks:
            found, found_long, statistics = rank[name]
            assert_same(found, expected, 1e-12)
            assert_same(found_long, expected_long, 1e-12)
            assert statistics["preemptions"] > 0
        if name != "dp2":
            counts = [{k: v for k, v in rank[name][2].items() if k != "seconds"} for rank in ranks]
            assert counts[0] == counts[1]
        for request_id in expected:
            first, second = (rank[name][0][request_id][1] for rank in ranks)
            assert name == "dp2" or np.array_equal(first.logprobs, second.logprobs)
