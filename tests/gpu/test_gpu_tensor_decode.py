"""Decoding on a tensor group of two GPUs: sums that read peer memory, and CUDA graphs with sums inside.

python -m pytest -m gpu -s tests/gpu/test_gpu_tensor_decode.py
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
from rollout_forest import NEVER, Drive, assert_same, run_forest, started
from sampling_cases import SHAPES, make_model, random_prompts, sampling_config
from speculation_exact_cases import suffix_drafting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

TENSOR = ParallelConfig(tensor_model_parallel_size=2)
GROUPED = SHAPES["grouped queries, QK-norm, untied"] | dict(kv_channels=16, normalization="RMSNorm")
DRIVE = Drive(seed=17)
GRAPHS, PLAIN = dict(static_passes=True), dict(attention_impl="reference")
LONGEST_S = 280
# Elements of a sum: of one token, odd ones, those of a decoding pass, and one too large for peer memory.
COUNTS = [8, 5120, 33 * 8, 64 * 5120, 256 * 5120, 2**22]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_two_gpus(function: Any, argument: Any, folder: Path) -> list[Any]:
    return run_on_ranks(function, argument, 2, folder, "nccl", LONGEST_S)


def term(rank: int, count: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(count, generator=generator).to(dtype).cuda()


def sums_on_rank(rank: int, _: Any) -> dict[str, Any]:
    from megatron_dta.model import initialize_parallel
    from megatron_dta.model.parallel.tensor_sum import tensor_sum

    initialize_parallel(5, TENSOR)
    total = tensor_sum()
    wrong = []
    for turn in range(20):
        for count in COUNTS:
            for dtype in DTYPES:
                terms = [term(each, count, dtype, turn) for each in (0, 1)]
                found = total(terms[rank].clone())
                if not torch.equal(found, terms[0] + terms[1]):
                    wrong.append((turn, count, dtype))
    # Sums one after the other in a graph, each of which overwrites the buffer that its predecessor's peer has read.
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(rank)).cuda() / 512**0.5
    x = torch.zeros(64, 512, device="cuda")

    def chain() -> torch.Tensor:
        y = x
        for _ in range(50):
            y = total.product(y, weight)
            y = y / y.norm()
        return y

    with torch.no_grad():
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = chain()
        replays = []
        for turn in range(30):
            x.copy_(torch.randn(64, 512, generator=torch.Generator().manual_seed(turn)))
            graph.replay()
            replays.append((out.clone(), chain()))
    equal = all(torch.equal(one, other) for one, other in replays)
    found = {"peers": total.reads_peers, "wrong": wrong, "equal": equal, "last": replays[-1][0].cpu()}
    del graph
    return found


def test_sums_of_peer_memory_are_exact_and_the_same_on_both_ranks(tmp_path):
    ranks = on_two_gpus(sums_on_rank, None, tmp_path / "mesh")
    print(f"sums read peer memory: {ranks[0]['peers']}")
    assert ranks[0]["peers"] == ranks[1]["peers"]
    for rank in ranks:
        assert rank["wrong"] == []
        assert rank["equal"]
        assert torch.isfinite(rank["last"]).all()
    assert torch.equal(ranks[0]["last"], ranks[1]["last"])


@dataclass(frozen=True)
class Job:
    parallel: ParallelConfig = field(default_factory=lambda: TENSOR)
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False


JOBS = {
    "graphs": Job(),
    "again": Job(),
    "eager": Job(settings=dict(static_passes=False)),
    "small pages": Job(settings=dict(block_size=3, max_requests=5, max_tokens=11)),
    "drafts": Job(drafts=True),
    "sequence parallel": Job(replace(TENSOR, sequence_parallel=True)),
    "modules": Job(changes=dict(fused_layer_impl="reference")),
}


def build_on(config: ModelConfig, weights: dict[str, torch.Tensor], parallel: ParallelConfig) -> Any:
    from megatron_dta.model import build_model, destroy_parallel, initialize_parallel

    destroy_parallel()
    model = build_model(config, initialize_parallel(5, parallel), parallel).eval()
    copy_shards(model, weights, config)
    return model


def samples_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor]]) -> dict[str, tuple]:
    from megatron_dta.sampling.engines.in_process.cuda_graphs import why_not_captured

    config, weights = argument
    found = {}
    for name, job in JOBS.items():
        model = build_on(replace(config, **job.changes), weights, job.parallel)
        assert why_not_captured(model) is None
        drafting = suffix_drafting(follows_clock=True) if job.drafts else None
        engine = started(model, drafting=drafting, **GRAPHS | job.settings)
        found[name] = run_forest(engine, replace(DRIVE, order=1)), engine.statistics()
        assert engine.pages_in_use == 0
    return found


def reference(dtype: torch.dtype, **changes: Any) -> tuple[ModelConfig, dict[str, torch.Tensor], Any]:
    """A model on one GPU: its configuration and weights, and itself."""
    shape = GROUPED | changes
    model = make_model(3, dtype, **shape)
    weights = {name: parameter.detach().cpu() for name, parameter in named_parameters(model).items()}
    return sampling_config(dtype, **shape), weights, model


def test_captured_sums_give_the_samples_of_one_gpu_in_float32(tmp_path):
    config, weights, model = reference(torch.float32)
    expected = run_forest(started(model, **PLAIN), DRIVE)
    ranks = on_two_gpus(samples_on_rank, (config, weights), tmp_path / "mesh")
    for name, job in JOBS.items():
        for rank in ranks:
            forest, statistics = rank[name]
            assert_same(forest, expected, 2e-5)
            assert (statistics["static_forwards"] > 0) == (name != "eager")
            assert (statistics["accepted_drafts"] > 0) == job.drafts
        for request_id in expected:
            assert np.array_equal(*(rank[name][0][request_id][1].logprobs for rank in ranks))
    for request_id in expected:
        assert np.array_equal(*(ranks[0][name][0][request_id][1].logprobs for name in ("graphs", "again")))


def bfloat16_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor]]) -> list[list]:
    from megatron_dta.sampling.engines.interface import GenerationRequest, generate

    model = build_on(*argument, TENSOR)
    prompts = random_prompts(np.random.default_rng(4), [3, 8, 5, 12] * 8)
    requests = [GenerationRequest(i, prompt, 40, i) for i, prompt in enumerate(prompts)]
    found = []
    for settings in (GRAPHS, GRAPHS, dict(static_passes=False)):
        results = generate(started(model, NEVER, **settings), requests)
        found.append([(result.token_ids.tolist(), result.logprobs) for result in results])
    return found


def test_bfloat16_is_reproducible_and_near_eager_passes(tmp_path):
    config, weights, _ = reference(torch.bfloat16, hidden_size=128, init_method_std=0.1)
    ranks = on_two_gpus(bfloat16_on_rank, (config, weights), tmp_path / "mesh")
    graphs, again, eager = ranks[0]
    for one, other, there in zip(graphs, again, ranks[1][0], strict=True):
        assert one[0] == other[0] == there[0]
        assert np.array_equal(one[1], other[1])
        assert np.array_equal(one[1], there[1])
    differences, same = [], 0
    for (tokens, logprobs), (others, their_logprobs) in zip(graphs, eager, strict=True):
        common = next((i for i, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), len(tokens))
        same += common
        differences.append(np.abs(logprobs[:common] - their_logprobs[:common]))
    print(f"{same} of {40 * len(graphs)} tokens before the first difference")
    assert same > 20 * len(graphs)
    assert np.concatenate(differences).mean() < 1e-2


def moved_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor]]) -> list[tuple[int, list]]:
    """Weights change in place, then one rank's move."""
    from megatron_dta.sampling.engines.interface import GenerationRequest, generate

    model = build_on(*argument, TENSOR)
    prompts = random_prompts(np.random.default_rng(3), [4] * 5)
    requests = [GenerationRequest(i, prompt, 40, i) for i, prompt in enumerate(prompts)]
    engine, found = started(model, NEVER, **GRAPHS), []
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
        plain = [result.token_ids.tolist() for result in generate(started(model, NEVER, **PLAIN), requests)]
        assert tokens == plain
        found.append((engine._steps.captures, tokens))
    return found


def test_graphs_are_captured_again_where_the_weights_of_one_rank_moved(tmp_path):
    config, weights, _ = reference(torch.float32)
    ranks = on_two_gpus(moved_on_rank, (config, weights), tmp_path / "mesh")
    assert ranks[0] == ranks[1]
    (first, before), (second, changed), (third, moved) = ranks[0]
    assert first == second < third
    assert changed == moved != before
