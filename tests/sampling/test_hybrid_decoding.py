"""The in-process engine with recurrences: states of running requests, against the trainer's logprobs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from decode_layer_cases import few_parts  # noqa: F401 (a fixture)
from hybrid_cases import HYBRID, NEMOTRON, poisoned, spread
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.model.hybrid.decode_states import DecodeStates
from megatron_dta.sampling.in_process import row_states
from megatron_dta.sampling.in_process.cache_size import DeviceMemory, max_pages, state_bytes
from megatron_dta.sampling.interface import GenerationRequest
from rollout_forest import NEVER, Drive, assert_same, run_forest, run_long, started, trainers_logprobs
from sampling_cases import make_model
from speculation_exact_cases import Adversary, answers_of
from triton_device import interpreter

TWO_STATES = [HYBRID, NEMOTRON | dict(num_layers=4, hybrid_layer_pattern="M-*M")]
families = pytest.mark.parametrize("family", TWO_STATES, ids=["delta", "mamba"])
# One layer with states and one with attention.
DELTA = HYBRID | dict(num_layers=2, mixer_layer_freq="[1,0]")
MAMBA = NEMOTRON | dict(num_layers=2, hybrid_layer_pattern="M*")
STATIC = dict(attention_impl="triton", static_passes=True)


def hybrid_model(seed: int, dtype: torch.dtype = torch.float64, **more: object):
    settings = (more.pop("family", None) or HYBRID) | dict(num_query_groups=2, disable_bias_linear=True) | more
    model = make_model(seed, dtype, **settings)
    with torch.no_grad():
        spread(dict(model.named_parameters()), seed)
    return model


@families
def test_a_forest_has_the_trainers_logprobs_for_any_order_of_calls(family):
    seed_all(3)
    model, drive = hybrid_model(3, family=family), Drive(seed=3, prompts=2, longest=8, depth=1)
    engine = started(model)
    samples = run_forest(engine, drive)
    trained = trainers_logprobs(model, samples, TreeConfig(tree_segment_tokens=16))
    for (_, result), expected in zip(samples.values(), trained, strict=True):
        assert np.allclose(result.logprobs, expected, rtol=0, atol=1e-10)
    statistics = engine.statistics()
    # Branches continue copies of their parents' states.
    assert statistics["reused_tokens"] > 0
    assert engine.pages_in_use == 0
    # Prompts in several passes, few requests at once, and a pool that holds little more than one of them.
    engine = started(model, block_size=3, pages=24, max_tokens=5, max_requests=3)
    assert_same(run_forest(engine, replace(drive, order=1)), samples, 1e-11)
    assert engine.pages_in_use == 0
    assert engine.statistics()["evictions"] > 0


def test_preempted_requests_begin_again_with_no_state(monkeypatch: pytest.MonkeyPatch):
    """Slots are used again by other requests, and start with NaN instead of zeros."""
    model = hybrid_model(14, family=DELTA)
    reference = run_long(started(model, NEVER), 9)
    monkeypatch.setattr(DecodeStates, "grow", poisoned)
    engine = started(model, NEVER, block_size=4, pages=30, max_requests=7)
    assert_same(run_long(engine, 9), reference, 1e-11)
    assert engine.statistics()["preemptions"] > 1


@pytest.mark.parametrize(
    ("family", "kind"), [(HYBRID, "wrong"), (DELTA, "mixed"), (MAMBA, "mixed")], ids=["delta-0", "delta", "mamba"]
)
def test_rejected_drafts_leave_no_trace_in_the_states(kind: str, family: dict, monkeypatch: pytest.MonkeyPatch):
    """In float32, where the tokens must be the same and the logprobs up to rounding; slots begin with NaN."""
    model, drive = hybrid_model(5, torch.float32, family=family), Drive(seed=5, prompts=2, depth=1, longest=16)
    monkeypatch.setattr(DecodeStates, "grow", poisoned)
    expected = run_forest(started(model), drive)
    drafting = Adversary(kind, answers_of(expected), seed=2)
    engine = started(model, block_size=4, max_tokens=12, drafting=drafting)
    assert_same(run_forest(engine, drive), expected, 1e-4)
    assert (drafting.accepted > 0) == (kind == "mixed")
    assert drafting.drafted > drafting.accepted


def test_a_shared_context_is_computed_once():
    """Without end tokens, so that two running requests end together and the next two begin together."""
    model = hybrid_model(9, family=DELTA)
    context = np.arange(13, dtype=np.int32) % 7
    requests = [GenerationRequest(i, context, 5, key=i, parent=None, hold=False) for i in range(4)]
    alone = {}
    for request in requests:
        engine = started(model, NEVER)
        engine.submit([request])
        alone[request.request_id] = (request, engine.poll()[0])
    for settings in (dict(), dict(max_tokens=5, block_size=4), dict(max_requests=2)):
        engine, samples = started(model, NEVER, **settings), {}
        engine.submit(requests)
        while len(samples) < len(requests):
            samples |= {result.request_id: (requests[result.request_id], result) for result in engine.poll()}
        assert_same(samples, alone, 1e-11)
        prefills = 2 if settings.get("max_requests") else 1
        assert engine.statistics()["prefilled_tokens"] == 13 * prefills + (4 - prefills)


def decoded(model, settings: dict, **more: object) -> tuple[dict, dict[str, float]]:
    """The forest of requests and the statistics; slots of states begin with NaN."""
    drive, engine = Drive(seed=9, prompts=1, longest=10, depth=1), started(model, **settings, **more)
    samples = run_forest(engine, drive)
    assert engine.pages_in_use == 0
    return samples, engine.statistics()


@interpreter
@pytest.mark.parametrize(
    ("family", "fused"), [(HYBRID, "reference"), (DELTA, "triton"), (MAMBA, "triton")], ids=["plain", "delta", "mamba"]
)
def test_passes_at_fixed_addresses_have_the_samples_of_eager_ones(
    family: dict, fused: str, monkeypatch: pytest.MonkeyPatch
):
    """Bursts that rows leave, ends of sequence inside them, branches of held requests, pools that preempt, drafts."""
    monkeypatch.setattr(DecodeStates, "grow", poisoned)
    model = hybrid_model(7, torch.float32, fused_layer_impl=fused, family=family)
    expected, _ = decoded(model, {})
    lost = []
    drop = row_states.RowStates._drop
    monkeypatch.setattr(row_states.RowStates, "_drop", lambda self, rows: (lost.extend(rows), drop(self, rows))[1])
    samples, statistics = decoded(model, STATIC)
    assert_same(samples, expected, 2e-5)
    assert statistics["static_forwards"] > 0.5 * statistics["forwards"]
    # Some rows ended inside a burst; nothing continued their states.
    assert any(row.has_lost_state for row in lost)
    if fused == "reference":
        samples, statistics = decoded(model, STATIC, burst=1, block_size=3, max_requests=2)
        assert_same(samples, expected, 2e-5)
    drafting = Adversary("mixed", answers_of(expected), seed=2)
    samples, statistics = decoded(model, STATIC, drafting=drafting)
    assert_same(samples, expected, 1e-4)
    assert statistics["accepted_drafts"] > 0
    assert statistics["static_forwards"] < statistics["forwards"]


def test_states_of_all_requests_leave_fewer_pages_and_only_attention_has_pages():
    model = hybrid_model(2, torch.float32)
    memory = DeviceMemory(free=60 * 2**30, total=80 * 2**30)
    states = DecodeStates(model.recurrent_layers, torch.float32, torch.device("cpu"))
    states.grow(1)
    slot_bytes = sum(tensor.nbytes for tensor in (*states.states.values(), *states.rows.values()))
    assert state_bytes(model) == slot_bytes
    # One of three layers has attention, with 2 groups of 8 channels.
    page = 2 * 16 * 2 * 8 * 4
    none, many = (max_pages(model, 16, None, 4096, 0, requests, memory) for requests in (0, 10**6))
    assert none - many == pytest.approx(2 * 10**6 * slot_bytes / (1 + 1 / 2) / page, abs=1)
