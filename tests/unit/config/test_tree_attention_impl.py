"""``--tree-attention-impl``: what it chooses, what it refuses, and the tree engine's step on Triton's kernels and on
a stand-in for FlashAttention 4.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flash_standin
from conftest import REPOSITORY, seed_all
from dta_kernels.tree_attention import reference
from dta_kernels.tree_attention.plan import AttentionShape, plan_tree_attention
from megatron_dta.common.errors import InputError
from megatron_dta.config import OptimizationConfig, TrainConfig, TreeConfig
from megatron_dta.config.checks.tree import check_tree
from megatron_dta.model import SegmentAttentionPlans, choose_attention, choose_segment_attention
from megatron_dta.model.attention import segment_attention
from megatron_dta.model.attention.segment_attention import key_ends
from megatron_dta.parity import compare_outcomes, random_training_samples, run_tree
from megatron_dta.planning.plan_step import plan_step
from megatron_dta.planning.step.passes import StepBudget
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
    assert choose_segment_attention("auto", 128, 4, torch.bfloat16, CPU) == "reference"
    assert choose_segment_attention("auto", 128, 4, torch.bfloat16, CUDA) == "triton"
    assert choose_segment_attention("reference", 128, 4, torch.bfloat16, CUDA) == "reference"
    assert choose_segment_attention("triton", 96, 1, torch.float32, CUDA) == "triton"


@pytest.fixture
def hopper(monkeypatch):
    """FlashAttention 4 is installed, and the GPU has the capability in this list."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: tuple(capability))
    monkeypatch.setattr(segment_attention, "installed_version", lambda: segment_attention.VERSION)
    return capability


def test_flash_attention_where_it_can_run(hopper):
    pytest.importorskip("triton")
    for head_size in (64, 96, 128):
        assert choose_segment_attention("fa4", head_size, 4, torch.bfloat16, CUDA) == "fa4"
    assert choose_segment_attention("auto", 128, 4, torch.bfloat16, CUDA) == "triton"
    # Sampling decodes on Triton's kernels.
    assert choose_attention("fa4", 128, torch.bfloat16, CUDA)
    assert not choose_attention("fa4", 128, torch.float64, CUDA)


def test_auto_may_prefer_flash_attention(hopper, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(segment_attention, "AUTO", ("fa4", "triton"))
    assert choose_segment_attention("auto", 128, 4, torch.bfloat16, CUDA) == "fa4"
    assert choose_segment_attention("auto", 128, 1, torch.bfloat16, CUDA) == "triton"
    assert choose_segment_attention("auto", 128, 4, torch.float64, CUDA) == "reference"
    assert choose_segment_attention("auto", 128, 4, torch.float32, CPU) == "reference"


@pytest.mark.parametrize(
    ("head_size", "ratio", "dtype", "message"),
    [
        (128, 4, torch.float32, "heads of 64, 96, 128 channels, not float32 with 128; use auto or triton"),
        (80, 4, torch.bfloat16, "not bfloat16 with 80"),
        (128, 1, torch.bfloat16, "needs several query heads per key/value head"),
    ],
)
def test_what_flash_attention_does_not_take_is_refused(head_size, ratio, dtype, message, hopper):
    with pytest.raises(InputError, match=f"--tree-attention-impl fa4 .*{message}"):
        choose_segment_attention("fa4", head_size, ratio, dtype, CUDA)


def test_flash_attention_elsewhere_is_refused(hopper, monkeypatch):
    def refusal() -> str:
        with pytest.raises(InputError) as raised:
            choose_segment_attention("fa4", 128, 4, torch.bfloat16, CUDA)
        return str(raised.value)

    hopper[0] = 10
    assert "--tree-attention-impl fa4 needs a Hopper GPU" in refusal()
    hopper[0] = 9
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "--tree-attention-impl fa4 is not deterministic, as --deterministic-mode asks" in refusal()
    monkeypatch.setattr(segment_attention, "installed_version", lambda: "4.1.0")
    assert "flash-attn-4 has version 4.1.0, which is not supported" in refusal()
    monkeypatch.setattr(segment_attention, "installed_version", lambda: None)
    assert "--tree-attention-impl fa4: flash-attn-4 is not installed; install it (pip install" in refusal()


def test_the_extra_names_the_version_that_is_supported():
    assert f"{segment_attention.PACKAGE}=={segment_attention.VERSION}" in (REPOSITORY / "setup.py").read_text()


def test_flash_attention_in_deterministic_mode_is_refused():
    tree = TreeConfig(tree_attention_impl="fa4")
    for is_deterministic in (False, True):
        optimization = OptimizationConfig(deterministic_mode=is_deterministic)
        lines = list(check_tree(TrainConfig(model_config(torch.float32), tree, optimization=optimization)))
        assert is_deterministic == any("fa4 conflicts with --deterministic-mode" in line for line in lines)


def test_triton_on_a_cpu_is_refused_but_for_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_attention("triton", 64, torch.float32, CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="--tree-attention-impl triton needs a CUDA GPU; use auto or reference"):
        choose_attention("triton", 64, torch.float32, CPU)


@pytest.mark.parametrize("seed", range(3))
def test_plans_made_one_by_one_equal_the_segments_masks(seed):
    pytest.importorskip("triton")
    samples = random_training_samples(branching_sequences(seed_all(seed), count=9, longest=60), seed=seed)
    step = plan_step(samples, "dta", StepBudget(23))
    segments, paths, shape = step.segments, step.paths, AttentionShape(4, 2, 8, torch.float32)
    plans, tree = SegmentAttentionPlans(segments, paths, shape, CPU), step.segments.tree
    assert segments.num_segments > 3
    for segment in seed_all(seed).permutation(segments.num_segments).tolist():
        begin, end = segments.segment_start[segment : segment + 2]
        ends, tokens = key_ends(segments, paths, segment)
        keys = np.append(paths.stream_indices(segment), np.arange(begin, end))
        own = np.arange(begin, end)[:, None]
        position = len(keys) - tokens + np.arange(tokens)[:, None]
        seen = (np.arange(len(keys)) <= position) & (position < ends)
        assert (seen == ((keys <= own) & (own < tree.subtree_end[keys]))).all()
        found, expected = plans.of_segment(segment), plan_tree_attention(ends, tokens, shape, CPU)
        assert (found.num_queries, found.num_keys, found.stored_elements) == (
            tokens,
            len(keys),
            expected.stored_elements,
        )
        assert torch.equal(found.forward.programs, expected.forward.programs)
        assert torch.equal(found.forward.blocks, expected.forward.blocks)
        assert plans.of_segment(segment) is found


@interpreter
@pytest.mark.parametrize(
    ("impls", "longest", "segment_tokens", "activation_tokens"),
    [
        (("triton", "fa4"), 20, 40, None),
        (("triton", "fa4"), 20, 21, 0),
        (("fa4",), 200, 150, None),
        (("fa4",), 200, 97, 0),
    ],
)
def test_a_step_on_the_kernels_equals_the_references(impls, longest, segment_tokens, activation_tokens, monkeypatch):
    pytest.importorskip("triton")
    samples = random_training_samples(branching_sequences(seed_all(71), count=6, longest=longest), seed=71)
    model = model_config(torch.float32, **QWEN3, max_position_embeddings=256)
    weights = weights_of(model, seed=3)
    outcomes = []
    flash_standin.install(monkeypatch)
    for impl in ("reference", *impls):
        tree = tree_config("dta", segment_tokens, activation_tokens, tree_attention_impl=impl)
        if impl != "reference":
            # Nothing may fall back to the reference unnoticed.
            monkeypatch.setattr(reference, "tree_attention_forward", None)
        outcome, result = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
        assert result.segments > 1
        outcomes.append(outcome)
    for outcome in outcomes[1:]:
        errors = compare_outcomes(outcome, outcomes[0])
        assert errors.largest() < 3e-6, errors
    assert DEVICE.type == "cpu"
