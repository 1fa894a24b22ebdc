"""Grouped experts on the kernels: one launch for a product of all experts, one for SwiGLU with router weights.

The kernels read the number of rows of each expert on the device; the host needs their sum to allocate tensors. If the
experts are divided among ranks, it takes the largest possible number where that costs little memory, and otherwise the
actual one, whose copy to the host started before the tokens travelled (``HostCounts``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dta_kernels.experts.grouped_products import GroupedRows, MatrixTable
from dta_kernels.experts.row_sums import sum_rows
from dta_kernels.experts.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward
from megatron_dta.model.activation import is_swiglu
from megatron_dta.model.experts.expert_rows import ExpertRows
from megatron_dta.model.experts.grouped_experts import GroupedExperts, Products

# Most bytes of a layer's rows for which the largest possible number of rows is allocated, in passes that keep these
# rows for a backward, and in others.
_MOST_BYTES_KEPT, _MOST_BYTES = 2**22, 2**28


class FusedGroupedExperts(GroupedExperts):
    """``GroupedExperts`` whose products, and whose activation if it is SwiGLU, run on the kernels."""

    counts_on_host = False
    _tables: dict[str, MatrixTable] | None = None

    sum_rows = staticmethod(sum_rows)

    def products(self, rows: ExpertRows, x_RC: Tensor, is_kept: bool) -> Products:
        size = (3 * self.config.moe_ffn_hidden_size + x_RC.shape[1]) * x_RC.element_size()
        number, is_row = rows.most, None
        if rows.host.is_pending:
            if rows.most * size > (_MOST_BYTES_KEPT if is_kept else _MOST_BYTES):
                number = rows.host.total
            elif is_kept:
                is_row = torch.arange(number, device=x_RC.device) < rows.counts.sum()
        index = rows.tokens[:number]
        return Products(GroupedRows(rows.counts, x_RC, number, index), rows.entries[:number], is_row)

    def matrices(self, key: str, matrices: Sequence[Tensor]) -> MatrixTable:
        """The table of addresses; it is rebuilt when a matrix has moved."""
        if not key:
            return MatrixTable(matrices)
        self._tables = self._tables or {}
        if key not in self._tables or not self._tables[key].holds(matrices):
            self._tables[key] = MatrixTable(matrices)
        return self._tables[key]

    def activate(self, first_QF: Tensor, weights_Q: Tensor) -> Tensor:
        if not is_swiglu(self.config):
            return super().activate(first_QF, weights_Q)
        return weighted_swiglu(first_QF, weights_Q)

    def activation_gradients(self, grad_QF: Tensor, first_QF: Tensor, weights_Q: Tensor) -> tuple[Tensor, Tensor]:
        if not is_swiglu(self.config):
            return super().activation_gradients(grad_QF, first_QF, weights_Q)
        return weighted_swiglu_backward(grad_QF, first_QF, weights_Q)
