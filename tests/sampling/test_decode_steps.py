"""The engine with the paged kernels and with passes at fixed addresses (captured on a GPU) gives the plain one's
samples: bursts, drafts, ends of sequence inside both, pools that preempt. In the interpreter; see ``test_gpu_decode``.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from decode_layer_cases import few_parts  # noqa: F401 (a fixture)
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.in_process import drafted_rows
from megatron_dta.sampling.in_process.cuda_graphs import Burst, DecodeSteps, RunningBurst, bucket, why_not_captured
from megatron_dta.sampling.in_process.drafting import Round
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.scheduler import Pass
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.wiring.engines import build_engine
from rollout_forest import NEVER, PARAMS, Drive, assert_same, poison_pages, run_forest, started
from sampling_cases import SHAPES, make_model, random_prompts
from speculation_exact_cases import Adversary, answers_of, suffix_drafting
from triton_device import interpreter

GROUPED = SHAPES["grouped queries, QK-norm, untied"]
KERNELS = dict(attention_impl="triton")
STATIC = KERNELS | dict(static_passes=True)
FRESH = [float("nan")]


@pytest.fixture(autouse=True)
def _poisoned_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_pages(monkeypatch, lambda _: FRESH[0])
    monkeypatch.setattr(drafted_rows, "_NOISE_AHEAD", 5)  # most samples need more


@interpreter
@pytest.mark.parametrize("kind", ["kernels", "mixed", "suffix"])
def test_a_forest_of_requests_in_float32(kind: str):
    """Forks of held requests, ends of sequence inside bursts and drafts, length caps."""
    seed_all(5)
    model = make_model(3, torch.float32, **GROUPED | dict(num_layers=1))
    drive = Drive(seed=17, prompts=2, depth=1, longest=24 if kind == "suffix" else 8)
    params = replace(PARAMS, vocab_size=19)  # four ids of the model are never drawn
    reference = run_forest(started_plain(model, params), drive)
    settings = dict(STATIC if kind != "kernels" else KERNELS)
    if kind == "mixed":
        settings |= dict(drafting=Adversary(kind, answers_of(reference), 1), block_size=3, max_requests=5)
    elif kind == "suffix":
        settings["drafting"] = suffix_drafting()
    engine = started(model, params, **settings, max_tokens=11)
    samples = run_forest(engine, replace(drive, order=1))
    assert_same(samples, reference, 2e-5)
    assert max(int(result.token_ids.max()) for _, result in samples.values()) == 18
    statistics = engine.statistics()
    assert engine.pages_in_use == 0
    assert statistics["decoded_tokens"] == sum(len(result.token_ids) for _, result in samples.values())
    assert (statistics["static_forwards"] > 0.3 * statistics["forwards"]) == (kind != "kernels")
    assert (statistics["accepted_drafts"] > 0) == (kind in ("mixed", "suffix"))


@interpreter
@pytest.mark.parametrize(("seed", "kind"), [(0, "plain"), (1, "mixed"), (2, "suffix")])
def test_random_settings_change_no_sample(seed: int, kind: str):
    """Short pools, few rows, pages of a position, bursts of any length."""
    rng = seed_all(1000 + seed)
    model = make_model(seed, torch.float32, **GROUPED | dict(num_layers=1))
    drive = Drive(int(rng.integers(1000)), prompts=2, depth=1, longest=16)
    reference = run_forest(started_plain(model), drive)
    choices = dict(block_size=[1, 2, 3, 8], burst=[2, 5, 16], max_requests=[2, 5, 32], max_tokens=[11, 64])
    settings = STATIC | {name: int(rng.choice(values)) for name, values in choices.items()}
    settings["pages"] = 100 // settings["block_size"] + 12
    if kind != "plain":
        settings["drafting"] = suffix_drafting() if kind == "suffix" else Adversary(kind, answers_of(reference), 1)
    engine = started(model, **settings)
    assert_same(run_forest(engine, replace(drive, order=seed)), reference, 2e-5)
    assert engine.pages_in_use == 0


def generate_pairs(engine, requests):
    return {pair[0].request_id: pair for pair in zip(requests, generate(engine, requests), strict=True)}


def started_plain(model, params=PARAMS, **settings):
    """An engine on PyTorch's attention, whose masked positions must not hold NaN."""
    engine = started(model, params, **settings)
    cache_for = engine._cache_for

    def clean(plan: Pass) -> PagedCache:
        FRESH[0] = 0.0
        cache = cache_for(plan)
        FRESH[0] = float("nan")
        return cache

    engine._cache_for = clean
    return engine


@interpreter
def test_preempted_requests():
    model = make_model(14, torch.float32, **GROUPED | dict(num_layers=1))
    prompts = random_prompts(np.random.default_rng(15), [3, 5, 9, 4])
    requests = [GenerationRequest(i, prompt, 10 + 2 * i, 7 * i) for i, prompt in enumerate(prompts)]
    expected = generate_pairs(started_plain(model, NEVER), requests)
    engine = started(model, NEVER, block_size=4, pages=8, **STATIC, burst=5)
    assert_same(generate_pairs(engine, requests), expected, 2e-5)
    statistics = engine.statistics()
    assert statistics["preemptions"] > 0
    assert statistics["peak_pages"] <= 8
    assert engine.pages_in_use == 0


@interpreter
@pytest.mark.parametrize("burst", [1, 4])
def test_a_burst_is_launched_before_the_tokens_of_the_last_one_are_read(burst: int, monkeypatch: pytest.MonkeyPatch):
    """Unless it is one pass. Pages of 2 positions, so that every burst takes new ones while others run."""
    model, calls = make_model(15, torch.float32, num_layers=1), []
    prompts = random_prompts(np.random.default_rng(2), [3, 9, 6])
    requests = [GenerationRequest(i, prompt, 5 + 4 * i, 9 * i) for i, prompt in enumerate(prompts)]
    expected = generate_pairs(started_plain(model, NEVER), requests)
    for name, kind in (("launch", DecodeSteps), ("read", RunningBurst)):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, name=name, method=method: (calls.append(name), method(*args))[1])
    engine = started(model, NEVER, **STATIC, block_size=2, burst=burst)
    assert_same(generate_pairs(engine, requests), expected, 2e-5)
    # 4, 8 and 12 tokens behind the prompts' pass.
    after = ["launch", "read"] * 12 if burst == 1 else ["launch", *["launch", "read"] * 2, "read"]
    assert calls == ["launch", "read", *after]
    assert engine.statistics()["static_forwards"] == 13


@interpreter
@pytest.mark.parametrize("max_requests", [2, 16])
def test_rows_that_end_while_the_next_burst_runs(max_requests: int, monkeypatch: pytest.MonkeyPatch):
    """Waiting requests take their rows and pages; nothing runs when all have ended."""
    seed_all(7)
    model = make_model(3, torch.float32, **GROUPED | dict(num_layers=1))
    prompts = random_prompts(np.random.default_rng(5), [3, 7])
    requests = [GenerationRequest(i, prompts[i > 3], 20 - 5 * (i % 2), 11 * i, hold=i % 2 == 0) for i in range(6)]
    expected = generate_pairs(started_plain(model), requests)
    assert any(len(result.token_ids) < 15 for _, result in expected.values())
    engine = started(model, **STATIC, block_size=3, burst=4, max_requests=max_requests)
    launch, ahead = engine._steps.launch, set()

    def recorded(cache: PagedCache, burst: Burst, params: SamplingParams) -> RunningBurst:
        if burst.follows is not None:
            ahead.add((len(burst.follows[1]) > 0, len(burst.token_ids) > 0))
        return launch(cache, burst, params)

    monkeypatch.setattr(engine._steps, "launch", recorded)
    assert_same(generate_pairs(engine, requests), expected, 2e-5)
    assert ahead >= ({(True, False)} if max_requests == 16 else {(True, False), (True, True)})
    assert engine._flight is None
    engine.release([0, 2, 4])
    assert engine.pages_in_use == 0


class EveryThird(Adversary):
    """Asks for drafts, all right, in every third round."""

    def __init__(self, answers: dict) -> None:
        super().__init__("right", answers)
        self.wanted = self.rounds = 0

    @property
    def asks_next(self) -> bool:
        return self.wanted % 3 == 2

    def wants(self, live: int) -> bool:
        asks, self.wanted = self.asks_next, self.wanted + 1
        return asks

    def propose(self, rows: list[Request], most: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return super().propose(rows, np.minimum(most, 4))

    def verified(self, done: Round) -> None:
        super().verified(done)
        assert done.drafted is None or self.wanted % 3 == 0
        self.rounds += 1


@interpreter
def test_rounds_that_ask_for_no_drafts_are_launched_ahead(monkeypatch: pytest.MonkeyPatch):
    """The rounds after them get their drafts from the tokens of both."""
    seed_all(7)
    model = make_model(3, torch.float32, **GROUPED | dict(num_layers=1))
    prompts = random_prompts(np.random.default_rng(5), [3, 7, 6])
    requests = [GenerationRequest(i, prompt, 24 + i, 11 * i) for i, prompt in enumerate(prompts)]
    expected = generate_pairs(started_plain(model), requests)
    drafting = EveryThird(answers_of(expected))
    engine, ahead = started(model, **STATIC, block_size=3, burst=3, drafting=drafting), []
    launch = engine._steps.launch

    def recorded(cache: PagedCache, burst: Burst, params: SamplingParams) -> RunningBurst:
        if burst.follows is not None:
            ahead.append(drafting.wanted % 3)
        return launch(cache, burst, params)

    monkeypatch.setattr(engine._steps, "launch", recorded)
    assert_same(generate_pairs(engine, requests), expected, 2e-5)
    assert drafting.accepted > 0
    assert drafting.wanted == drafting.rounds  # asked once for each round
    assert set(ahead) == {1}
    assert engine._flight is None


@interpreter
def test_weights_changed_in_place_are_seen_and_moved_ones_too():
    model = make_model(16, torch.float32, num_layers=1)
    prompts = random_prompts(np.random.default_rng(3), [4, 4])
    requests = [GenerationRequest(i, prompt, 4, i) for i, prompt in enumerate(prompts)]
    engine = started(model, NEVER, **STATIC)
    generate(engine, requests)
    captured = engine._steps._passes
    assert captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.start(NEVER, 4)
    assert captured
    fresh = generate_pairs(started_plain(model, NEVER), requests)
    assert_same(generate_pairs(engine, requests), fresh, 2e-5)
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()
    engine.start(NEVER, 4)
    assert not captured
    assert_same(generate_pairs(engine, requests), fresh, 2e-5)


EXPERTS = dict(
    num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, fused_layer_impl="triton",
    normalization="RMSNorm", kv_channels=16, disable_bias_linear=True,
)  # fmt: skip
EXPERT_MODELS = {
    "softmax": EXPERTS,
    "sigmoid, shared experts": EXPERTS
    | dict(
        moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=16, moe_router_enable_expert_bias=True
    ),
    "more rows than tiles": EXPERTS | dict(num_experts=2, moe_router_topk=1, moe_router_pre_softmax=True),
}


@interpreter
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_layers_with_experts(name: str):
    """One static pass serves all choices of experts; rows beyond the batch choose experts, too."""
    seed_all(6)
    model = make_model(7, torch.float32, **GROUPED | dict(num_layers=1) | EXPERT_MODELS[name])
    assert not model.counts_on_host
    prompts = random_prompts(np.random.default_rng(16), [3, 5, 4])
    requests = [GenerationRequest(i, prompt, 3 + 2 * i, 7 * i) for i, prompt in enumerate(prompts)]
    expected = generate_pairs(started_plain(model, NEVER), requests)
    engine = started(model, NEVER, **STATIC, burst=5)
    assert_same(generate_pairs(engine, requests), expected, 2e-5)
    assert engine.statistics()["static_forwards"] > 0


def test_why_experts_and_meshes_are_not_captured(monkeypatch: pytest.MonkeyPatch):
    one_by_one = make_model(7, torch.float32, **EXPERTS | dict(moe_grouped_gemm=False, fused_layer_impl="reference"))
    assert "the host has to know" in why_not_captured(one_by_one)
    looped = make_model(7, torch.float32, **EXPERTS | dict(fused_layer_impl="reference"))
    assert "the host has to know" in why_not_captured(looped)
    for name in ("expert_model_parallel_size", "tensor_model_parallel_size"):
        with monkeypatch.context() as patched:
            patched.setattr(looped.config, name, 2)
            assert f"--{name.replace('_', '-')}" in why_not_captured(looped)
    dense = make_model(7, torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(dense.config, "tensor_model_parallel_size", 2)
        assert "CUDA GPU" in why_not_captured(dense)
        patched.setattr(dense.config, "sequence_parallel", True)
        assert "--sequence-parallel" in why_not_captured(dense)


def test_buckets_hold_what_they_are_for():
    sizes = [bucket(count) for count in range(1, 4097)]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert set(sizes[:256]) == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}
    assert all(size <= 1.5 * count for count, size in enumerate(sizes, 1) if count > 16)


def test_what_cannot_run_is_refused():
    model = make_model(4)
    with pytest.raises(InputError, match="float64"):
        started(model, **KERNELS)
    if torch.cuda.is_available():
        pytest.skip("the rest is about a machine without a GPU")
    assert "CUDA" in why_not_captured(model)
    with pytest.raises(InputError, match="rollout_cuda_graphs needs a CUDA GPU; leave it out"):
        build_engine(SamplingConfig(rollout_cuda_graphs=True), model)
    assert build_engine(SamplingConfig(), model).statistics()["forwards"] == 0
