"""Runs a transformer layer in a decoding pass with the forward kernels of ``fused_autograd_layer``, without modules.

A decoding pass is short. Its time depends on the number of kernels and, without a CUDA graph, on the host time to
launch them. The output of a layer's last branch is therefore added to the residual stream together with the next
layer's norm: the context carries the branch there, and the last layer adds it itself. The results equal those of the
modules bit for bit.

It supports the same layers as ``fused_autograd_layer``, with or without gradient buffers, and is used for all layers of
a model chunk or for none. Under tensor parallelism the terms of both branches are summed over the group
(``tensor_sum``), and every rank has all rows, also with sequence parallelism: it divides activations, and a decoding
pass has few.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module

from dta_kernels.layers.rms_norm import rms_norm_forward
from dta_kernels.layers.swiglu import swiglu_into
from megatron_dta.model.attention.paged_context import PagedContext
from megatron_dta.model.layers.fused_autograd_layer import FusedAutogradLayer, product
from megatron_dta.model.parallel.tensor_sum import tensor_sum


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
        own = self._weights
        (N, _, C), (G, P, D) = x.shape, own.layout
        normed, stream, _ = rms_norm_forward(x, own.norms[0], own.eps[0], context.carried)
        rows = own.mixed_qkv(product(normed.view(N, C), own.qkv, own.biases[0]), context)
        query, key = x.new_empty(N, G * P, D), x.new_empty(N, G, D)
        rows.write(query, key)
        out = context.attend(self._layer_number, query, key, rows.values(), own.scale)
        branch = self._summed_product(out.view(N, -1), own.proj, own.biases[1])
        normed, stream, _ = rms_norm_forward(stream, own.norms[1], own.eps[1], branch.view(N, 1, C))
        gated = product(normed.view(N, C), own.fc1, own.biases[2])
        active = gated.new_empty(N, gated.shape[1] // 2)
        swiglu_into(gated, active)
        branch = self._summed_product(active, own.fc2, own.biases[3]).view(N, 1, C)
        if self._layer_number == context.direct_until:
            context.carried = None
            return branch.add_(stream)
        context.carried = branch
        return stream

    def _summed_product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``rows @ weight.T + bias`` of inputs that are divided among the ranks of a tensor group."""
        if self._sum is None:
            return product(rows, weight, bias)
        total = self._sum.product(rows, weight)
        return total if bias is None else total.add_(bias)
