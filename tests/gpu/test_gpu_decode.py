"""Decoding on a GPU: the compiled paged kernels, CUDA graphs, and samples equal to those of the plain path."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from conftest import seed_all
from decode_layer_cases import fused_model, passes
from dta_kernels.layers.few_rows import tiles_for
from dta_kernels.layers.qkv_rope import QKVLayout
from dta_kernels.logprobs.draw_tokens import draw_tokens, draw_tokens_reference
from dta_kernels.paged_attention import launch
from dta_kernels.paged_attention.launch import paged_config
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.model.decode.paged_context import PagedContext
from megatron_dta.core.model.layers.fused_layer import FusedLayer
from megatron_dta.sampling.in_process.cuda_graphs import why_not_captured
from megatron_dta.sampling.interface import GenerationRequest, generate
from mixed_rows_cases import mixed_error
from paged_attention_cases import PagedCase, relative_error
from rollout_forest import NEVER, Drive, assert_same, run_forest, run_long, started, trainers_logprobs
from sampling_cases import SHAPES, make_model, random_prompts
from speculation_exact_cases import Adversary, answers_of, suffix_drafting

CUDA = torch.device("cuda")
# Heads of 16 channels: a matrix product takes no fewer.
GROUPED = SHAPES["grouped queries, QK-norm, untied"] | dict(kv_channels=16)
EXPERTS = {
    "softmax": dict(
        num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, disable_bias_linear=True
    ),
    "sigmoid, shared experts": dict(
        num_experts=16, moe_router_topk=4, moe_ffn_hidden_size=32, disable_bias_linear=True,
        moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=16, moe_router_enable_expert_bias=True,
    ),
}  # fmt: skip
GRAPHS = dict(static_passes=True)
PLAIN = dict(attention_impl="reference")
BOUNDS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("head_size", "ratio", "groups"), [(64, 7, 2), (96, 4, 1), (128, 2, 8), (256, 1, 2)])
def test_the_compiled_kernels_equal_their_twin(
    dtype: torch.dtype, head_size: int, ratio: int, groups: int, monkeypatch: pytest.MonkeyPatch
):
    generator = seed_all(head_size + ratio)
    for starts, counts in (
        ([300, 2, 0, 4095, 640], [1, 1, 1, 1, 1]),
        ([40, 2700, 0], [3, 16, 1]),
        ([0, 33], [500, 129]),
    ):
        case = PagedCase.random(generator, starts, counts, (groups * ratio, groups, head_size), dtype, CUDA)
        n = len(case.query)
        config = paged_config(ratio, head_size, dtype, max(counts))
        out = case.run(config, padding=2)
        assert out[n:].isnan().all()
        assert relative_error(out[:n], case.expected()) < BOUNDS[dtype]
        with monkeypatch.context() as patched:
            # A program of a tile has all of its parts, or each has one.
            for programs in (1, 10**6):
                patched.setattr(launch, "_PROGRAMS", programs)
                assert torch.equal(out[:n], case.run(config))


@pytest.mark.parametrize("programs", [1, 4096])
@pytest.mark.parametrize("layout", [QKVLayout(3, 3, 64), QKVLayout(8, 2, 128), QKVLayout(2, 8, 256)])
def test_attention_of_mixed_rows_equals_its_twin(layout: QKVLayout, programs: int):
    """With the settings of few sequences and of many."""
    generator, (_, ratio, head_size) = seed_all(programs), layout
    for dtype, bound in BOUNDS.items():
        config, rows = paged_config(ratio, head_size, dtype, 1, programs), (layout, head_size, head_size > 64, 1)
        assert mixed_error(generator, [300, 2, 0, 4095, 640], *rows, dtype, CUDA, config, False) < 3 * bound


def test_layers_with_products_of_few_rows(monkeypatch: pytest.MonkeyPatch):
    """As near to float32 as the modules; a captured pass has the same bits as an eager one, every time."""
    shape = dict(hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16, num_query_groups=8, kv_channels=128)
    shape |= dict(disable_bias_linear=True, init_method_std=0.02)
    model, exact = (fused_model("QK-norm", params_dtype=dtype, **shape) for dtype in (torch.bfloat16, torch.float32))
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items() if value is not None})
    weight = model.decoder.layers[0].mlp.linear_fc2.weight
    assert tiles_for(weight[:3], weight) is not None

    def captured(tokens: torch.Tensor, context: PagedContext) -> torch.Tensor:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(tokens, context)
        graph.replay()
        first = out.clone()
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)
        return out

    direct, _ = passes(model, captured)
    with monkeypatch.context() as patched:
        patched.setattr(FusedLayer, "decodes_directly", False)
        modules, _ = passes(model)
        expected, _ = passes(exact)
    for one, other, wanted in zip(direct, modules, expected, strict=True):
        assert relative_error(one, wanted) <= 1.1 * relative_error(other, wanted)


@pytest.mark.parametrize("kind", ["kernels", "graphs", "right", "mixed", "suffix", "direct"])
def test_graphs_and_kernels_give_the_plain_samples_in_float32(kind: str):
    model = make_model(3, torch.float32, **GROUPED | (dict(normalization="RMSNorm") if kind == "direct" else {}))
    drive = Drive(seed=17)
    reference = run_forest(started(model, **PLAIN), drive)
    settings = dict(GRAPHS if kind != "kernels" else {})
    if kind == "suffix":
        settings["drafting"] = suffix_drafting()
    elif kind in ("right", "mixed"):
        settings["drafting"] = Adversary(kind, answers_of(reference), 1)
    for order, more in enumerate((dict(), dict(block_size=3, max_requests=5, max_tokens=11))):
        engine = started(model, **settings, **more)
        assert_same(run_forest(engine, replace(drive, order=order)), reference, 2e-5)
        statistics = engine.statistics()
        assert engine.pages_in_use == 0
        # Where drafts are all right, most passes are their verifications, which have graphs of their own.
        assert (statistics["static_forwards"] > 0) == (kind != "kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXPERTS)
def test_layers_with_experts_are_captured(name: str, dtype: torch.dtype):
    """One graph serves all choices of experts: samples in float32 are the plain ones, and those in bfloat16 the same
    twice."""
    model = make_model(7, dtype, **GROUPED | EXPERTS[name])
    assert why_not_captured(model) is None
    drive = Drive(seed=23)
    first, again = (run_forest(started(model, **GRAPHS), replace(drive, order=1)) for _ in range(2))
    assert_same(again, first, 0)
    if dtype == torch.float32:
        assert_same(first, run_forest(started(model, **PLAIN), drive), 2e-5)
        engine = started(model, **GRAPHS, drafting=suffix_drafting())
        assert_same(run_forest(engine, drive), first, 2e-5)
        assert engine.statistics()["static_forwards"] > 0


def test_preempted_requests():
    model = make_model(14, torch.float32, **GROUPED)
    reference = run_long(started(model, NEVER, **PLAIN))
    for settings in (dict(block_size=1, pages=65, max_tokens=8), dict(block_size=4, pages=30, max_requests=7)):
        engine = started(model, NEVER, **settings, **GRAPHS)
        assert_same(run_long(engine), reference, 2e-5)
        assert engine.statistics()["preemptions"] > 0


def test_sampled_logprobs_are_the_trainers_in_float32():
    model = make_model(18, torch.float32, **GROUPED)
    found = run_forest(started(model, **GRAPHS), Drive(seed=3, order=5))
    trained = trainers_logprobs(model, found, TreeConfig(tree_segment_tokens=24))
    for (_, result), logprobs in zip(found.values(), trained, strict=True):
        assert np.abs(logprobs - result.logprobs).max() <= 1e-5


def test_bfloat16_logprobs_are_within_the_noise_of_two_dense_runs():
    """Sampler and dense training each differ from float32 by rounding; the sampler by no more, over several models."""
    ratios = []
    for seed in range(6):
        shape = GROUPED | dict(hidden_size=128, init_method_std=0.1)
        model, exact = make_model(30 + seed, torch.bfloat16, **shape), make_model(0, torch.float32, **shape)
        exact.load_state_dict({name: value.float() for name, value in model.state_dict().items() if value is not None})
        found = run_forest(started(model, **GRAPHS), Drive(seed=seed))
        sampled = np.concatenate([result.logprobs for _, result in found.values()])
        dense = TreeConfig(tree_mode="dense")
        trained, expected = (np.concatenate(trainers_logprobs(m, found, dense)) for m in (model, exact))
        ratios.append(np.abs(sampled - expected).mean() / np.abs(trained - expected).mean())
    print(f"distance of the sampler over dense training's: {ratios}")
    assert np.mean(ratios) <= 1 + 2 * np.std(ratios, ddof=1) / len(ratios) ** 0.5 + 0.02


def test_graphs_see_weights_that_changed_in_place_and_a_cache_that_moved():
    model = make_model(16, torch.float32, **GROUPED)
    prompts = random_prompts(np.random.default_rng(3), [4] * 5)
    requests = [GenerationRequest(i, prompt, 40, i) for i, prompt in enumerate(prompts)]
    engine = started(model, NEVER, **GRAPHS, block_size=1)
    first = generate(engine, requests)
    captured = dict(engine._steps._passes)
    held = torch.empty(1 << 20, device="cuda")  # the next cache lies elsewhere
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    engine.start(NEVER, 4)
    again, expected = generate(engine, requests), generate(started(model, NEVER, **PLAIN), requests)
    assert [r.token_ids.tolist() for r in again] == [r.token_ids.tolist() for r in expected]
    assert [r.token_ids.tolist() for r in again] != [r.token_ids.tolist() for r in first]
    assert all(engine._steps._passes[key] is kept for key, kept in captured.items())
    del held


def test_top_p_and_greedy_are_captured_too():
    model = make_model(19, torch.float32, **GROUPED)
    prompts = random_prompts(np.random.default_rng(4), [3, 8, 5])
    requests = [GenerationRequest(i, prompt, 30, i) for i, prompt in enumerate(prompts)]
    for params in (replace(NEVER, top_p=0.8), replace(NEVER, temperature=0.0), replace(NEVER, temperature=0.6)):
        runs = [generate(started(model, params, **settings), requests) for settings in (PLAIN, GRAPHS)]
        one, other = ([r.token_ids.tolist() for r in run] for run in runs)
        assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_a_real_vocabulary_are_drawn_as_by_the_twin(dtype: torch.dtype):
    generator = seed_all(21)
    steepness = torch.from_numpy(10.0 ** generator.uniform(-1, 1, (300, 1))).to(CUDA)
    logits = (torch.randn(300, 151_936, device=CUDA) * steepness).to(dtype)
    noise = torch.from_numpy(generator.random(300)).to(CUDA)
    for temperature, known in product((0.0, 0.6, 1.0), (None, 151_669)):  # ids that the tokenizer of Qwen3 has
        tokens, logprobs = draw_tokens(logits, noise, temperature, known)
        expected, their_logprobs = draw_tokens_reference(logits, noise, temperature, known)
        assert known is None or int(tokens.max()) < known
        # A draw within rounding of the border between two tokens may fall to either side; and the sums of 150,000
        # float32 quotients that differ in the last bit are another border yet.
        assert (tokens != expected).sum() <= (3 if temperature == 0.6 else 1)
        same = tokens == expected
        assert (logprobs - their_logprobs)[same].abs().max() <= 2e-5
        assert torch.equal(tokens[7:9], draw_tokens(logits[7:9], noise[7:9], temperature, known)[0])
