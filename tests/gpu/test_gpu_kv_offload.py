"""K, V and their gradients offloaded from a GPU: the same step bit for bit, without waiting for the device."""

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.kv_offload.copy_speed import copy_rate
from megatron_dta.extras.parity import random_training_samples
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config

SHAPE = {
    "num_layers": 6,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "kv_channels": 64,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("activation_tokens", [None, 0])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_equals_the_step_without_offload(fraction: float, activation_tokens: int | None) -> None:
    """Long segments and many branches: copies in both directions run beside the kernels of other layers."""
    samples = random_training_samples(branching_sequences(seed_all(3), count=24, longest=6000), seed=3)
    batch = prepare_batch(samples, tree_config("dta", 512, activation_tokens))
    found = []
    for share in (0.0, fraction):
        model = build_model(model_config(torch.bfloat16, **QWEN3, **SHAPE), initialize_parallel(7))
        engine = TreeEngine(model, TEMPERATURE)
        engine.offload_kv(share)
        for is_warm in (False, True):  # in its first step Megatron copies the rotary frequencies to the device
            model.zero_grad(set_to_none=True)
            result = engine.forward_backward(batch, GRPO, forbid_synchronization=is_warm)
        found.append((result.loss, [p.grad.clone() for p in model.parameters()], engine.compute_logprobs(batch)))
    (loss, gradients, logprobs), (other, others, outputs) = found
    assert torch.equal(loss, other)
    assert all((a == b).all() for a, b in zip(logprobs, outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_the_rate_of_copies_is_measured_once() -> None:
    """PCIe 4 with eight lanes moves 16 GB/s, NVLink-C2C 450."""
    rate = copy_rate(torch.device("cuda", 0))
    print(f"{rate / 1e9:.1f} GB/s")
    assert 2e9 < rate < 500e9
    assert copy_rate(torch.device("cuda", 0)) == rate
