"""Runs a rank's experts as grouped products (``--moe-grouped-gemm``), with Megatron's parameters, one pair an expert.

Megatron's ``SequentialMLP`` runs about thirty small operations for each of up to 128 experts, so the host limits the
speed, not the GPU. Here all experts of a layer are one autograd function: two products over the rows of all experts in
the forward, and four in the backward. Every expert keeps its own parameters, so nothing changes for checkpoints,
conversions, the distributed optimizer and frozen weights. (PyTorch's ``grouped_mm`` would need copies of all weights as
one tensor and rounds their gradients; Megatron's own grouped experts need another package or Transformer Engine.)

The products read tokens, and gradients of their outputs, by index, so a token with several experts is not copied. The
function returns the sum of each token's outputs. The tokens and the first product are kept for the backward; the
activation is recomputed. Weight gradients are written directly to their buffers if these exist (``main_grad``). As in
``fused_autograd_layer``, autograd then need not know the parameters, unless their hooks must run
(``SegmentContext.runs_hooks``). Those of the first map are computed while gradients travel to other ranks.

The products of this module are loops over the experts, for any device and dtype; the host waits for the number of rows
of each expert. ``fused_experts`` has the products on the kernels, which read these numbers on the device.

Legend: R tokens that the rank has received, K experts of each token, Q rows of all of the rank's experts, one expert
after another; C hidden size, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from dta_kernels.experts.reference import PlainRows, sum_rows
from megatron_dta.model.activation import weighted_activation
from megatron_dta.model.experts.expert_rows import ExpertRows, RowSums, scattered
from megatron_dta.model.experts.weights import SameOnEveryMesh
from megatron_dta.model.main_grad import MainGradColumnParallelLinear, added_to_main_grad, main_grad_of


class _Maps(NamedTuple):
    """The weights of all experts' first and second linear maps."""

    fc1: tuple[Parameter, ...]
    fc2: tuple[Parameter, ...]


Later = Callable[[Callable[[], None]], None]
"""Calls its argument when gradients have started to travel."""


class Products(NamedTuple):
    """The products of one pass over the rows.

    Attributes:
        groups: ``PlainRows`` or ``GroupedRows``, which read tokens by index.
        entries: [Q], for each row its entry in a flat [R, K].
        is_row: bool [Q], False for unused rows; None if there are none.
    """

    groups: Any
    entries: Tensor
    is_row: Tensor | None = None


class GroupedExperts(SameOnEveryMesh):
    """Megatron's experts with another forward."""

    sum_rows: RowSums = staticmethod(sum_rows)
    _maps: _Maps | None = None

    def forward(
        self, x_RC: Tensor, weights_RK: Tensor, rows: ExpertRows, runs_hooks: bool = True, later: Later | None = None
    ) -> Tensor:
        """Sum [R, C] of each token's outputs, each times the router's weight.

        Args:
            weights_RK: the router's weight of each token's experts; those of other ranks' experts are not used.
            rows: the rows of this rank's experts.
            runs_hooks: whether the hooks of the parameters must run in the backward.
            later: of the exchange with other ranks; None if there is none.
        """
        in_buffers = self._in_buffers()
        needs_hooks = not in_buffers or runs_hooks or not x_RC.requires_grad
        parameters = (*self.maps.fc1, *self.maps.fc2) if needs_hooks else ()
        return _Experts.apply(x_RC, weights_RK, self, rows, in_buffers, None if needs_hooks else later, *parameters)

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

    def products(self, rows: ExpertRows, x_RC: Tensor, is_kept: bool) -> Products:
        """The products of a pass; ``matrices`` makes their arguments.

        Args:
            is_kept: whether a backward follows.
        """
        number = rows.host.total
        return Products(PlainRows(rows.host.tolist(), rows.tokens[:number]), rows.entries[:number])

    def matrices(self, key: str, matrices: Sequence[Tensor]) -> Any:
        """One matrix for each expert; ``key`` identifies the set within the layer, across passes."""
        return matrices

    def activate(self, first_QF: Tensor, weights_Q: Tensor) -> Tensor:
        """The input of the second product."""
        return weighted_activation(first_QF, weights_Q, self.config)

    def activation_gradients(self, grad_QF: Tensor, first_QF: Tensor, weights_Q: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients by the two arguments of ``activate``."""
        inputs = first_QF.detach().requires_grad_(), weights_Q.detach().requires_grad_()
        with torch.enable_grad():
            active = weighted_activation(*inputs, self.config)
        return torch.autograd.grad(active, inputs, grad_QF)


class _Experts(torch.autograd.Function):
    """Both maps of all experts; ``parameters`` are their weights if autograd must know them, otherwise empty."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        experts: GroupedExperts,
        rows: ExpertRows,
        in_buffers: bool,
        later: Later | None,
        *parameters: Parameter,
    ) -> Tensor:
        maps, is_kept = experts.maps, any(ctx.needs_input_grad)
        groups, entries, is_row = experts.products(rows, x, is_kept)
        ctx.experts, ctx.groups, ctx.in_buffers, ctx.is_told = experts, groups, in_buffers, bool(parameters)
        ctx.fc1, ctx.fc2, ctx.later = experts.matrices("fc1", maps.fc1), experts.matrices("fc2", maps.fc2), later
        first = groups.product(x, ctx.fc1, indexed=True)
        weights_Q = weights.flatten().index_select(0, entries)
        ctx.save_for_backward(x, weights_Q, first, entries, rows.places, is_row)
        return experts.sum_rows(groups.product(experts.activate(first, weights_Q), ctx.fc2), rows.places)

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor) -> tuple:
        (x, weights, first, entries, place_RK, is_row), experts, groups = ctx.saved_tensors, ctx.experts, ctx.groups
        grad = grad_RC.contiguous()
        fc2_grads = _weight_gradients(ctx, "fc2", grad, experts.activate(first, weights), "grad")
        grad_active = groups.input_gradient(grad, ctx.fc2, indexed=True)
        grad_first, grad_weights = experts.activation_gradients(grad_active, first, weights)
        del grad_active
        if is_row is not None:
            grad_weights = grad_weights.masked_fill(~is_row, 0)
        grad_x = experts.sum_rows(groups.input_gradient(grad_first, ctx.fc1), place_RK)
        fc1_grads: Sequence[Tensor | None] = ()
        if ctx.later is None:
            fc1_grads = _weight_gradients(ctx, "fc1", grad_first, x, "x")
        else:
            ctx.later(lambda: _weight_gradients(ctx, "fc1", grad_first, x, "x"))
        grad_weights = scattered(grad_weights, entries, place_RK.shape)
        return grad_x, grad_weights, None, None, None, None, *fc1_grads, *fc2_grads


def _weight_gradients(ctx: Any, name: str, grad: Tensor, x: Tensor, indexed: str) -> Sequence[Tensor | None]:
    """Adds the weight gradients of one map to their buffers, or returns them if autograd knows the weights.

    ``indexed`` is "grad" or "x" for the tensor of tokens; the other one has a row for each pair of token and expert.
    """
    weights: tuple[Parameter, ...] = getattr(ctx.experts.maps, name)
    if ctx.in_buffers:
        sums = ctx.experts.matrices(f"{name} sums", [weight.main_grad for weight in weights])
        ctx.groups.add_weight_gradients(sums, grad, x, indexed)
        return [added_to_main_grad(weight) for weight in weights] if ctx.is_told else ()
    if not any(weight.requires_grad for weight in weights):
        return [None] * len(weights)
    sums = torch.zeros(len(weights), *weights[0].shape, dtype=weights[0].dtype, device=x.device).unbind()
    ctx.groups.add_weight_gradients(ctx.experts.matrices("", sums), grad, x, indexed)
    return sums
