"""Runs a transformer layer in a decoding pass with the forward kernels of ``fused_autograd_layer``, without modules.

A decoding pass is short. Its time depends on the number of kernels and, without a CUDA graph, on the host time to
launch them. The output of a layer's last branch is therefore added to the residual stream together with the next
layer's norm: the context carries the branch there, and the last layer adds it itself. Keys and values are written
directly to their pages; if every row has one token, the attention kernel itself normalizes and rotates its queries and
the new key (``mixed_rows``). The results equal those of the modules bit for bit, with two exceptions that only add in
another order: products of few rows in 16 bits, which have a kernel of their own (``few_rows``), and norms of heads
inside the attention in float32.

It supports the same layers as ``fused_autograd_layer``, with or without gradient buffers, and is used for all layers of
a model chunk or for none. Under tensor parallelism the terms of both branches are summed over the group
(``tensor_sum``), and every rank has all rows, also with sequence parallelism: it divides activations, and a decoding
pass has few.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from dta_kernels.invariant.products import is_batch_invariant
from dta_kernels.layers.few_rows import few_rows_product, gated_product, tiles_for
from dta_kernels.layers.qkv_rope_pages import write_to_pages
from dta_kernels.layers.rms_norm import rms_norm_forward
from dta_kernels.layers.swiglu import swiglu_into
from megatron_dta.core.model.decode.paged_context import PagedContext
from megatron_dta.core.model.layers.fused_autograd_layer import FusedAutogradLayer, product
from megatron_dta.core.model.parallel.tensor_sum import tensor_sum


class DecodeLayer:
    """The weights of a layer in the plain case, for passes over pages.

    Args:
        layer: a ``FusedLayer`` for which ``has_plain_modules`` holds.
    """

    def __init__(self, layer: Module) -> None:
        self._weights, self._layer_number = FusedAutogradLayer(layer), layer.layer_number
        self._sum = tensor_sum() if layer.config.tensor_model_parallel_size > 1 else None

    @property
    def is_free(self) -> bool:
        """Whether no hook is registered on the modules."""
        return not any(self._weights.hooks)

    def __call__(self, x: Tensor, context: PagedContext) -> Tensor:
        """Output [n, 1, C] of the layer for ``x`` [n, 1, C]; without the last branch if the context carries it."""
        weights, mlp, (N, _, C) = self._weights, self._weights.feed_forward, x.shape
        normed, stream, _ = rms_norm_forward(x, weights.norms[0], weights.eps[0], context.carried, overlap=True)
        out = self._attend(_terms(normed.view(N, C), weights.qkv, weights.biases[0]), stream, context)
        branch = self._branch(out, weights.proj, weights.biases[1])
        normed, stream, _ = rms_norm_forward(stream, weights.norms[1], weights.eps[1], branch, overlap=True)
        active = _gated_product(normed.view(N, C), mlp.fc1, mlp.biases[0])
        if self._layer_number == context.direct_until:
            context.carried = None
            return self._summed_product(active, mlp.fc2, mlp.biases[1]).view(N, 1, C).add_(stream)
        context.carried = self._branch(active, mlp.fc2, mlp.biases[1])
        return stream

    def _attend(self, mixed: Tensor, x: Tensor, context: PagedContext) -> Tensor:
        """Output [n, H D] of the attention, in the dtype of ``x``, whose QKV product is ``mixed``."""
        weights, (G, P, D) = self._weights, self._weights.layout
        rows = weights.mixed_qkv(mixed, context)
        if context.decodes and not is_batch_invariant():
            return context.attend_mixed(self._layer_number, rows, x, weights.scale).view(len(x), -1)
        query = x.new_empty(len(x), G * P, D)
        write_to_pages(rows, query, context.pages_of(self._layer_number), context.slots)
        return context.attend_written(self._layer_number, query, weights.scale).view(len(x), -1)

    def _branch(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``_summed_product`` [n, 1, C], or terms of it [S, n, 1, C]."""
        branch = _terms(rows, weight, bias) if self._sum is None else self._summed_product(rows, weight, bias)
        return branch.unsqueeze(-2)

    def _summed_product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``rows @ weight.T + bias`` of inputs that are divided among the ranks of a tensor group."""
        if self._sum is None:
            return product(rows, weight, bias)
        total = self._sum.product(rows, weight)
        return total if bias is None else total.add_(bias)


def _terms(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``product``, or terms of it where the kernel of few rows computes it."""
    tiles = tiles_for(rows, weight) if bias is None and not is_batch_invariant() else None
    return product(rows, weight, bias) if tiles is None else few_rows_product(rows, weight, tiles)


def _gated_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SwiGLU of ``product``."""
    tiles = tiles_for(rows, weight, gated=True) if bias is None and not is_batch_invariant() else None
    if tiles is not None:
        return gated_product(rows, weight, tiles)
    gated = product(rows, weight, bias)
    active = gated.new_empty(len(gated), gated.shape[1] // 2)
    swiglu_into(gated, active)
    return active
