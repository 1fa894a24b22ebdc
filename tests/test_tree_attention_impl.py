"""``--tree-attention-impl``: what it chooses, what it refuses, and the tree engine's step on Triton's kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from conftest import seed_all
from dta_kernels import tree_attention_reference as reference
from megatron_dta.errors import InputError
from megatron_dta.model import choose_attention
from megatron_dta.parity import compare_outcomes, random_training_samples, run_tree
from test_tree_engine import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of
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


@pytest.mark.parametrize(
    ("impl", "head_size", "dtype", "message"),
    [
        ("triton", 128, torch.float64, "not float64 with 128; use auto or reference"),
        ("triton", 288, torch.bfloat16, "heads of at most 256 channels, not bfloat16 with 288"),
        ("flash", 128, torch.bfloat16, "--tree-attention-impl flash: choose one of"),
    ],
)
def test_what_cannot_run_is_refused(impl, head_size, dtype, message):
    with pytest.raises(InputError, match=message):
        choose_attention(impl, head_size, dtype, CUDA)


def test_triton_on_a_cpu_is_refused_but_for_the_interpreter():
    pytest.importorskip("triton")
    code = (
        "import torch; from megatron_dta.model import choose_attention;"
        "choose_attention('triton', 64, torch.float32, torch.device('cpu'))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "--tree-attention-impl triton needs a CUDA GPU; use auto or reference" in run.stderr


@interpreter
@pytest.mark.parametrize(("mode", "segment_tokens", "activation_tokens"), [("dta", 40, None), ("dta", 21, 0)])
def test_a_step_on_the_kernels_equals_the_references(mode, segment_tokens, activation_tokens, monkeypatch):
    pytest.importorskip("triton")
    samples = random_training_samples(branching_sequences(seed_all(71), count=6, longest=20), seed=71)
    model = model_config(torch.float32, **QWEN3)
    weights = weights_of(model, seed=3)
    outcomes = []
    for impl in ("reference", "triton"):
        tree = tree_config(mode, segment_tokens, activation_tokens, tree_attention_impl=impl)
        if impl == "triton":
            # Nothing may fall back to the reference unnoticed.
            monkeypatch.setattr(reference, "tree_attention_forward", None)
        outcome, result = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
        assert result.segments > 1
        outcomes.append(outcome)
    errors = compare_outcomes(outcomes[1], outcomes[0])
    assert errors.largest() < 3e-6, errors
    assert DEVICE.type == "cpu"
