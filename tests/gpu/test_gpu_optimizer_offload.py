"""Optimizer states offloaded from a GPU: the same training in less memory, and exact resumption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import assert_equal_tensors
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_checkpoint, save_checkpoint
from optimizer_states_cases import RATES, Run

OFFLOAD = replace(RATES, use_precision_aware_optimizer=True, optimizer_cpu_offload=True)
KINDS = {
    "all": OFFLOAD,
    "half": replace(OFFLOAD, optimizer_offload_fraction=0.5),
    "bfloat16 gradients": replace(OFFLOAD, main_grads_dtype="bf16"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_without(kind: str) -> None:
    plain, offloaded = Run(5, RATES), Run(5, KINDS[kind])
    expected = [plain.step(number) for number in range(4)]
    found = [offloaded.step(number) for number in range(4)]
    assert all(applied for _, applied in found)
    assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=2e-2)
    there = plain.weights()
    for name, values in offloaded.weights().items():
        torch.testing.assert_close(values.float(), there[name].float(), rtol=2e-2, atol=4e-3)
    hybrid = offloaded.optimizer.optimizer.chained_optimizers[0].optimizer
    on_host = sum(p.numel() for each in hybrid.cpu_optimizers for group in each.param_groups for p in group["params"])
    total = sum(p.numel() for p in offloaded.model.parameters())
    assert on_host == total if kind != "half" else 0.4 * total < on_host < total


@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = Run(6, KINDS[kind])
    for number in range(2):
        straight.step(number)
    save_checkpoint(tmp_path, straight.config, straight.model, straight.optimizer, 2, {})
    expected = [straight.step(number) for number in range(2, 4)]
    restored = Run(7, KINDS[kind])
    load_checkpoint(find_checkpoint(tmp_path), restored.config, restored.model, restored.optimizer)
    assert [restored.step(number) for number in range(2, 4)] == expected
    assert_equal_tensors(restored.weights(), straight.weights())
