"""The compiled fused layer kernels at training sizes, and properties that need a GPU."""

import gc
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.layers import qkv_rope as qkv_module
from dta_kernels.layers import rms_norm as norm_module
from dta_kernels.layers import swiglu as swiglu_module
from dta_kernels.layers.qkv_rope import QKVLayout
from fused_layer_cases import (
    check_16_bits,
    check_float32,
    check_recomputed_bits,
    norm_case,
    outputs_and_gradients,
    qkv_case,
    swiglu_case,
)
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_tree
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer.build import data_parallel_chunks
from tree_engine_cases import (
    GRPO,
    QWEN2,
    QWEN3,
    TEMPERATURE,
    VOCABULARY,
    branching_sequences,
    model_config,
    tree_config,
    weights_of,
)
from triton_device import DEVICE

KERNELS = (
    norm_module._forward_kernel,
    norm_module._again_kernel,
    norm_module._backward_kernel,
    qkv_module._forward_kernel,
    qkv_module._backward_kernel,
    swiglu_module._forward_kernel,
    swiglu_module._backward_kernel,
)
LARGE = dict(num_layers=8, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=8, kv_channels=128)
WIDE = dict(hidden_size=256, ffn_hidden_size=768, num_attention_heads=8, kv_channels=64)
CASES = {
    "norm-2048": (norm_case, (1111, 2048, False)),
    "norm-add-5120": (norm_case, (777, 5120, True)),
    "norm-add-24": (norm_case, (3, 24, True)),
    "qwen3-1.7b": (qkv_case, (1037, QKVLayout(8, 2, 128), 128, True)),
    "llama-64": (qkv_case, (515, QKVLayout(2, 4, 64), 64, False)),
    "heads-of-96": (qkv_case, (300, QKVLayout(3, 1, 96), 48, True)),
    "heads-of-256": (qkv_case, (129, QKVLayout(1, 8, 256), 256, True)),
    "swiglu-6144": (swiglu_case, (1029, 6144)),
    "swiglu-2051": (swiglu_case, (65, 2051)),
}


def case(name: str) -> tuple:
    make, arguments = CASES[name]
    kernel, twin, inputs = make(*arguments, DEVICE) if make is qkv_case else make(*arguments)
    return kernel, twin, [tensor.to(DEVICE) for tensor in inputs]


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_twin_and_a_repeat_is_the_same(name):
    seed_all(list(CASES).index(name))
    check_float32(*case(name), 3e-6)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in CASES] + [(name, torch.float16) for name in ("norm-add-24", "llama-64")],
)
def test_16_bits_are_as_near_to_float64_as_the_twin(name, dtype):
    seed_all(list(CASES).index(name))
    check_16_bits(*case(name), dtype, 1.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_again_is_the_same_bit_for_bit(dtype):
    seed_all(4)
    check_recomputed_bits(dtype, DEVICE, 2048, 6144, QKVLayout(8, 2, 128), 128)


def test_new_lengths_compile_nothing_and_nothing_waits_for_the_device():
    seed_all(6)

    def run(rows: int) -> None:
        for make in (norm_case(rows, 64, True), qkv_case(rows, QKVLayout(2, 2, 64), 64, True, DEVICE)):
            outputs_and_gradients(make[0], [tensor.to(DEVICE) for tensor in make[2]], None)
        outputs_and_gradients(swiglu_case(rows, 64)[0], [torch.randn(rows, 128, device=DEVICE)], None)

    def variants() -> int:
        return sum(len(caches[0]) for kernel in KERNELS for caches in kernel.device_caches.values())

    run(100)
    before = variants()
    assert before
    for rows in (1, 2, 15, 16, 17, 128, 999, 1024):
        run(rows)
    assert variants() == before


@pytest.mark.parametrize("settings", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
def test_a_step_equals_that_of_megatrons_modules(settings):
    shape = settings | dict(hidden_size=192, ffn_hidden_size=320, kv_channels=64)
    tree = tree_config("dta", 40, tree_attention_impl="reference")
    ratios = []
    for seed in range(29, 37):
        samples = random_training_samples(branching_sequences(seed_all(seed), count=12), seed=seed)
        weights = weights_of(model_config(torch.bfloat16, **shape), seed=seed)
        outcomes = {}
        for dtype in (torch.float32, torch.bfloat16):
            for impl in ("reference", "triton"):
                model = model_config(dtype, **shape, fused_layer_impl=impl)
                own = {name: weight.to(dtype) for name, weight in weights.items()}
                outcomes[dtype, impl] = run_tree(model, own, samples, GRPO, tree, TEMPERATURE)[0]
        exact = outcomes[torch.float32, "reference"]
        found = compare_outcomes(outcomes[torch.float32, "triton"], exact)
        assert found.largest() < 2e-5, found
        rounded = [compare_outcomes(outcomes[torch.bfloat16, impl], exact) for impl in ("reference", "triton")]
        ratios.append(
            [math.log(getattr(rounded[1], name) / getattr(rounded[0], name)) for name in ("logprob", "gradient")]
        )
    # One draw says little: in the mean over draws the rounding may not be larger.
    means = [math.exp(sum(column) / len(column)) for column in zip(*ratios, strict=True)]
    print("rounding beside that of Megatron's modules, logprobs and gradients:", means)
    assert max(means) < 1.15, (means, ratios)


def test_a_step_holds_no_more_than_is_counted():
    """The peak of a step under a limit of memory, of which a part of the segments must run twice."""
    config = model_config(torch.bfloat16, **QWEN3, **LARGE, max_position_embeddings=4096)
    model = build_model(config, initialize_parallel(3), ParallelConfig())
    engine = TreeEngine(data_parallel_chunks(model, ParallelConfig()))
    generator = seed_all(33)
    trunk = generator.integers(0, VOCABULARY, 2000).astype(np.int32)
    branches = [generator.integers(0, VOCABULARY, length).astype(np.int32) for length in range(1000, 2000, 125)]
    samples = random_training_samples([np.concatenate([trunk, branch]) for branch in branches], seed=33)
    constant = constant_bytes(engine.chunks)
    tree = tree_config("dta", None)
    recomputed = []
    for gib in (0.85, 1.05, 1.45):
        engine.limit_memory(constant / GIB + gib, constant)
        batch = prepare_batch(samples, tree, pipeline=engine.pipeline(None))
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - constant
        for _ in range(2):
            recomputed.append(engine.forward_backward(batch, GRPO).recomputed_tokens)
        peak = (torch.cuda.max_memory_allocated() - others - constant) / GIB
        print(
            f"peak {peak:.3f} GiB of {gib}, {recomputed[-1]} tokens twice, {batch.plan.segments.num_segments} segments"
        )
        assert peak <= gib
        gc.collect()
    assert recomputed[0] > recomputed[-1] == 0
