"""``tree_attention_impl``: what it chooses, what it refuses, and the tree engine's step on Triton's kernels."""

import numpy as np
import pytest
import torch

from conftest import seed_all
from dta_kernels.tree_attention import reference
from dta_kernels.tree_attention.plan import AttentionShape, plan_tree_attention
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.attention.segment_attention import SegmentAttentionPlans, choose_attention, key_ends
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of
from triton_device import DEVICE, interpreter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_takes_triton_on_a_gpu_for_what_it_takes():
    pytest.importorskip("triton")
    assert not choose_attention("auto", 128, torch.bfloat16, CPU)
    assert choose_attention("auto", 128, torch.bfloat16, CUDA)
    assert choose_attention("triton", 96, torch.float32, CUDA)
    assert not choose_attention("auto", 128, torch.float64, CUDA)
    assert not choose_attention("auto", 288, torch.bfloat16, CUDA)
    assert not choose_attention("reference", 128, torch.bfloat16, CUDA)
    with pytest.raises(InputError, match="tree_attention_impl fa4: choose one of auto, triton, reference"):
        choose_attention("fa4", 128, torch.bfloat16, CUDA)


def test_triton_on_a_cpu_is_refused_but_for_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_attention("triton", 64, torch.float32, CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="tree_attention_impl triton needs a CUDA GPU; use auto or reference"):
        choose_attention("triton", 64, torch.float32, CPU)


@pytest.mark.parametrize("seed", range(3))
def test_plans_made_one_by_one_equal_the_segments_masks(seed):
    pytest.importorskip("triton")
    samples = random_training_samples(branching_sequences(seed_all(seed), count=9, longest=60), seed=seed)
    step = plan_step(samples, "dta", StepBudget(23))
    segments, paths, shape = step.segments, step.paths, AttentionShape(4, 2, 8, torch.float32)
    plans, tree = SegmentAttentionPlans(segments, paths, lambda _: shape, CPU), step.segments.tree
    assert segments.num_segments > 3
    for segment in seed_all(seed).permutation(segments.num_segments).tolist():
        begin, end = segments.segment_start[segment : segment + 2]
        ends, tokens = key_ends(segments, paths, segment)
        keys = np.append(paths.stream_indices(segment), np.arange(begin, end))
        queries = np.arange(begin, end)[:, None]
        position = len(keys) - tokens + np.arange(tokens)[:, None]
        seen = (np.arange(len(keys)) <= position) & (position < ends)
        assert (seen == ((keys <= queries) & (queries < tree.subtree_end[keys]))).all()
        plan, expected = plans.of_segment(segment), plan_tree_attention(ends, tokens, shape, CPU)
        sizes = tokens, len(keys), expected.backward().stored_elements
        assert (plan.num_queries, plan.num_keys, plan.backward().stored_elements) == sizes
        assert torch.equal(plan.forward.programs, expected.forward.programs)
        assert torch.equal(plan.forward.blocks, expected.forward.blocks)
        assert plans.of_segment(segment) is plan


@interpreter
@pytest.mark.parametrize(("segment_tokens", "activation_tokens"), [(40, None), (21, 0)])
def test_a_step_on_the_kernels_equals_the_references(segment_tokens, activation_tokens, monkeypatch):
    pytest.importorskip("triton")
    samples = random_training_samples(branching_sequences(seed_all(71), count=6, longest=20), seed=71)
    model = model_config(torch.float32, **QWEN3, max_position_embeddings=256)
    weights = weights_of(model, seed=3)
    outcomes = []
    for impl in ("reference", "triton"):
        tree = tree_config("dta", segment_tokens, activation_tokens, tree_attention_impl=impl)
        if impl != "reference":
            # Nothing may fall back to the reference unnoticed.
            monkeypatch.setattr(reference, "tree_attention_forward", None)
        outcome, result = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
        assert result.segments > 1
        outcomes.append(outcome)
    errors = compare_outcomes(outcomes[1], outcomes[0])
    assert errors.largest() < 3e-6, errors
    assert DEVICE.type == "cpu"
