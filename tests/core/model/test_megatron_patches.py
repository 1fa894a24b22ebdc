"""The patches for machines without CUDA are applied once, affect only Megatron, and change no result."""

import os
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads, optimizer

from forked import run_python
from megatron_dta.core.model.parallel import megatron_patches

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


def test_tensors_handled_together_have_the_same_values() -> None:
    megatron_patches.handle_tensors_together()
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((3,), (5, 7), (1, 2, 3))]
    copies = [torch.zeros_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
    optimizer._multi_tensor_copy_this_to_that(tensors, copies)
    assert all(torch.equal(copy, tensor.bfloat16()) for copy, tensor in zip(copies, tensors, strict=True))
    norm = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]))
    torch.testing.assert_close(megatron_patches._norm_together(0, None, [tensors], False)[0], norm.reshape(1))
    scaled = [tensor * 0.3 for tensor in tensors]
    megatron_patches._scale_together(0, None, [tensors, tensors], 0.3)
    assert all(torch.equal(*pair) for pair in zip(tensors, scaled, strict=True))


ADAM = """
weight = torch.nn.Parameter(torch.arange(5.0))
adam = torch.optim.AdamW([weight], lr=0.1)
for step in range(3):
    adam.zero_grad()
    (weight**2).sum().backward()
    adam.step()
adam.load_state_dict(adam.state_dict())
print(weight.tolist())
"""
HIDDEN = 'sys.modules["torch._dynamo"] = None'
PATCHED = "from megatron_dta.core.model.parallel import megatron_patches; megatron_patches.run_adam_without_compiler()"


def test_adam_steps_without_the_compiler(tmp_path: Path) -> None:
    """In forked processes, whose server has imported the compiler and has made no optimizer."""
    results = []
    for number, lines in enumerate([(), (HIDDEN, PATCHED), (HIDDEN,)]):
        program = tmp_path / f"{number}.py"
        program.write_text("\n".join(["import sys, torch", *lines, ADAM]))
        results.append(run_python([program]))
    plain, patched, control = results
    assert plain.returncode == patched.returncode == 0, plain.stderr + patched.stderr
    assert patched.stdout == plain.stdout
    assert "import of torch._dynamo halted" in control.stderr


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
