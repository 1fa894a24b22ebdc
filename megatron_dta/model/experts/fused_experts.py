"""Grouped experts on the kernels: one launch for a product of all experts, one for SwiGLU with router weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dta_kernels.experts.grouped_products import GroupedRows, MatrixTable
from dta_kernels.experts.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward
from megatron_dta.model.activation import is_swiglu
from megatron_dta.model.experts.grouped_experts import GroupedExperts


class FusedGroupedExperts(GroupedExperts):
    """``GroupedExperts`` whose products, and whose activation if it is SwiGLU, run on the kernels."""

    counts_on_host = False
    _tables: dict[str, MatrixTable] | None = None

    def grouped_rows(self, counts_L: Tensor, rows_RC: Tensor) -> GroupedRows:
        return GroupedRows(counts_L.to(rows_RC.device, non_blocking=True), rows_RC, len(rows_RC))

    def matrices(self, key: str, matrices: Sequence[Tensor]) -> MatrixTable:
        """The table of addresses; it is rebuilt when a matrix has moved."""
        if not key:
            return MatrixTable(matrices)
        self._tables = self._tables or {}
        if key not in self._tables or not self._tables[key].holds(matrices):
            self._tables[key] = MatrixTable(matrices)
        return self._tables[key]

    def activate(self, first_RF: Tensor, weights_R: Tensor) -> Tensor:
        if not is_swiglu(self.config):
            return super().activate(first_RF, weights_R)
        return weighted_swiglu(first_RF, weights_R)

    def activation_gradients(self, grad_RF: Tensor, first_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor]:
        if not is_swiglu(self.config):
            return super().activation_gradients(grad_RF, first_RF, weights_R)
        return weighted_swiglu_backward(grad_RF, first_RF, weights_R)
