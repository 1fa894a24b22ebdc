"""Weights, gradients and optimizer states that are moved to the host and back leave training unchanged."""

from __future__ import annotations

import pytest
import torch

from conftest import seed_all
from megatron_dta.training.weights.offload import HostStorages
from optimizer_states_cases import RATES, Run


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_training_goes_on_bit_for_bit_after_an_offload():
    seed = int(seed_all(5).integers(1 << 30))
    plain = Run(seed, RATES)
    expected = [plain.step(number) for number in range(4)]
    expected_weights = plain.weights()

    run = Run(seed, RATES)
    losses = [run.step(number) for number in range(2)]
    weights = [parameter.data for parameter in run.model.parameters()]
    states, gradients = run.optimizer.state_tensors(), run.optimizer.gradient_buffers()
    # bfloat16 weights have master weights and two moments in float32.
    assert _bytes(states) >= 6 * _bytes([weight.clone() for weight in weights])
    storages = [HostStorages(weights), HostStorages(states), HostStorages(gradients, keep=False)]
    for part in storages:
        part.to_host()
        part.to_host()
    assert _bytes(weights) == _bytes(states) == _bytes(gradients) == 0
    for part in storages:
        part.to_device()
        part.to_device()
    assert not any(buffer.any() for buffer in gradients)
    losses += [run.step(number) for number in range(2, 4)]
    assert losses == expected
    for name, values in run.weights().items():
        assert torch.equal(values, expected_weights[name]), name


@pytest.mark.parametrize("constant", [False, True])
def test_views_see_their_values_again(constant: bool):
    whole = torch.arange(24.0).reshape(4, 6)
    parts = [whole[1], whole[:, 2], torch.arange(3)]
    before = [part.clone() for part in parts]
    storages = HostStorages(parts, constant=constant)
    for _ in range(2):
        storages.to_host()
        assert not storages.on_device
        assert whole.untyped_storage().nbytes() == 0
        storages.to_device()
        assert all(torch.equal(part, values) for part, values in zip(parts, before, strict=True))
        assert torch.equal(whole, torch.arange(24.0).reshape(4, 6))
