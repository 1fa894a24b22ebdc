"""The in-process engine with latent attention: a paged cache of latents, against the trainer's logprobs."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from latent_cases import ADAPTERS, DEEPSEEK, EXPERTS
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.model.decode import static_latents
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.layers.lora import adapters_of, without_adapters
from megatron_dta.sampling.in_process import pages
from megatron_dta.sampling.in_process.cuda_graphs import Burst, DecodeSteps, why_not_captured
from rollout_forest import (
    NEVER,
    SETTINGS,
    Drive,
    assert_same,
    poison_pages,
    run_forest,
    run_long,
    started,
    trainers_logprobs,
)
from sampling_cases import make_model
from speculation_exact_cases import Adversary, answers_of
from triton_device import interpreter


def latent_model(seed: int, dtype: torch.dtype = torch.float64, **more: object):
    return make_model(seed, dtype, **(DEEPSEEK | EXPERTS), disable_bias_linear=True, **more)


def test_a_forest_has_the_trainers_logprobs_for_any_order_of_calls(monkeypatch: pytest.MonkeyPatch):
    seed_all(3)
    poison_pages(monkeypatch)
    model, drive = latent_model(3, **ADAPTERS), Drive(seed=3, prompts=2, depth=1, longest=10)
    with torch.no_grad():
        for adapter in adapters_of([model]):
            adapter.lora_B.normal_(0, 0.3)
    engine = started(model)
    samples = run_forest(engine, drive)
    trained = trainers_logprobs(model, samples, TreeConfig(tree_segment_tokens=16))
    sampled = [result.logprobs for _, result in samples.values()]
    assert max(np.abs(a - b).max() for a, b in zip(sampled, trained, strict=True)) < 1e-12
    with without_adapters([layer.self_attention.linear_kv_up_proj_adapter for layer in model.decoder.layers]):
        others = trainers_logprobs(model, samples, TreeConfig(tree_segment_tokens=16))
    assert max(np.abs(a - b).max() for a, b in zip(sampled, others, strict=True)) > 1e-3
    assert engine.statistics()["reused_tokens"] > 0
    for number, settings in enumerate((dict(block_size=3, max_tokens=5, max_requests=3), SETTINGS["small pool"]), 1):
        engine = started(model, **settings)
        assert_same(run_forest(engine, replace(drive, order=number)), samples, 1e-12)
        assert engine.pages_in_use == 0


def test_preemption_and_drafts_change_nothing():
    model = latent_model(14)
    reference = run_long(started(model, NEVER), 9)
    engine = started(model, NEVER, block_size=4, pages=30, max_requests=7)
    assert_same(run_long(engine, 9), reference, 1e-12)
    assert engine.statistics()["preemptions"] > 1
    drive = Drive(seed=5, prompts=2, depth=1, longest=16)
    expected = run_forest(started(model), drive)
    drafting = Adversary("mixed", answers_of(expected), seed=2)
    assert_same(run_forest(started(model, block_size=4, max_tokens=12, drafting=drafting), drive), expected, 1e-12)
    assert drafting.accepted > 0


@interpreter
@pytest.mark.parametrize("settings", [{}, dict(block_size=3, max_requests=5, pages=30, burst=5)], ids=["", "small"])
def test_passes_at_fixed_addresses_have_the_samples_of_eager_ones(settings: dict, monkeypatch: pytest.MonkeyPatch):
    """Rows that leave a burst, branches of held requests, caches that grow, drafts, which take eager passes."""
    monkeypatch.setattr(static_latents, "_MOST_POSITIONS", 64)  # so that rows are attended to in parts
    monkeypatch.setattr(pages, "_FIRST_PAGES", 2)
    model, drive = latent_model(7, torch.float32), Drive(seed=9, prompts=2, depth=2, longest=20)
    assert "CUDA GPU" in why_not_captured(make_model(7, **DEEPSEEK, disable_bias_linear=True))
    expected = run_forest(started(model), drive)
    poison_pages(monkeypatch)
    caches, shapes, read = [], set(), DecodeSteps._read

    def noting(steps: DecodeSteps, cache: PagedCache, burst: Burst) -> None:
        caches.append(weakref.ref(cache))
        shapes.update((*cache.keys[n].shape[2:], *cache.values[n].shape[2:]) for n in cache.layer_rows)
        read(steps, cache, burst)

    monkeypatch.setattr(DecodeSteps, "_read", noting)
    engine = started(model, static_passes=True, **settings)
    assert_same(run_forest(engine, drive), expected, 2e-5)
    statistics = engine.statistics()
    assert statistics["static_forwards"] > 0.5 * statistics["forwards"]
    assert (statistics["captures"] > len(engine._steps._passes)) == (not settings)
    assert shapes == {(1, 12 + 4, 1, 0)}
    assert not any(cache() for cache in caches)
    drafting = Adversary("mixed", answers_of(expected), seed=2)
    engine = started(model, static_passes=True, drafting=drafting, **settings)
    assert_same(run_forest(engine, drive), expected, 2e-5)
    assert drafting.accepted > 0
    assert engine.statistics()["static_forwards"] < engine.statistics()["forwards"]
