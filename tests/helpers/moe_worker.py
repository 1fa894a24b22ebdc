"""What ranks do in the tests of experts besides training steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_dta.config import ModelConfig, ParallelConfig

PROMPTS = [np.arange(length) % 7 for length in (3, 9, 1, 5)]


def sample(
    rank: int, argument: tuple[ModelConfig, ParallelConfig, dict[str, torch.Tensor], list[list[int]]]
) -> list[Any]:
    """Responses to this data-parallel rank's share of sequences: (sequence, tokens, logprobs)."""
    from megatron_dta.model import build_model, current_mesh, initialize_parallel
    from megatron_dta.sampling.engines.in_process.engine import EngineSettings, InProcessEngine
    from megatron_dta.sampling.engines.interface import GenerationRequest, generate, phase
    from megatron_dta.sampling.params import SamplingParams
    from mesh_worker import copy_shards

    model_config, parallel, weights, shares = argument
    device = initialize_parallel(3, parallel)
    model = build_model(model_config, device, parallel)
    copy_shards(model, weights, model_config)
    own = shares[current_mesh().data_rank]
    params = SamplingParams(max_response_tokens=12, eos_id=2, seed=4)
    engine, found = InProcessEngine(model, EngineSettings(max_requests=5)), []
    for iteration in range(2):
        with phase(engine, params, iteration):
            requests = [GenerationRequest(i, PROMPTS[i % len(PROMPTS)], 12, key=i) for i in own]
            results = generate(engine, requests)
        found += [(iteration, i, result.token_ids, result.logprobs) for i, result in zip(own, results, strict=True)]
    return found


def dispatch(rank: int, meshes: dict[str, tuple[ParallelConfig, list[int]]]) -> dict[str, list[list[torch.Tensor]]]:
    """What our dispatcher and Megatron's make of this rank's tokens; a mesh comes with the number of each rank's."""
    from megatron_dta.model import build_model, destroy_parallel, initialize_parallel
    from token_dispatcher_cases import MODEL, both_ways, random_tokens

    found = {}
    for number, (name, (parallel, tokens)) in enumerate(meshes.items()):
        model = build_model(MODEL, initialize_parallel(3, parallel), parallel)
        for unused in (0, 3):
            given = random_tokens(tokens[rank], unused, seed=7 * number + rank)
            found[f"{name} {unused}"] = both_ways(model.decoder.layers[0].mlp.token_dispatcher, *given)
        destroy_parallel()
    return found
