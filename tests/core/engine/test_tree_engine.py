"""The engine against training each sequence alone: every mode, segment size, budget and kind of recomputation."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from tree_engine_cases import (
    GRPO,
    LLAMA,
    QWEN2,
    QWEN3,
    TEMPERATURE,
    branching_sequences,
    check_trained_siblings,
    model_config,
    tree_config,
    weights_of,
)


@pytest.fixture(scope="module")
def references():
    """Samples, weights and reference outcome for each kind of model, computed once."""
    samples = random_training_samples(branching_sequences(seed_all(11), count=6, longest=10), seed=11)
    cases = {}
    for name, settings in (("qwen3", QWEN3), ("qwen2", QWEN2), ("llama", LLAMA)):
        model = model_config(**settings)
        weights = weights_of(model, seed=5)
        cases[name] = (model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE))
    return cases


CUTS = [("dense", 9), ("dense", 64), ("packed", 30), ("dta", 6), ("dta", 1000)]


@pytest.mark.parametrize(
    ("architecture", "mode", "segment_tokens", "activation_tokens"),
    [
        *(("qwen3", *cut, kept) for cut in CUTS for kept in (None, 0)),
        *(("qwen3", "dta", 1, 12), ("qwen3", "dta", 6, 12), ("qwen2", "dense", 9, 12), ("qwen2", "packed", 30, None)),
        *(("qwen2", "dta", 6, 0), ("llama", "dense", 64, 0), ("llama", "packed", 30, 12), ("llama", "dta", 6, None)),
    ],
)
def test_equals_stock_megatron_in_float64(references, architecture, mode, segment_tokens, activation_tokens):
    model, weights, samples, expected = references[architecture]
    outcome, _ = run_tree(
        model, weights, samples, GRPO, tree_config(mode, segment_tokens, activation_tokens), TEMPERATURE
    )
    assert outcome.gradients.keys() == weights.keys()
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_leaves_never_run_forward_twice(references):
    """One stage: their backward follows their forward, so with nothing else kept they hold no more memory."""
    model, weights, samples, _ = references["qwen3"]
    for mode, segment_tokens in CUTS:
        tree = tree_config(mode, segment_tokens, 0)
        _, result = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
        segments = prepare_batch(samples, tree).plan.segments
        inner = np.isin(np.arange(segments.num_segments), segments.segment_parent)
        assert result.recomputed_tokens == segments.lengths[inner].sum() < segments.lengths.sum()


@pytest.mark.parametrize(
    "recompute", [{"recompute_granularity": "full"}, {"recompute_granularity": "selective"}], ids=["full", "selective"]
)
def test_megatron_recompute_changes_nothing(references, recompute):
    model, weights, samples, expected = references["qwen3"]
    tree = tree_config("dta", 10, 12)
    outcome, _ = run_tree(replace(model, **recompute), weights, samples, GRPO, tree, TEMPERATURE)
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


def test_cutting_and_order_change_nothing(references):
    """One denominator: loss and gradients do not depend on segment size, budget or the order of the rollouts."""
    model, weights, samples, expected = references["qwen3"]
    longest = max(len(sample.token_ids) for sample in samples)
    shuffled = [samples[i] for i in np.random.default_rng(0).permutation(len(samples))]
    for ordered, tree in (
        (samples, tree_config("dta", 5)),
        (samples, tree_config("dta", 13, tree_memory_tokens=longest + 13)),
        (samples, tree_config("dta", 13, tree_memory_tokens=400)),
        (shuffled, tree_config("dta", 13)),
        (shuffled, tree_config("packed", 60)),
    ):
        outcome, _ = run_tree(model, weights, ordered, GRPO, tree, TEMPERATURE)
        if ordered is shuffled:
            outcome = replace(outcome, logprobs=expected.logprobs)
        errors = compare_outcomes(outcome, expected)
        assert errors.largest() < 1e-12, (tree, errors)


def test_a_lost_gradient_would_be_seen(references):
    """The control of the tests above: without the descendants' dK and dV the error is far above their tolerance."""
    model, weights, samples, expected = references["qwen3"]
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    engine = TreeEngine(tree_model, TEMPERATURE)
    batch = prepare_batch(samples, tree_config("dta", 6))
    forget = SegmentContext.keys_and_values

    def forgetful(context: SegmentContext, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Called at the start of each backward too, before the own part of dK is read.
        context.pool.layer(layer).grad_keys.zero_()
        return forget(context, layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentContext, "keys_and_values", forgetful)
        result = engine.forward_backward(batch, GRPO)
    gradients = {name: p.grad for name, p in tree_model.named_parameters()}
    errors = compare_outcomes(replace(expected, gradients=gradients), expected)
    assert float(result.loss) == pytest.approx(expected.loss, rel=1e-12)
    assert errors.gradient > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(dtype):
    """Other tokens in a sibling branch, in the same or another segment."""
    model = model_config(dtype, **QWEN3)
    weights = weights_of(model, seed=8)
    check_trained_siblings(model, weights, (4, 200))


def test_smallest_budget_keeps_one_path_in_flight(references):
    model, weights, _, _ = references["qwen3"]
    sequences = branching_sequences(seed_all(41), count=20, longest=120)
    samples = random_training_samples(sequences, seed=41)
    longest = max(sample.needed_length for sample in samples)
    segment_tokens = 16
    tree = tree_config("dta", segment_tokens, tree_memory_tokens=longest + segment_tokens)
    _, result = run_tree(model, weights, samples, GRPO, tree)
    assert longest <= result.peak_in_flight_tokens <= longest + segment_tokens


def test_tables_that_are_made_ahead_change_nothing(references, monkeypatch):
    model, tree = model_config(torch.float32, **QWEN3), tree_config("dta", 6, tree_attention_impl="triton")
    case, run_op = (model, weights_of(model, seed=5), references["qwen3"][2], GRPO, tree), StageRun._run
    expected, _ = run_tree(*case)
    ahead = lambda run, n: (setattr(run, "made_ahead", run._tables(n, 5)), run_op(run, n))  # noqa: E731
    monkeypatch.setattr(StageRun, "_run", ahead)
    assert compare_outcomes(run_tree(*case)[0], expected).largest() == 0


def test_gradients_accumulate_and_a_second_step_is_identical(references):
    model, weights, samples, _ = references["qwen3"]
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    engine = TreeEngine(tree_model, TEMPERATURE)
    batch = prepare_batch(samples, tree_config("dta", 9))
    engine.forward_backward(batch, GRPO)
    once = {name: copy.deepcopy(p.grad) for name, p in tree_model.named_parameters()}
    tree_model.zero_grad()
    engine.prepare_ahead(batch, GRPO)
    engine.forward_backward(batch, GRPO)
    assert all(torch.equal(once[name], p.grad) for name, p in tree_model.named_parameters())
    engine.prepare_ahead(prepare_batch(samples[:1], tree_config("dta", 9)), GRPO)  # not the next step, after all
    engine.forward_backward(batch, GRPO)
    for name, p in tree_model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], rtol=1e-12, atol=1e-16)


def test_wrong_samples_are_refused():
    tokens = np.arange(4, dtype=np.int32)
    with pytest.raises(ValueError, match="loss_mask has 3 entries for 4 tokens"):
        TrainingSample(tokens, np.zeros(3, bool))
    with pytest.raises(ValueError, match="no prefix predicts the first token"):
        TrainingSample(tokens, np.ones(4, bool))
    with pytest.raises(ValueError, match="sample 0 has no trained token"):
        prepare_batch([TrainingSample(tokens, np.zeros(4, bool))], TreeConfig())
    without = TrainingSample(tokens, tokens > 0)
    with pytest.raises(ValueError, match="returns has 3 entries for 4 tokens"):
        without.with_fields(returns=np.ones(3))
    with pytest.raises(ValueError, match="advantages is missing in sample 1"):
        prepare_batch([without.with_fields(advantages=np.ones(4)), without], TreeConfig())
    with pytest.raises(ValueError, match=r"--tree-segment-tokens 3 is less than the longest sequence \(4 tokens\)"):
        prepare_batch([without], TreeConfig(tree_mode="packed", tree_segment_tokens=3))


@pytest.mark.parametrize(("unit", "activation_tokens"), [(1, 0), (5, None), (32, 0)])
def test_padded_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, unit: int, activation_tokens: int | None) -> None:
    """As for FP8 products: neither the loss nor any gradient."""
    samples = random_training_samples(branching_sequences(seed_all(23), count=6, longest=12), seed=23)
    model = model_config(**QWEN3)
    weights = weights_of(model, seed=5)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    rows = []
    rows_of_share = TreeGPTModel.rows_of_share
    monkeypatch.setattr(TreeGPTModel, "_row_unit", property(lambda self: unit))

    def noted(self: TreeGPTModel, num_tokens: int, context_size: int = 1) -> int:
        rows.append(rows_of_share(self, num_tokens, context_size))
        return rows[-1]

    monkeypatch.setattr(TreeGPTModel, "rows_of_share", noted)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 7, activation_tokens), TEMPERATURE)
    assert {count % unit for count in rows} == {0}
    assert unit == 1 or min(rows) >= unit
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors
