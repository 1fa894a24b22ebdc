"""One linear map of all experts of a layer, with the experts' LoRA adapters, as grouped products.

With adapters the map is ``y = W x + scale * B A x``; ``inner`` is ``scale * A x``. The products of A and B read their
rows as those of W do.

Legend: L experts, Q rows of all of them; R rank of the adapters, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_dta.core.model.layers.lora import SUFFIX

FindMatrices = Callable[[], Sequence[Tensor]]
"""Returns a matrix for each expert."""


class Tables(Protocol):
    """Makes one argument of grouped products of a matrix for each expert (``GroupedExperts.matrices``)."""

    def __call__(self, key: str, find: FindMatrices) -> Any: ...


@dataclass(frozen=True)
class ExpertMap:
    """The matrices of one map.

    Attributes:
        name: "linear_fc1" or "linear_fc2".
        weights: L matrices [O, I].
        a, b: L matrices [R, I] and [O, R]; empty without adapters.
        scale: factor of the adapters.
        switch: the first adapter, which tells whether adapters are enabled.
    """

    name: str
    weights: tuple[Parameter, ...]
    a: tuple[Parameter, ...] = ()
    b: tuple[Parameter, ...] = ()
    scale: float = 0.0
    switch: Module | None = None

    @classmethod
    def of(cls, experts: Sequence[Module], name: str) -> ExpertMap:
        """The map ``name`` of Megatron's experts."""
        weights = tuple(getattr(expert, name).weight for expert in experts)
        adapters = [getattr(expert, name + SUFFIX, None) for expert in experts]
        if adapters[0] is None:
            return cls(name, weights)
        matrices = (tuple(getattr(adapter, matrix) for adapter in adapters) for matrix in ("lora_A", "lora_B"))
        return cls(name, weights, *matrices, adapters[0].scale, adapters[0])

    @property
    def current(self) -> ExpertMap:
        """This map, without its adapters if they are disabled."""
        return self if self.switch is None or self.switch.enabled else replace(self, a=(), b=(), switch=None)

    def product(self, groups: Any, tables: Tables, x: Tensor, indexed: bool = False) -> tuple[Tensor, Tensor | None]:
        """``y`` [Q, O], and ``inner`` [Q, R] if there are adapters."""
        y = groups.product(x, tables(self.name, lambda: self.weights), indexed)
        if not self.a:
            return y, None
        inner = groups.product(x, tables(f"{self.name} A", lambda: self.a), indexed).mul_(self.scale)
        return y.add_(groups.product(inner, tables(f"{self.name} B", lambda: self.b))), inner

    def input_gradient(
        self, groups: Any, tables: Tables, grad: Tensor, indexed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of ``x`` [Q, I], and of ``A x`` [Q, R] if there are adapters."""
        grad_x = groups.input_gradient(grad, tables(self.name, lambda: self.weights), indexed)
        if not self.a:
            return grad_x, None
        grad_inner = groups.input_gradient(grad, tables(f"{self.name} B", lambda: self.b), indexed).mul_(self.scale)
        return grad_x.add_(groups.input_gradient(grad_inner, tables(f"{self.name} A", lambda: self.a))), grad_inner

    def adapter_gradients(
        self, groups: Any, tables: Tables, grads: tuple[Tensor, Tensor | None], rows: tuple[Tensor, Tensor | None],
        indexed: str,
    ) -> list[Tensor]:  # fmt: skip
        """The gradients of ``a`` and ``b``; none without adapters.

        Args:
            grads: by ``y`` and by ``A x``.
            rows: ``x`` and ``inner``.
            indexed: "grad" or "x" if the gradient of ``y`` or ``x`` is read by index.
        """
        if not self.a:
            return []
        of_a = summed(groups, tables, self.a, (grads[1], rows[0]), "x" if indexed == "x" else None)
        return [*of_a, *summed(groups, tables, self.b, (grads[0], rows[1]), "grad" if indexed == "grad" else None)]


def summed(
    groups: Any, tables: Tables, matrices: Sequence[Parameter], of: tuple[Tensor, Tensor], indexed: str | None
) -> Sequence[Tensor]:
    """The gradient of each of ``matrices``, of the rows' gradients and inputs ``of``."""
    first = matrices[0]
    sums = torch.zeros(len(matrices), *first.shape, dtype=first.dtype, device=first.device).unbind()
    groups.add_weight_gradients(tables("", lambda: sums), *of, indexed)
    return sums
