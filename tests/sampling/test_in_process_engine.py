"""The in-process engine against a slow one without cache, batch or sharing: trees of requests in any order, with pools
so small that running requests lose their pages, and against the trainer's logprobs.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import TreeConfig
from megatron_dta.sampling.in_process.cache_size import DeviceMemory, max_pages, pass_bytes
from megatron_dta.sampling.in_process.next_token import most_logit_bytes
from megatron_dta.sampling.interface import GenerationRequest, generate
from rollout_forest import NEVER, PARAMS, SETTINGS, Drive, assert_same, run_forest, run_long, started, trainers_logprobs
from sampling_cases import EOS, SHAPES, VOCAB, make_model, random_prompts, slow_sample

GROUPED = SHAPES["grouped queries, QK-norm, untied"]
EXPERTS = GROUPED | dict(disable_bias_linear=True, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=20)
ONE_LAYER = GROUPED | dict(num_layers=1)
MODELS = SHAPES | {"experts": EXPERTS}


@pytest.mark.parametrize("shape", MODELS)
def test_a_forest_equals_the_slow_engine(shape: str):
    """Token for token, logprob for logprob, for any order of calls: every kind of pool, on most models a small one."""
    seed_all(len(shape))
    model = make_model(3, **MODELS[shape])
    drive = Drive(seed=len(shape) + 6, prompts=2, depth=2, longest=16)
    reference = run_forest(started(model), drive)
    assert len(reference) > 20
    ended = 0
    for request, result in reference.values():
        tokens, logprobs = slow_sample(model, request, PARAMS, 4, guess=result.token_ids)
        assert result.token_ids.tolist() == tokens
        assert np.allclose(result.logprobs, logprobs, rtol=0, atol=1e-12)
        assert result.ended == (tokens[-1] in (EOS, 3))
        ended += result.ended
    assert 2 < ended < len(reference) - 5
    pools = list(SETTINGS)[1:] if MODELS[shape] is GROUPED else ["small pool"]
    for number, settings in enumerate(SETTINGS[pool] for pool in pools):
        engine = started(model, **settings)
        samples = run_forest(engine, replace(drive, order=number))
        assert_same(samples, reference, 1e-12)
        statistics = engine.statistics()
        assert engine.pages_in_use == 0
        contexts = sum(len(request.token_ids) for request, _ in samples.values())
        assert statistics["prefilled_tokens"] + statistics["reused_tokens"] == contexts
        assert statistics["decoded_tokens"] == sum(len(result.token_ids) for _, result in samples.values())
        assert statistics["requests"] == len(samples)
        if "pages" in settings:
            assert statistics["peak_pages"] <= settings["pages"]
            assert statistics["evictions"] > 0


@pytest.mark.parametrize("changes", [{}, dict(temperature=0), dict(temperature=0.7, top_p=0.8)])
def test_ids_that_the_tokenizer_lacks_are_never_sampled(changes: dict[str, float]):
    """What is sampled keeps its logprob, that of the whole vocabulary."""
    model = make_model(3, **ONE_LAYER)
    prompts = random_prompts(np.random.default_rng(8), [3, 7, 5])
    requests = [GenerationRequest(i, prompts[i % 3], 12, i) for i in range(9)]
    full, known = (replace(NEVER, vocab_size=size, **changes) for size in (None, 14))
    assert any(result.token_ids.max() >= 14 for result in generate(started(model, full), requests))
    for request, result in zip(requests, generate(started(model, known), requests), strict=True):
        tokens, logprobs = slow_sample(model, request, known, 4, guess=result.token_ids)
        assert result.token_ids.tolist() == tokens
        assert max(tokens) < 14
        assert np.allclose(result.logprobs, logprobs, rtol=0, atol=1e-12)


def test_preempted_requests_give_the_same_samples():
    model = make_model(14, **ONE_LAYER)
    reference = run_long(started(model, NEVER), 9)
    for request, result in list(reference.values())[::4]:
        tokens, logprobs = slow_sample(model, request, NEVER, 4, guess=result.token_ids)
        assert result.token_ids.tolist() == tokens
        assert np.allclose(result.logprobs, logprobs, rtol=0, atol=1e-12)
    for settings in (dict(block_size=4, pages=30, max_requests=7), dict(block_size=16, pages=5)):
        engine = started(model, NEVER, **settings)
        assert_same(run_long(engine, 9), reference, 1e-12)
        statistics = engine.statistics()
        assert statistics["preemptions"] > 1
        assert statistics["recomputed_tokens"] > 5
        assert statistics["peak_pages"] <= settings["pages"]
        assert engine.pages_in_use == 0


def test_parents_are_found_without_being_named_where_pages_are_full():
    model, drive = make_model(4, num_layers=1), Drive(seed=9, prompts=3, longest=16)
    no_hints = replace(drive, hints=False)
    engines = [started(model, block_size=1), started(model, block_size=1), started(model, block_size=1000)]
    with_hints, without = run_forest(engines[0], drive), run_forest(engines[1], no_hints)
    with_long_pages = run_forest(engines[2], no_hints)
    for samples in (without, with_long_pages):
        for request_id, (_, result) in with_hints.items():
            assert samples[request_id][1].token_ids.tolist() == result.token_ids.tolist()
    reused = [engine.statistics()["reused_tokens"] for engine in engines]
    # A child of which its parent has computed all but one token publishes that one only after it has ended.
    assert reused[0] >= 0.99 * reused[1] > 2 * reused[2] > 0


def test_forks_share_pages():
    """Counted: full pages of a common prefix once, a copy of the partly filled one for each, nothing after release."""
    seed_all(6)
    model = make_model(6)
    engine = started(model, NEVER, block_size=4)
    prompt = random_prompts(np.random.default_rng(1), [10])[0]
    requests = [GenerationRequest(i, prompt, 7, i, hold=True) for i in range(8)]
    results = generate(engine, requests)
    # Positions with K and V: 10 + 7 - 1 = 16, four pages each; the prompt's first nine positions fill two of them.
    assert engine.pages_in_use == 2 + 8 * 2
    statistics = engine.statistics()
    assert statistics["prefilled_tokens"] == 10 + 7 * 1
    assert statistics["reused_tokens"] == 7 * 9
    context = np.concatenate([prompt, results[3].token_ids])
    children = [GenerationRequest(100 + i, context, 3, 50 + i, parent=3, hold=True) for i in range(5)]
    generate(engine, children)
    # 16 positions are shared: four pages that are full; each child adds positions 16, 17, 18.
    assert engine.pages_in_use == 18 + 5
    assert engine.statistics()["prefilled_tokens"] == 17 + 5
    fork = [GenerationRequest(200 + i, context[:14], 1, 90 + i, parent=3) for i in range(2)]
    generate(engine, fork)
    assert engine.statistics()["prefilled_tokens"] == 22 + 2
    assert engine.pages_in_use == 23
    engine.release([3])
    assert engine.pages_in_use == 23
    engine.release([100 + i for i in range(5)])
    assert engine.pages_in_use == 2 + 7 * 2
    engine.release([0, 1, 2, 4, 5, 6, 7, 7])
    assert engine.pages_in_use == 0
    assert engine._cache is None


def test_a_parent_released_at_once_still_serves_its_children():
    model = make_model(7)
    engine = started(model, NEVER, max_requests=2)
    prompt = random_prompts(np.random.default_rng(2), [9])[0]
    (first,) = generate(engine, [GenerationRequest(0, prompt, 5, 1, hold=True)])
    context = np.concatenate([prompt, first.token_ids])
    engine.submit([GenerationRequest(i, context, 4, i, parent=0) for i in range(1, 6)])
    engine.release([0])
    with pytest.raises(ValueError, match="not held"):
        engine.release([0])
    engine.submit([GenerationRequest(0, prompt, 1, 7)])
    count = 0
    while results := engine.poll():
        count += len(results)
    assert count == 6
    assert engine.statistics()["reused_tokens"] >= 5 * 13
    assert engine.pages_in_use == 0


@pytest.mark.parametrize(
    ("dtype", "tolerance", "settings", "tree_mode"),
    [
        (torch.float64, 1e-12, "small pool", "dta"),
        (torch.float64, 1e-12, "default", "packed"),
        (torch.float64, 1e-12, "default", "dense"),
        (torch.float32, 1e-5, "default", "dta"),
    ],
)
def test_logprobs_of_the_forest_are_the_trainers(dtype: torch.dtype, tolerance: float, settings: str, tree_mode: str):
    """Forks, shared pages, recomputation after preemption, ids that are never sampled: every importance ratio is 1."""
    seed_all(40)
    model = make_model(18, dtype, **GROUPED)
    params = replace(PARAMS, vocab_size=14)
    drive = Drive(seed=3, order=5, prompts=2, depth=2, longest=16)
    samples = run_forest(started(model, params, **SETTINGS[settings]), drive)
    assert max(int(result.token_ids.max()) for _, result in samples.values()) == 13
    trained = trainers_logprobs(model, samples, TreeConfig(tree_mode=tree_mode, tree_segment_tokens=64))
    for (_, result), logprobs in zip(samples.values(), trained, strict=True):
        assert result.logprobs.dtype == (np.float64 if dtype == torch.float64 else np.float32)
        assert np.abs(logprobs - result.logprobs).max() <= tolerance


def test_bfloat16_logprobs_are_as_near_to_float32_as_the_trainers():
    """Sampler and dense training each differ from float32 by rounding; the sampler by no more, over several models."""
    ratios = []
    for seed in range(6):
        model = make_model(30 + seed, torch.bfloat16, **GROUPED, hidden_size=128, init_method_std=0.1)
        exact = make_model(0, torch.float32, **GROUPED, hidden_size=128, init_method_std=0.1)
        exact.load_state_dict({name: value.float() for name, value in model.state_dict().items() if value is not None})
        samples = run_forest(started(model), Drive(seed=seed, prompts=2, depth=1, longest=16))
        sampled = np.concatenate([result.logprobs for _, result in samples.values()])
        dense = TreeConfig(tree_mode="dense")
        trained, expected = (np.concatenate(trainers_logprobs(m, samples, dense)) for m in (model, exact))
        ratios.append(np.abs(sampled - expected).mean() / np.abs(trained - expected).mean())
        assert np.abs(sampled - expected).max() > 1e-4
    assert np.mean(ratios) <= 1 + 2 * np.std(ratios, ddof=1) / len(ratios) ** 0.5 + 0.02


def test_new_weights_and_new_phases():
    model = make_model(11)
    engine = started(model, NEVER, block_size=1)
    prompt = random_prompts(np.random.default_rng(4), [12])[0]
    (old,) = generate(engine, [GenerationRequest(0, prompt, 6, 1, hold=True)])
    assert old.policy_version == 0
    engine.submit([GenerationRequest(1, prompt, 6, 1)])
    with pytest.raises(ValueError, match="running"):
        engine.update_weights(3)
    with pytest.raises(ValueError, match="running"):
        engine.start(NEVER, 5)
    (again,) = engine.poll()
    assert again.token_ids.tolist() == old.token_ids.tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.update_weights(3)
    # The parent can still be named, but its K and V are of the old weights and gone.
    context = np.concatenate([prompt, old.token_ids])
    request = GenerationRequest(2, context, 6, 1, parent=0)
    (new,) = generate(engine, [request])
    assert new.policy_version == 3
    assert new.token_ids.tolist() == slow_sample(model, request, NEVER, 4)[0]
    engine.start(NEVER, 5)
    with pytest.raises(ValueError, match="not held"):
        engine.submit([GenerationRequest(3, context, 6, 1, parent=0)])
    (other,) = generate(engine, [GenerationRequest(3, context, 6, 1)])
    assert other.token_ids.tolist() != new.token_ids.tolist()


def test_an_error_leaves_an_engine_that_can_start_again():
    model = make_model(12)
    engine = started(model, NEVER)
    prompt = random_prompts(np.random.default_rng(5), [4])[0]
    good = generate(engine, [GenerationRequest(0, prompt, 5, 1)])[0]
    weight = model.output_weight()
    saved = weight[2].detach().clone()
    with torch.no_grad():
        weight[2] = float("nan")
    engine.submit([GenerationRequest(0, prompt, 5, 1)])
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.poll()
    assert engine.pages_in_use == 0
    with torch.no_grad():
        weight[2] = saved
    with pytest.raises(ValueError, match="not started"):
        engine.submit([GenerationRequest(0, prompt, 5, 1)])
    engine.start(NEVER, 4)
    assert generate(engine, [GenerationRequest(0, prompt, 5, 1)])[0].token_ids.tolist() == good.token_ids.tolist()


def test_what_cannot_be_sampled_is_refused():
    model = make_model(13)
    engine = started(model, NEVER, block_size=8, pages=5)
    prompt = random_prompts(np.random.default_rng(6), [10])[0]
    generate(engine, [GenerationRequest(1, prompt, 1, 1, hold=True)])
    for request, words in (
        (GenerationRequest(1, prompt, 1, 1), "in use"),
        (GenerationRequest(2, prompt, 87, 1), "--max-position-embeddings 96"),
        (GenerationRequest(2, prompt, 31, 1), "the K/V cache of 5 pages"),
        (GenerationRequest(2, prompt[:0], 1, 1), "empty"),
        (GenerationRequest(2, prompt + VOCAB, 1, 1), "vocabulary"),
        (GenerationRequest(2, prompt, 0, 1), "max_tokens"),
        (GenerationRequest(2, prompt, 1, -1), "key"),
        (GenerationRequest(2, prompt, 1, 1, parent=9), "not held"),
        (GenerationRequest(2, (prompt + 1) % VOCAB, 1, 1, parent=1), "no prefix"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit([GenerationRequest(5, prompt, 1, 1), request])
        assert engine.poll() == []
    assert len(generate(engine, [GenerationRequest(2, prompt, 30, 1)])[0].token_ids) == 30


def test_the_mode_of_the_model_lasts_for_a_phase():
    """Changing it visits every module, so it happens once; also after an error model and collector are as before."""
    engine = started(model := make_model(5).train(), NEVER)
    requests = [GenerationRequest(i, np.arange(1, 4, dtype=np.int32), 3 + i, i) for i in range(3)]
    engine.submit(requests)
    assert engine.poll(patient=False) == []  # one pass
    assert len(engine.poll()) == 1
    assert not model.training
    assert len(engine.poll() + engine.poll()) == 2
    engine.join()
    assert model.training
    engine.submit([replace(requests[0], request_id=7)])
    engine.close()
    assert model.training


GIB = 2**30
# 3 layers of 4 heads of 8 channels in float32.
PAGE_BYTES = 2 * 2 * 16 * 4 * 8 * 4


def test_what_is_free_becomes_pages_but_for_a_pass_and_a_margin():
    model = make_model(1, torch.float32)
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    needed = pass_bytes(model, 4096, 1024)
    budget = (60 * GIB - needed - int(0.04 * 80 * GIB)) / (1 + 1 / 4)
    assert max_pages(model, 16, None, 4096, 1024, memory=memory) == int(budget) // PAGE_BYTES
    # On a small GPU the margin is a gibibyte.
    small = DeviceMemory(free=6 * GIB, total=8 * GIB)
    assert small.cache_bytes(0, 10**9) == pytest.approx(5 * GIB, rel=1e-6)


def test_a_given_size_counts_alone_and_a_cpu_has_no_limit():
    model = make_model(1, torch.float32)
    memory = DeviceMemory(free=60 * GIB, total=80 * GIB)
    assert max_pages(model, 16, 0.5, 4096, 1024, memory=memory) == GIB // 2 // PAGE_BYTES
    assert max_pages(model, 16, None, 4096) is None
    assert max_pages(model, 16, None, 4096, memory=DeviceMemory(free=GIB // 2, total=8 * GIB)) == 0


def test_longer_passes_captured_ones_and_wider_layers_leave_less():
    model = make_model(1, torch.float32)
    assert pass_bytes(model, 4096) < pass_bytes(model, 8192)
    assert pass_bytes(model, 4096) < pass_bytes(model, 4096, 1024)
    wide, wider = (make_model(1, torch.float32, ffn_hidden_size=width) for width in (480, 960))
    assert pass_bytes(wider, 4096) - pass_bytes(wide, 4096) == 4096 * 4 * 3 * 480
    experts = make_model(1, torch.float32, num_experts=4, moe_router_topk=4, disable_bias_linear=True)
    assert pass_bytes(experts, 4096) > pass_bytes(model, 4096)


def test_logits_are_bounded():
    for rows in (1, 100, 10**6):
        assert most_logit_bytes(151_936, 2, 1, rows) <= 2**24 * 80
    assert most_logit_bytes(151_936, 2, 1, 0) == 0
    assert most_logit_bytes(151_936, 2, 2, 1) < most_logit_bytes(151_936, 2, 1, 2)
    assert most_logit_bytes(1000, 2, 1, 10) < 10 * 1000 * 80
