"""Adds weight gradients to existing buffers in the buffer's precision, and provides placeholders for autograd.

A weight gradient in autograd is a separate tensor in the weight's dtype. For 16-bit weights it is rounded in every
backward pass, and it is written, read and added separately. Here the matrix product adds to the buffer as it is
computed. Autograd gets a tensor without memory instead, so that the weight's hooks fire.

Legend: N rows of a pass (tokens), V outputs of a linear map (for the logprobs the vocabulary), C inputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_placeholders: dict[tuple, Tensor] = {}


def add_weight_gradient(sum_VC: Tensor, grad_NV: Tensor, input_NC: Tensor) -> None:
    """``sum += grad.T @ input`` in the sum's dtype; if PyTorch supports it, without a copy of the product.

    Args:
        sum_VC: buffer, of the same dtype as the others or a wider one.
    """
    if grad_NV.shape[0] == 0:
        return
    if grad_NV.dtype == sum_VC.dtype:
        sum_VC.addmm_(grad_NV.t(), input_NC)
    elif not sum_VC.is_cuda:
        sum_VC.addmm_(grad_NV.t().to(sum_VC.dtype), input_NC.to(sum_VC.dtype))
    elif _has_mixed_product():
        torch.ops.aten.addmm.dtype_out(sum_VC, grad_NV.t(), input_NC, sum_VC.dtype, out=sum_VC)
    else:
        sum_VC += grad_NV.t() @ input_NC


@lru_cache
def _has_mixed_product() -> bool:
    """Whether PyTorch can add a product of 16-bit matrices to a float32 matrix."""
    return "dtype_out" in torch.ops.aten.addmm.overloads()


def add_row_gradients(sum_VC: Tensor, row_N: Tensor, grad_NC: Tensor) -> None:
    """``sum[row] += grad`` for every row, in the sum's dtype; repeated rows are added in a fixed order.

    Args:
        row_N: int64; a row may occur several times.
    """
    if sum_VC.is_cuda:
        # index_put_ sorts the rows on the device and so adds equal rows in order; index_add_ would use atomics.
        sum_VC.index_put_((row_N,), grad_NC.to(sum_VC.dtype), accumulate=True)
    else:
        # On a CPU, index_add_ is the deterministic one.
        sum_VC.index_add_(0, row_N, grad_NC.to(sum_VC.dtype))


def gradient_placeholder(weight: Tensor) -> Tensor:
    """A tensor without memory that has the weight's shape, strides, dtype and device, for autograd to pass on.

    Its elements must not be read or written, and autograd must not add it to another gradient of the same tensor. With
    the strides of the weight and no other reference to it, autograd makes it the weight's ``grad`` without a copy.
    """
    key = (tuple(weight.shape), weight.dtype, weight.device)
    if key not in _placeholders:
        placeholder = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        placeholder.untyped_storage().resize_(0)
        _placeholders[key] = placeholder
    return _placeholders[key].detach()
