"""Runs a rank's experts as grouped products (``--moe-grouped-gemm``), with Megatron's parameters, one pair an expert.

Megatron's ``SequentialMLP`` runs about thirty small operations for each of up to 128 experts, so the host limits the
speed, not the GPU. Here all experts of a layer are one autograd function: two products over the rows of all experts in
the forward, and four in the backward. Every expert keeps its own parameters, so nothing changes for checkpoints,
conversions, the distributed optimizer and frozen weights. (PyTorch's ``grouped_mm`` would need copies of all weights as
one tensor and rounds their gradients; Megatron's own grouped experts need another package or Transformer Engine.)

The input rows and the first product are kept for the backward; the activation is recomputed. Weight gradients are
written directly to their buffers if these exist (``main_grad``). As in ``fused_autograd_layer``, autograd then need not
know the parameters, unless their hooks must run (``SegmentContext.runs_hooks``).

The products of this module are loops over the experts, for any device and dtype; the host fetches the number of rows of
each expert. ``fused_experts`` has the products on the kernels, which read these numbers on the device.

Legend: R rows of all of a rank's experts, one expert after another; C hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from dta_kernels.experts.reference import PlainRows
from megatron_dta.model.activation import weighted_activation
from megatron_dta.model.attention.context import AttentionContext
from megatron_dta.model.experts.weights import SameOnEveryMesh
from megatron_dta.model.main_grad import MainGradColumnParallelLinear, added_to_main_grad, main_grad_of


class _Maps(NamedTuple):
    """The weights of all experts' first and second linear maps."""

    fc1: tuple[Parameter, ...]
    fc2: tuple[Parameter, ...]


class GroupedExperts(SameOnEveryMesh):
    """Megatron's experts with another forward.

    Attributes:
        context: the pass that the layer is running, set by ``RoutedLayer``; None if there is none.
    """

    context: AttentionContext | None = None
    _maps: _Maps | None = None

    def forward(self, rows_RC: Tensor, tokens_per_expert: Tensor, weights_R: Tensor) -> tuple[Tensor, None]:
        """Outputs [R, C] of all rows, each times its weight, and no bias.

        Args:
            tokens_per_expert: on any device, rows of each expert.
            weights_R: the router's weight of each row.
        """
        rows = self.grouped_rows(tokens_per_expert, rows_RC)
        maps, in_buffers = self.maps, self._in_buffers()
        needs_hooks = not in_buffers or getattr(self.context, "runs_hooks", True) or not rows_RC.requires_grad
        parameters = (*maps.fc1, *maps.fc2) if needs_hooks else ()
        return _Experts.apply(rows_RC, weights_R, self, rows, in_buffers, *parameters), None

    @property
    def maps(self) -> _Maps:
        """The weights of both maps, cached: with many experts, the lookup takes as long as the launches of a pass."""
        if self._maps is None:
            experts = self.local_experts
            self._maps = _Maps(
                *(tuple(getattr(e, name).weight for e in experts) for name in ("linear_fc1", "linear_fc2"))
            )
        return self._maps

    def _in_buffers(self) -> bool:
        """Whether the gradients of all weights are written directly to buffers."""
        if not isinstance(self.local_experts[0].linear_fc1, MainGradColumnParallelLinear):
            return False
        return all(main_grad_of(weight) is not None for weights in self.maps for weight in weights)

    def grouped_rows(self, counts_L: Tensor, rows_RC: Tensor) -> Any:
        """The rows of all experts with their products; ``matrices`` makes the arguments of these products."""
        return PlainRows(counts_L.tolist())

    def matrices(self, key: str, matrices: Sequence[Tensor]) -> Any:
        """One matrix for each expert; ``key`` identifies the set within the layer, across passes."""
        return matrices

    def activate(self, first_RF: Tensor, weights_R: Tensor) -> Tensor:
        """The input of the second product."""
        return weighted_activation(first_RF, weights_R, self.config)

    def activation_gradients(self, grad_RF: Tensor, first_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by the two arguments of ``activate``."""
        inputs = first_RF.detach().requires_grad_(), weights_R.detach().requires_grad_()
        with torch.enable_grad():
            active = weighted_activation(*inputs, self.config)
        return torch.autograd.grad(active, inputs, grad_RF)


class _Experts(torch.autograd.Function):
    """Both maps of all experts; ``parameters`` are their weights if autograd must know them, otherwise empty."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: GroupedExperts,
        rows: Any,
        in_buffers: bool,
        *parameters: Parameter,
    ) -> Tensor:
        maps = experts.maps
        ctx.experts, ctx.rows, ctx.in_buffers, ctx.is_told = experts, rows, in_buffers, bool(parameters)
        ctx.fc1, ctx.fc2 = experts.matrices("fc1", maps.fc1), experts.matrices("fc2", maps.fc2)
        first = rows.product(x, ctx.fc1)
        ctx.save_for_backward(x, weights, first)
        return rows.product(experts.activate(first, weights), ctx.fc2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x, weights, first), experts, rows = ctx.saved_tensors, ctx.experts, ctx.rows
        grad = grad.contiguous()
        fc2_grads = _weight_gradients(ctx, "fc2", grad, experts.activate(first, weights))
        grad_first, grad_weights = experts.activation_gradients(rows.input_gradient(grad, ctx.fc2), first, weights)
        fc1_grads = _weight_gradients(ctx, "fc1", grad_first, x)
        return rows.input_gradient(grad_first, ctx.fc1), grad_weights, None, None, None, *fc1_grads, *fc2_grads


def _weight_gradients(ctx: Any, name: str, grad: Tensor, x: Tensor) -> Sequence[Tensor | None]:
    """Adds the weight gradients of one map to their buffers, or returns them if autograd knows the weights."""
    weights: tuple[Parameter, ...] = getattr(ctx.experts.maps, name)
    if ctx.in_buffers:
        sums = ctx.experts.matrices(f"{name} sums", [weight.main_grad for weight in weights])
        ctx.rows.add_weight_gradients(sums, grad, x)
        return [added_to_main_grad(weight) for weight in weights] if ctx.is_told else ()
    if not any(weight.requires_grad for weight in weights):
        return [None] * len(weights)
    sums = torch.zeros(len(weights), *weights[0].shape, dtype=weights[0].dtype, device=x.device).unbind()
    ctx.rows.add_weight_gradients(ctx.experts.matrices("", sums), grad, x)
    return sums
