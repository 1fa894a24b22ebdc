"""Decoding on a tensor group of two GPUs: sums that read peer memory, and CUDA graphs with sums inside."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode_mesh_cases import LONGEST_S, Job, assert_reproducible, build_on, check_moved_weights, compare, reference
from megatron_dta.core.config import ModelConfig, ParallelConfig
from mesh_worker import run_on_ranks
from rollout_forest import NEVER, PARAMS, started
from sampling_cases import random_prompts

pytestmark = pytest.mark.two_gpus

TENSOR = ParallelConfig(tensor_model_parallel_size=2)
GRAPHS = dict(static_passes=True)
# Elements of a sum: of one token, odd ones, those of a decoding pass, and one too large for peer memory.
COUNTS = [8, 5120, 33 * 8, 64 * 5120, 256 * 5120, 2**22]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on_two_gpus(function: Any, argument: Any, folder: Path) -> list[Any]:
    return run_on_ranks(function, argument, 2, folder, "nccl", LONGEST_S)


def term(rank: int, count: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(count, generator=generator).to(dtype).cuda()


def sums_on_rank(rank: int, _: Any) -> dict[str, Any]:
    from megatron_dta.core.model.parallel.mesh import initialize_parallel
    from megatron_dta.core.model.parallel.tensor_sum import tensor_sum

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


JOBS = {
    "graphs": Job(TENSOR),
    "again": Job(TENSOR),
    "eager": Job(TENSOR, settings=dict(static_passes=False)),
    "small pages": Job(TENSOR, settings=dict(block_size=3, max_requests=5, max_tokens=11)),
    "drafts": Job(TENSOR, drafts=True),
    "sequence parallel": Job(replace(TENSOR, sequence_parallel=True)),
    "modules": Job(TENSOR, changes=dict(fused_layer_impl="reference")),
}


def test_captured_sums_give_the_samples_of_one_gpu_in_float32(tmp_path):
    assert_reproducible(compare(JOBS, PARAMS, 2, tmp_path / "mesh"))


def bfloat16_on_rank(rank: int, argument: tuple[ModelConfig, dict[str, torch.Tensor]]) -> list[list]:
    from megatron_dta.sampling.interface import GenerationRequest, generate

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


def test_graphs_are_captured_again_where_the_weights_of_one_rank_moved(tmp_path):
    check_moved_weights(TENSOR, 5, tmp_path / "mesh", dict(attention_impl="reference"))
