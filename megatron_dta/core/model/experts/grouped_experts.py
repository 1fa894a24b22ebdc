"""Runs a rank's experts as grouped products, with Megatron's parameters, one pair an expert.

Megatron's ``SequentialMLP`` runs about thirty small operations for each of up to 128 experts, so the host limits the
speed, not the GPU. Here all experts of a layer are one autograd function: two products over the rows of all experts in
the forward, and four in the backward. Every expert keeps its own parameters, so nothing changes for checkpoints,
conversions, the distributed optimizer and frozen weights. (PyTorch's ``grouped_mm`` would need copies of all weights as
one tensor and rounds their gradients; Megatron's own grouped experts need another package or Transformer Engine.)

The products read tokens, and gradients of their outputs, by index, so a token with several experts is not copied. The
function returns the sum of each token's outputs. The tokens and the first product are kept for the backward; the
activation is recomputed. Weight gradients are written directly to their buffers if these exist (``main_grad``). As in
``fused_autograd_layer``, autograd then need not know the parameters, unless their hooks must run
(``SegmentContext.runs_hooks``). Those of the first map are computed while gradients travel to other ranks. Adapters of
experts are grouped products, too (``expert_maps``); autograd knows their matrices.

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
from megatron_dta.core.model.activation import weighted_activation
from megatron_dta.core.model.experts.expert_maps import ExpertMap, FindMatrices, summed
from megatron_dta.core.model.experts.expert_rows import ExpertRows, RowSums, scattered
from megatron_dta.core.model.experts.weights import SameOnEveryMesh
from megatron_dta.core.model.main_grad import MainGradColumnParallelLinear, added_to_main_grad, main_grad_of

Later = Callable[[Callable[[], None]], None]
"""Calls its argument when gradients have started to travel."""


class Products(NamedTuple):
    """The products of one pass over the rows.

    Attributes:
        groups: ``PlainRows`` or ``GroupedRows``, which read tokens by index.
        entries: [Q], for each row its entry in a flat [R, K].
        is_row: bool [Q], False for unused rows; None if there are none.
        is_expected: whether the number of rows is an expectation (``had_room``).
    """

    groups: Any
    entries: Tensor
    is_row: Tensor | None = None
    is_expected: bool = False


class GroupedExperts(SameOnEveryMesh):
    """Megatron's experts with another forward."""

    sum_rows: RowSums = staticmethod(sum_rows)
    _maps: tuple[ExpertMap, ExpertMap] | None = None

    def forward(
        self,
        x_RC: Tensor,
        weights_RK: Tensor,
        rows: ExpertRows,
        runs_hooks: bool = True,
        later: Later | None = None,
        step: object | None = None,
    ) -> Tensor:
        """Sum [R, C] of each token's outputs, each times the router's weight.

        Args:
            weights_RK: the router's weight of each token's experts; those of other ranks' experts are not used.
            rows: the rows of this rank's experts.
            runs_hooks: whether the hooks of the parameters must run in the backward.
            later: of the exchange with other ranks; None if there is none.
            step: ``AttentionContext.step`` of the pass.
        """
        in_buffers, (fc1, fc2) = self._in_buffers(), (expert_map.current for expert_map in self.maps)
        needs_hooks = not in_buffers or runs_hooks or not x_RC.requires_grad
        adapters = (*fc1.a, *fc1.b, *fc2.a, *fc2.b)
        parameters = (*fc1.weights, *fc2.weights) if needs_hooks else ()
        run = ExpertsRun(self, rows, (fc1, fc2), in_buffers, bool(parameters))
        run.later, run.step = None if needs_hooks or adapters else later, step
        return _Experts.apply(x_RC, weights_RK, run, *parameters, *adapters)

    def direct_run(self, rows: ExpertRows, later: Later | None, step: object | None) -> ExpertsRun:
        """A pass of which autograd does not know, over weights without adapters whose gradients have buffers."""
        run = ExpertsRun(self, rows, self.maps, in_buffers=True, is_told=False)
        run.later, run.step = later, step
        return run

    @property
    def maps(self) -> tuple[ExpertMap, ExpertMap]:
        """Both maps, cached: with many experts, the lookup takes as long as the launches of a pass."""
        if self._maps is None:
            fc1, fc2 = (ExpertMap.of(self.local_experts, name) for name in ("linear_fc1", "linear_fc2"))
            self._maps = fc1, fc2
        return self._maps

    def _in_buffers(self) -> bool:
        """Whether the gradients of all weights are written directly to buffers."""
        if not isinstance(self.local_experts[0].linear_fc1, MainGradColumnParallelLinear):
            return False
        return all(main_grad_of(weight) is not None for expert_map in self.maps for weight in expert_map.weights)

    def products(self, rows: ExpertRows, x_RC: Tensor, is_kept: bool) -> Products:
        """The products of a pass; ``matrices`` makes their arguments.

        Args:
            is_kept: whether a backward follows.
        """
        number = rows.host.total
        return Products(PlainRows(rows.host.tolist(), rows.tokens[:number]), rows.entries[:number])

    def had_room(self, rows: ExpertRows, number: int) -> bool:
        """Whether the expected ``number`` of rows was enough; afterwards ``products`` knows the actual number."""
        raise NotImplementedError

    def matrices(self, key: str, find: FindMatrices, step: object | None) -> Any:
        """One matrix for each expert; ``key`` identifies the set within the layer, across passes.

        Args:
            step: ``AttentionContext.step`` of the pass.
        """
        return find()

    def activate(self, first_QF: Tensor, weights_Q: Tensor) -> Tensor:
        """The input of the second product."""
        return weighted_activation(first_QF, weights_Q, self.config)

    def activation_gradients(self, grad_QF: Tensor, first_QF: Tensor, weights_Q: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the two arguments of ``activate``."""
        inputs = first_QF.detach().requires_grad_(), weights_Q.detach().requires_grad_()
        with torch.enable_grad():
            active = weighted_activation(*inputs, self.config)
        return torch.autograd.grad(active, inputs, grad_QF)


class ExpertsRun:
    """One pass through both maps of all experts, and its backward.

    Args:
        in_buffers: whether gradients of weights are written directly to buffers.
        is_told: whether autograd must know the weights.

    Attributes:
        later, step: see ``GroupedExperts.forward``; ``later`` None if nothing may be computed later.
    """

    later: Later | None = None
    step: object | None = None

    def __init__(
        self,
        experts: GroupedExperts,
        rows: ExpertRows,
        maps: tuple[ExpertMap, ExpertMap],
        in_buffers: bool,
        is_told: bool,
    ) -> None:
        self.experts, self.rows, (self.fc1, self.fc2) = experts, rows, maps
        self.in_buffers, self.is_told = in_buffers, is_told

    def tables(self, key: str, find: FindMatrices) -> Any:
        """One matrix for each expert, see ``GroupedExperts.matrices``."""
        return self.experts.matrices(key, find, self.step)

    def forward(self, x: Tensor, weights: Tensor, is_kept: bool) -> tuple[Tensor, KeptRows]:
        """Sums [R, C] of each token's outputs, and what ``backward`` needs besides the tokens."""
        experts, rows, tables = self.experts, self.rows, self.tables
        output, is_expected = None, False
        while output is None or (is_expected and not experts.had_room(rows, len(output))):
            first = inner = inner_2 = output = None
            self.groups, entries, is_row, is_expected = experts.products(rows, x, is_kept)
            first, inner = self.fc1.product(self.groups, tables, x, indexed=True)
            weights_Q = weights.flatten().index_select(0, entries)
            output, inner_2 = self.fc2.product(self.groups, tables, experts.activate(first, weights_Q))
        return experts.sum_rows(output, rows.token_rows), KeptRows(weights_Q, first, inner, inner_2, entries, is_row)

    def backward(self, grad: Tensor, x: Tensor, kept: KeptRows) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients of the tokens [R, C], of the router's weights [R, K], and of the parameters that autograd knows.

        Args:
            grad: of the outputs, contiguous.
        """
        experts, fc1, fc2, groups, tables = self.experts, self.fc1, self.fc2, self.groups, self.tables
        weights, first, inner, inner_2, entries, is_row = kept
        active = experts.activate(first, weights)
        fc2_grads = self._weight_gradients(fc2, grad, active, "grad")
        grad_active, grad_inner = fc2.input_gradient(groups, tables, grad, indexed=True)
        adapters_2 = fc2.adapter_gradients(groups, tables, (grad, grad_inner), (active, inner_2), "grad")
        del active
        grad_first, grad_weights = experts.activation_gradients(grad_active, first, weights)
        del grad_active
        if is_row is not None:
            grad_weights = grad_weights.masked_fill(~is_row, 0)
        grad_rows, grad_inner = fc1.input_gradient(groups, tables, grad_first)
        grad_x = experts.sum_rows(grad_rows, self.rows.token_rows)
        del grad_rows
        fc1_grads: Sequence[Tensor | None] = ()
        if self.later is None:
            fc1_grads = self._weight_gradients(fc1, grad_first, x, "x")
        else:
            self.later(lambda: self._weight_gradients(fc1, grad_first, x, "x"))
        adapters = fc1.adapter_gradients(groups, tables, (grad_first, grad_inner), (x, inner), "x")
        grad_weights = scattered(grad_weights, entries, self.rows.token_rows.shape)
        return grad_x, grad_weights, [*fc1_grads, *fc2_grads, *adapters, *adapters_2]

    def _weight_gradients(self, of: ExpertMap, grad: Tensor, x: Tensor, indexed: str) -> Sequence[Tensor | None]:
        """Adds the weight gradients of one map to their buffers, or returns them if autograd knows the weights.

        ``indexed`` is "grad" or "x" for the tensor of tokens; the other one has a row for each pair of token and
        expert.
        """
        tables, weights = self.tables, of.weights
        if self.in_buffers:
            sums = tables(f"{of.name} sums", lambda: [weight.main_grad for weight in weights])
            self.groups.add_weight_gradients(sums, grad, x, indexed)
            return [added_to_main_grad(weight) for weight in weights] if self.is_told else ()
        if not any(weight.requires_grad for weight in weights):
            return [None] * len(weights)
        return summed(self.groups, tables, weights, (grad, x), indexed)


class KeptRows(NamedTuple):
    """What a backward needs of each row: the router's weight [Q], the first product [Q, width], the products of
    adapters, its entry, and whether it is one (``Products``)."""

    weights: Tensor
    first: Tensor
    inner: Tensor | None
    inner_2: Tensor | None
    entries: Tensor
    is_row: Tensor | None


class _Experts(torch.autograd.Function):
    """The parameters are the weights of both maps, if autograd must know them, and the matrices of adapters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, run: ExpertsRun, *_: Parameter) -> Tensor:
        output, kept = run.forward(x, weights, any(ctx.needs_input_grad))
        ctx.run = run
        ctx.save_for_backward(x, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, grad_RC: Tensor) -> tuple:
        x, *kept = ctx.saved_tensors
        grad_x, grad_weights, grads = ctx.run.backward(grad_RC.contiguous(), x, KeptRows(*kept))
        return grad_x, grad_weights, None, *grads
