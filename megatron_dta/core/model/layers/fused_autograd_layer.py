"""Runs a whole transformer layer as one autograd function, for layers of the plain case.

A layer made of modules costs more host time than a GPU needs for a few thousand tokens: about ten autograd functions
with their hooks, a dozen module calls, and a reduction, a conversion and an addition for the weight of every norm. This
function runs the same kernels and products in one forward and one backward, in the order of ``fused_layer`` and
autograd. Outputs and gradients are the same bit for bit, except those of the norms' weights: these are accumulated in
float32 directly in Megatron's buffers (``main_grad``), like those of the linear layers. The backward keeps the tensors
that ``fused_layer`` lists.

The plain case is the training of a model with RMSNorm and SwiGLU on one tensor rank, with every parameter in a gradient
buffer and none frozen, no adapters, no hooks on the modules, and Triton kernels for the attention. Experts must be
grouped on the kernels (``experts.direct_routing``), without shared ones. In a context group, the queries, the output
and its gradient are exchanged again in the backward, so no layer keeps the exchanged tensors.

Autograd does not know the parameters here, so their hooks, with which Megatron adds gradients over the replicas, do not
run. These hooks matter only in the last backward of a pass, and only if reductions overlap with it
(``--overlap-grad-reduce``); their order must then be the same on all ranks. The segment of that backward therefore runs
through the modules, like everything outside the plain case.

Legend: N tokens, C hidden size, W width of the mixed QKV, G key/value heads, P query heads of a group, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Module, Parameter

from dta_kernels.invariant.products import product as matrix_product
from dta_kernels.layers.partial_sums import add_partial_sums
from dta_kernels.layers.qkv_rope import MixedQKV
from dta_kernels.layers.rms_norm import rms_norm_again, rms_norm_forward, rms_norm_partial_gradients
from dta_kernels.layers.swiglu import swiglu_backward, swiglu_into
from dta_kernels.layers.weight_gradients import add_weight_gradient
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.experts.direct_routing import DirectRouting
from megatron_dta.core.model.experts.routed_layer import TreeMoELayer
from megatron_dta.core.model.layers.fused_norm import FusedRMSNorm
from megatron_dta.core.model.main_grad import MainGradColumnParallelLinear, MainGradRowParallelLinear, main_grad_of

_LINEAR = (MainGradColumnParallelLinear, MainGradRowParallelLinear)
_SUPPORTED = (*_LINEAR, ColumnParallelLinear, RowParallelLinear)
# PyTorch's tables of a module's hooks; if a PyTorch version names them differently, every layer runs as modules.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedAutogradLayer:
    """The weights of a layer in the plain case, with its forward and backward.

    Args:
        layer: a ``FusedLayer`` for which ``is_plain`` holds.
    """

    def __init__(self, layer: Module) -> None:
        attention, norms = layer.self_attention, (layer.input_layernorm, layer.pre_mlp_layernorm)
        self.layout, self.has_norms = attention.layout, attention.has_norms
        self.index = layer.layer_number - 1
        self.scale = attention.core_attention.softmax_scale
        self.norms, self.eps = tuple(norm.weight for norm in norms), tuple(norm.eps for norm in norms)
        self.head_norms = (attention.q_layernorm.weight, attention.k_layernorm.weight) if self.has_norms else ()
        self.head_eps = attention.q_layernorm.eps if self.has_norms else 0.0
        self.qkv, self.proj = attention.linear_qkv.weight, attention.linear_proj.weight
        self.biases = attention.linear_qkv.bias, attention.linear_proj.bias
        self.feed_forward = _feed_forward_of(layer)(layer.mlp)
        self.parameters = tuple(layer.parameters())
        self.hooks = tuple(getattr(module, name) for module in layer.modules() for name in _HOOKS)
        self._step, self._is_free = None, False

    def takes(self, hidden: Tensor, context: AttentionContext) -> bool:
        """Whether this pass, too, is in the plain case."""
        return (
            isinstance(context, SegmentContext)
            and context.attention_plan is not None
            and context.rotary_tables is not None
            and (context.context_group is not None or context.position_ids.shape[0] == hidden.shape[0])
            and hidden.is_contiguous()
            and (not torch.is_grad_enabled() or (hidden.requires_grad and not context.runs_hooks))
            and self._is_free_in(context.step)
        )

    def _is_free_in(self, step: object | None) -> bool:
        """Whether no parameter is frozen and no module has a hook, which changes between steps only."""
        if step is None or step is not self._step:
            is_trained = all([parameter.requires_grad for parameter in self.parameters])
            self._step, self._is_free = step, is_trained and not any(self.hooks)
        return self._is_free

    def __call__(self, hidden: Tensor, context: SegmentContext) -> Tensor:
        """Output [N, 1, C] of the layer for ``hidden`` [N, 1, C]."""
        if torch.is_grad_enabled():
            return _Layer.apply(hidden, self, context)
        return self.forward(hidden, context, is_kept=False)[0]

    def mixed_qkv(self, mixed: Tensor, context: AttentionContext) -> MixedQKV:
        """``mixed`` [N, W] with the layer's norms of heads and the context's positions."""
        return MixedQKV(mixed, *context.rotary_tables, *(self.head_norms or (None, None)), self.layout, self.head_eps)

    def forward(self, x: Tensor, context: SegmentContext, is_kept: bool) -> tuple[Tensor, _Kept]:
        """The layer's output, and the tensors that ``backward`` needs; ``is_kept`` if it follows."""
        (N, _, C), (G, P, D) = x.shape, self.layout
        x = x.view(N, C)
        normed, _, rstd = rms_norm_forward(x, self.norms[0], self.eps[0])
        mixed = product(normed, self.qkv, self.biases[0])
        rows, layer = self.mixed_qkv(mixed, context), context.layer_rows[self.index + 1]
        query = x.new_empty(N, G * P, D)
        if context.context_group is None:
            segment_kv = context.own_slots(layer)
            rows.write(query, *segment_kv)
            out, lse = context.attend_by_kernels(layer, query, segment_kv, self.scale)
        else:
            key = x.new_empty(N, G, D)
            rows.write(query, key)
            out, lse = context.attend_exchanged(layer, query, key, rows.values(), self.scale)
        branch = product(out.view(N, -1), self.proj, self.biases[1])
        normed, stream, stream_rstd = rms_norm_forward(x, self.norms[1], self.eps[1], branch)
        output, of_feed_forward = self.feed_forward.forward(normed, context, is_kept)
        kept = _Kept(x, rstd, mixed, out, lse, stream, stream_rstd, of_feed_forward)
        return output.add_(stream).view(N, 1, C), kept

    def backward(self, grad: Tensor, kept: _Kept, context: SegmentContext) -> Tensor:
        """The gradient of the layer's input; gradients of the parameters are added to their buffers.

        Tensors are freed as soon as they are no longer needed. Before the attention, whose tiles of scores are the
        largest tensors of the pass, only the gradients of the residual stream and of the attention's output remain
        (``planning.costs.segment_bytes`` counts them).
        """
        x, stream, out = kept.x, kept.stream, kept.out
        (N, C), layer = x.shape, context.layer_rows[self.index + 1]
        qkv_bias, proj_bias = self.biases
        grad_rows = grad.reshape(N, C)
        again = partial(_normed_again, stream, kept.stream_rstd, self.norms[1])
        grad_normed = self.feed_forward.backward(grad_rows, kept.feed_forward, again)
        grad_stream, mlp_norm = rms_norm_partial_gradients(
            grad_normed, grad_rows, stream, kept.stream_rstd, self.norms[1]
        )
        del grad_normed
        grad_out = _backward(grad_stream, out.view(N, -1), self.proj, proj_bias).view(out.shape)
        rows, query = self.mixed_qkv(kept.mixed, context), torch.empty_like(out)
        rows.write(query)
        inputs = (layer, grad_out, query, out, kept.lse, self.scale)
        if context.context_group is None:
            grads = context.attention_gradients(*inputs)
        else:
            grads = context.exchanged_gradients(*inputs, kv_heads=self.layout[0])
        del inputs
        del query, grad_out
        grad_mixed, head_norms = rows.partial_gradients(*grads)
        del grads
        grad_normed = _backward(grad_mixed, _normed_again(x, kept.rstd, self.norms[0]), self.qkv, qkv_bias)
        del grad_mixed
        grad_x, input_norm = rms_norm_partial_gradients(grad_normed, grad_stream, x, kept.rstd, self.norms[0])
        add_partial_sums(_buffers(self.norms), (input_norm, mlp_norm))
        if self.has_norms:
            add_partial_sums(_buffers(self.head_norms), head_norms)
        return grad_x.view(N, 1, C)


@dataclass(slots=True)
class _Kept:
    """Tensors that a layer keeps for its backward: its input, the residual stream after the attention with the norms'
    statistics, the mixed QKV, the attention's output and log-sum-exp, and what the feed-forward layer keeps.
    """

    x: Tensor
    rstd: Tensor
    mixed: Tensor
    out: Tensor
    lse: Tensor
    stream: Tensor
    stream_rstd: Tensor
    feed_forward: Any


class DirectFeedForward:
    """Forward and backward of Megatron's feed-forward layer with SwiGLU; keeps the first product."""

    def __init__(self, mlp: Module) -> None:
        self.fc1, self.fc2 = mlp.linear_fc1.weight, mlp.linear_fc2.weight
        self.biases = mlp.linear_fc1.bias, mlp.linear_fc2.bias

    @staticmethod
    def is_plain(mlp: Module) -> bool:
        """Whether this class supports the layer, whose gradient buffers exist."""
        return type(mlp.linear_fc1) in _LINEAR and type(mlp.linear_fc2) in _LINEAR

    def forward(self, x_NC: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Output [N, C], and the tensor that ``backward`` needs."""
        gated = product(x_NC, self.fc1, self.biases[0])
        return product(_active(gated), self.fc2, self.biases[1]), gated

    def backward(self, grad_NC: Tensor, gated: Tensor, tokens: Callable[[], Tensor]) -> Tensor:
        """The gradient of the input [N, C], which ``tokens`` recomputes."""
        grad_gated = swiglu_backward(_backward(grad_NC, _active(gated), self.fc2, self.biases[1]), gated)
        return _backward(grad_gated, tokens(), self.fc1, self.biases[0])


class _Layer(torch.autograd.Function):
    """Keeps tensors outside autograd, so that they are freed after the layer's backward and not with the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FusedAutogradLayer, context: SegmentContext) -> Tensor:
        ctx.layer, ctx.context = layer, context
        output, ctx.kept = layer.forward(x, context, is_kept=True)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("the backward of a layer can run only once, because it frees the tensors that it needs")
        return ctx.layer.backward(grad, kept, ctx.context), None, None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias``, rounded after the product and after the sum."""
    output = matrix_product(rows, weight)
    return output if bias is None else output.add_(bias)


def _backward(grad_rows: Tensor, rows: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
    """The gradient of the input of a product with ``weight``; adds those of weight and bias to their buffers."""
    grad = torch.mm(grad_rows, weight)
    add_weight_gradient(weight.main_grad, grad_rows, rows)
    if bias is not None:
        bias.main_grad.add_(grad_rows.sum(0))
    return grad


def _active(gated: Tensor) -> Tensor:
    active = gated.new_empty(gated.shape[0], gated.shape[1] // 2)
    swiglu_into(gated, active)
    return active


def _normed_again(x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """A norm's output [N, C], recomputed from its input [N, C]."""
    normed = torch.empty_like(x)
    rms_norm_again(x, rstd, weight, normed)
    return normed


def _buffers(weights: tuple[Parameter, ...]) -> tuple[Tensor, ...]:
    return tuple(weight.main_grad for weight in weights)


def _feed_forward_of(layer: Module) -> type[DirectFeedForward | DirectRouting]:
    return DirectRouting if isinstance(layer.mlp, TreeMoELayer) else DirectFeedForward


def has_plain_modules(layer: Module) -> bool:
    """Whether a dense ``FusedLayer`` with SwiGLU consists of modules whose forward ``FusedAutogradLayer`` computes, up
    to the communication of a tensor group."""
    if not _has_plain_attention(layer):
        return False
    return all(type(module) in _SUPPORTED for module in (layer.mlp.linear_fc1, layer.mlp.linear_fc2))


def _has_plain_attention(layer: Module) -> bool:
    """The same of attention and norms."""
    if not all(hasattr(layer, name) for name in _HOOKS) or not getattr(layer.self_attention, "is_fused", False):
        return False
    attention, norms = layer.self_attention, (layer.input_layernorm, layer.pre_mlp_layernorm)
    linear = (attention.linear_qkv, attention.linear_proj)
    return all(type(module) in _SUPPORTED for module in linear) and all(type(norm) is FusedRMSNorm for norm in norms)


def is_plain(layer: Module) -> bool:
    """Whether ``FusedAutogradLayer`` supports the layer and all its gradient buffers exist."""
    if layer.config.tensor_model_parallel_size > 1 or not _has_plain_attention(layer):
        return False
    attention = layer.self_attention
    return (
        all(type(module) in _LINEAR for module in (attention.linear_qkv, attention.linear_proj))
        and _feed_forward_of(layer).is_plain(layer.mlp)
        and not attention.checkpoint_core_attention
        and all(main_grad_of(parameter) is not None for parameter in layer.parameters())
    )
