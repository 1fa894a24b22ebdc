"""The patches for machines without CUDA are applied once, affect only Megatron, and change no result."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads, optimizer

from conftest import seed_all
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.mesh import initialize_parallel

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without CUDA")


@needs_no_cuda
def test_patches_apply_once() -> None:
    megatron_patches.install()
    first = (torch.cuda.current_device, optimizer.clip_grad_by_total_norm_fp32, clip_grads.torch)
    megatron_patches.install()
    assert (torch.cuda.current_device, optimizer.clip_grad_by_total_norm_fp32, clip_grads.torch) == first
    assert torch.cuda.current_device() == torch.device("cpu")
    assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_nothing_is_patched_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_patches, "_installed", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.cuda.current_device, optimizer.torch, optimizer.clip_grad_by_total_norm_fp32)
    megatron_patches.install()
    assert (torch.cuda.current_device, optimizer.torch, optimizer.clip_grad_by_total_norm_fp32) == before
    assert not megatron_patches._installed


@needs_no_cuda
@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_clipping_scales_to_the_norm_and_only_there_types_are_renamed(norm: float) -> None:
    seed_all(1)
    megatron_patches.install()
    parameter = torch.nn.Parameter(torch.zeros(7))
    parameter.grad = torch.randn(7)
    gradient = parameter.grad.clone()
    total = float(gradient.norm())
    optimizer.clip_grad_by_total_norm_fp32([parameter], norm, total)
    torch.testing.assert_close(parameter.grad, gradient * min(1.0, norm / (total + 1e-6)))
    assert parameter.type() == "torch.FloatTensor"
    assert parameter.type(torch.float64).dtype is torch.float64


@needs_no_cuda
def test_recomputation_repeats_the_random_numbers() -> None:
    seed = int(seed_all(2).integers(1000))
    initialize_parallel(seed)
    weight = torch.randn(5, 5, requires_grad=True)

    def layer(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(values @ weight, 0.5).tanh()

    gradients = []
    for recompute in (False, True):
        torch.manual_seed(seed)
        values = torch.ones(3, 5, requires_grad=True)
        out = tensor_parallel.checkpoint(layer, False, values) if recompute else layer(values)
        (gradient,) = torch.autograd.grad(out.sum(), values) if not recompute else (None,)
        if recompute:
            weight.grad = None
            out.sum().backward()
            gradient = values.grad
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_checkpoint_writers_are_threads() -> None:
    megatron_patches.write_checkpoints_in_process()
    patched = filesystem_async.mp
    megatron_patches.write_checkpoints_in_process()
    assert filesystem_async.mp is patched
    context = filesystem_async.mp.get_context("fork")
    results = context.Manager().Queue()
    worker = context.Process(target=lambda: results.put(os.getpid()))
    worker.start()
    worker.join()
    assert results.get_nowait() == os.getpid()
    assert sys.modules["torch.multiprocessing"].get_context("fork") is not context
