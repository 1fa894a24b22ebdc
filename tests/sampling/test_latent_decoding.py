"""The in-process engine with latent attention: a paged cache of latents, against the trainer's logprobs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from in_process_engine_cases import trainers_logprobs
from latent_cases import ADAPTERS, DEEPSEEK, EXPERTS
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.layers.lora import adapters_of, without_adapters
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, poison_pages, run_forest, run_long, started
from sampling_cases import make_model
from speculation_exact_cases import Adversary, answers_of


def latent_model(seed: int, dtype: torch.dtype = torch.float64, **more: object):
    return make_model(seed, dtype, **(DEEPSEEK | EXPERTS), disable_bias_linear=True, **more)


def test_a_forest_has_the_trainers_logprobs_for_any_order_of_calls(monkeypatch: pytest.MonkeyPatch):
    seed_all(3)
    poison_pages(monkeypatch)
    model, drive = latent_model(3, **ADAPTERS), Drive(seed=3, prompts=2, longest=20)
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
    reference = run_long(started(model, NEVER))
    engine = started(model, NEVER, block_size=4, pages=30, max_requests=7)
    assert_same(run_long(engine), reference, 1e-12)
    assert engine.statistics()["preemptions"] > 1
    drive = Drive(seed=5, prompts=2)
    expected = run_forest(started(model), drive)
    drafting = Adversary("mixed", answers_of(expected), seed=2)
    assert_same(run_forest(started(model, block_size=4, max_tokens=12, drafting=drafting), drive), expected, 1e-12)
    assert drafting.accepted > 0


def test_the_cache_keeps_latents_only(monkeypatch: pytest.MonkeyPatch):
    caches: list[PagedCache] = []
    grow = PagedCache.grow
    monkeypatch.setattr(PagedCache, "grow", lambda cache, pages: (caches.append(cache), grow(cache, pages))[1])
    model = latent_model(6)
    run_forest(started(model), Drive(seed=1, prompts=1))
    assert {pages.shape[1:] for pages in caches[-1].keys.values()} == {(16, 1, 12 + 4)}
    assert {pages.numel() for pages in caches[-1].values.values()} == {0}
    assert "latent attention" in why_not_captured(model)
