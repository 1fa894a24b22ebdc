"""Random forests of requests for rollout engines: forks, continuations, cuts, in any order of calls."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.sampling.in_process.cache_size import head_shape
from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate
from megatron_dta.sampling.params import SamplingParams
from sampling_cases import EOS, random_prompts

PARAMS = SamplingParams(max_response_tokens=1, eos_id=EOS, temperature=0.9, top_p=0.95, seed=31, other_eos_ids=(3,))
NEVER = SamplingParams(max_response_tokens=1, eos_id=10**6, seed=8)


@dataclass(frozen=True)
class Drive:
    """A random forest of requests: what is asked, and in which order calls are made.

    The forest follows from ``seed`` and the results alone, so two engines that sample alike get the same requests,
    whatever ``order`` is. First responses are shorter than ``longest``.
    """

    seed: int
    order: int = 0
    prompts: int = 6
    hints: bool = True
    depth: int = 3
    longest: int = 30


def run_forest(engine: Any, drive: Drive) -> dict[int, tuple[GenerationRequest, GenerationResult]]:
    """All requests and results by id; children are submitted now or later, held ones released now or at the end."""
    order = np.random.default_rng((drive.order, 77))
    done: dict[int, tuple[GenerationRequest, GenerationResult]] = {}
    asked, depth_of = {}, {}
    ready = roots_of(drive)
    depth_of.update((request.request_id, 0) for request in ready)
    finished = running = 0
    held: list[int] = []
    while ready or running:
        ready = [ready[i] for i in order.permutation(len(ready))]
        if ready and (not running or order.random() < 0.6):
            count = int(order.integers(1, len(ready) + 1))
            engine.submit(ready[:count])
            asked.update((request.request_id, request) for request in ready[:count])
            ready, running = ready[count:], running + count
            continue
        results = engine.poll()
        assert results
        for result in results:
            request = asked[result.request_id]
            done[request.request_id] = (request, result)
            running, finished = running - 1, finished + 1
            if request.hold:
                held.append(request.request_id)
            if depth_of[request.request_id] < drive.depth:
                children = children_of(drive, request, result)
                depth_of.update((child.request_id, depth_of[request.request_id] + 1) for child in children)
                ready += children
        waiting_for = {request.parent for request in ready}
        free = [request_id for request_id in held if request_id not in waiting_for]
        if free and order.random() < 0.5:
            engine.release(free[:1])
            held.remove(free[0])
    assert engine.poll() == []
    engine.release(held)
    return done


def roots_of(drive: Drive) -> list[GenerationRequest]:
    rng = np.random.default_rng((drive.seed, 1))
    prompts = random_prompts(rng, rng.integers(1, 16, drive.prompts))
    prompts[-1] = np.concatenate([prompts[0], prompts[-1]])
    return [
        GenerationRequest(
            1000 * (3 * i + j), prompt, int(rng.integers(1, drive.longest)), int(rng.integers(0, 2**63)), hold=True
        )
        for i, prompt in enumerate(prompts)
        for j in range(3)
    ]


def children_of(drive: Drive, request: GenerationRequest, result: GenerationResult) -> list[GenerationRequest]:
    """Continuations of all, of a part, or of all with an answer of the environment behind it."""
    rng = np.random.default_rng((drive.seed, 2, request.request_id))
    sequence = np.concatenate([request.token_ids, result.token_ids]).astype(np.int32)
    children = []
    for i in range(int(rng.choice([0, 1, 1, 2, 3]))):
        kind = rng.random()
        context = sequence
        if kind < 0.2:
            context = sequence[: int(rng.integers(1, len(sequence) + 1))]
        elif kind < 0.4:
            context = np.concatenate([sequence, random_prompts(rng, [4])[0]])
        is_named = rng.random() < 0.8
        parent = request.request_id if drive.hints and is_named else None
        key = request.key if rng.random() < 0.3 else int(rng.integers(0, 2**63))
        child_id = request.request_id * 5 + i + 1
        children.append(
            GenerationRequest(child_id, context, int(rng.integers(1, 8)), key, parent, bool(rng.random() < 0.9))
        )
    # Only a held parent may be named.
    return children if request.hold else [replace(child, parent=None) for child in children]


def pool_gb(model: Any, block_size: int, pages: int) -> float:
    """A budget of ``pages`` pages and a half."""
    shape = head_shape(model)
    size = PagedCache.page_bytes(len(model.attention_layers), block_size, shape.num_groups, shape.sizes, shape.dtype)
    return (pages + 0.5) * size / 2**30


def started(
    model: Any, params: SamplingParams = PARAMS, iteration: int = 4, drafting: Drafting | None = None, **settings: Any
) -> InProcessEngine:
    pages = settings.pop("pages", None)
    if pages is not None:
        settings["buffer_size_gb"] = pool_gb(model, settings["block_size"], pages)
    engine = InProcessEngine(model, EngineSettings(**settings), drafting)
    engine.start(params, iteration)
    return engine


def poison_pages(monkeypatch: pytest.MonkeyPatch, fresh: Callable[[torch.Tensor], Any] | None = None) -> None:
    """Fill pages that nobody has written with large numbers, or with what ``fresh`` says."""
    fresh = fresh or (lambda pages: 1e3 * torch.randn_like(pages))
    grow = PagedCache.grow

    def grow_poisoned(cache: PagedCache, num_pages: int) -> None:
        first = cache.num_pages
        grow(cache, num_pages)
        for tensor in (*cache.keys.values(), *cache.values.values()):
            tensor[first:] = fresh(tensor[first:])

    monkeypatch.setattr(PagedCache, "grow", grow_poisoned)


def assert_same(results: dict, expected: dict, tolerance: float) -> None:
    assert results.keys() == expected.keys()
    for request_id, (request, result) in expected.items():
        other_request, other = results[request_id]
        assert np.array_equal(other_request.token_ids, request.token_ids)
        assert other.token_ids.tolist() == result.token_ids.tolist()
        assert other.finish_reason is result.finish_reason
        assert np.abs(other.logprobs - result.logprobs).max() <= tolerance


# (page size, pages or no bound, rows, tokens of a pass). A sequence here has at most 92 positions.
SETTINGS = {
    "default": dict(),
    "small pages": dict(block_size=3, max_requests=7, max_tokens=11),
    "small pool": dict(block_size=1, pages=93, max_requests=9, max_tokens=16),
    "pool of one sequence": dict(block_size=2, pages=46, max_requests=20, max_tokens=50),
    "one row": dict(block_size=4, pages=23, max_requests=1, max_tokens=3),
}


def long_requests(count: int = 12) -> list[GenerationRequest]:
    """Responses that are much longer than their prompts: they run out of pages after they have started."""
    prompts = random_prompts(np.random.default_rng(15), [3, 5, 9])
    return [GenerationRequest(i, prompts[i % 3], 20 + 3 * i, 7 * i, hold=i % 2 == 0) for i in range(count)]


def run_long(engine: Any, count: int = 12) -> dict[int, tuple[GenerationRequest, GenerationResult]]:
    requests = long_requests(count)
    results = generate(engine, requests)
    engine.release([request.request_id for request in requests if request.hold])
    return {request.request_id: (request, result) for request, result in zip(requests, results, strict=True)}


def trainers_logprobs(model, results: dict, tree: TreeConfig) -> list[np.ndarray]:
    """What training computes for the tokens that each request has sampled."""
    samples = []
    for request, result in results.values():
        token_ids = np.concatenate([request.token_ids, result.token_ids])
        samples.append(TrainingSample(token_ids, np.arange(len(token_ids)) >= len(request.token_ids)))
    engine = TreeEngine(model, temperature=PARAMS.temperature, logprob_chunk_tokens=50)
    logprobs = engine.compute_logprobs(prepare_batch(samples, tree))
    return [row[sample.loss_mask] for sample, row in zip(samples, logprobs, strict=True)]
