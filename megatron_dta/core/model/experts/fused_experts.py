"""Grouped experts on the kernels: one launch for a product of all experts, one for SwiGLU with router weights.

The kernels read the number of rows of each expert on the device; the host needs their sum to allocate tensors. If the
experts are divided among ranks, it takes the largest possible number where that costs little memory. Otherwise it takes
slightly more than the layer's last passes had, in proportion to the tokens, and at most what the planner expects.
The actual number, whose copy to the host started before the tokens travelled (``HostCounts``), is read when the
products have been launched. If there were more rows, the products run again with as many. So nothing is dropped, and
the device computes while the host waits. The result is the same bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dta_kernels.experts.grouped_products import GroupedRows, MatrixTable
from dta_kernels.experts.row_sums import sum_rows
from dta_kernels.layers.swiglu import weighted_swiglu, weighted_swiglu_backward
from megatron_dta.core.model.activation import is_swiglu
from megatron_dta.core.model.experts.expert_maps import FindMatrices
from megatron_dta.core.model.experts.expert_rows import ExpertRows
from megatron_dta.core.model.experts.grouped_experts import GroupedExperts, Products
from megatron_dta.core.planning.costs.segment_bytes import EXPERT_SHARE

# Maximum number of bytes of a layer's rows for which the largest possible number of rows is allocated, in passes that
# keep these rows for a backward, and in others.
_MOST_BYTES_KEPT, _MOST_BYTES = 2**22, 2**28
# Rows to make room for, over the most of this number of passes before.
_MARGIN, _PASSES = 1 + 1 / 32, 4


class FusedGroupedExperts(GroupedExperts):
    """``GroupedExperts`` whose products, and whose activation if it is SwiGLU, run on the kernels."""

    counts_on_host = False
    # With the step for which its addresses were last compared.
    _tables: dict[str, tuple[MatrixTable, object]] | None = None
    # Rows of the last passes over the largest possible numbers.
    _shares: tuple[float, ...] = ()

    sum_rows = staticmethod(sum_rows)

    def products(self, rows: ExpertRows, x_RC: Tensor, is_kept: bool) -> Products:
        size = (3 * self.config.moe_ffn_hidden_size + x_RC.shape[1]) * x_RC.element_size()
        counts, number, is_row = rows.counts, rows.most, None
        fair = rows.token_rows.numel() * self.num_local_experts // self.config.num_moe_experts
        is_expected = rows.host.is_pending and rows.most * size > (_MOST_BYTES_KEPT if is_kept else _MOST_BYTES)
        if is_expected:
            number = self._expected(rows, fair)
        if not rows.host.is_pending:
            number = rows.host.total
        elif number < rows.most:
            # Kernels must not go beyond their tensors if there are more rows.
            counts = counts.cumsum(0).clamp_(max=number).diff(prepend=counts.new_zeros(1))
        if is_kept and rows.host.is_pending:
            is_row = torch.arange(number, device=x_RC.device) < rows.counts.sum()
        groups = GroupedRows(counts, x_RC, number, rows.tokens[:number], fair)
        return Products(groups, rows.entries[:number], is_row, is_expected)

    def _expected(self, rows: ExpertRows, fair: int) -> int:
        """Number of rows to make room for; ``fair`` is the equal share of the rank's experts."""
        if not self._shares:
            return rows.host.total
        return min(rows.most, 1 + int(min(_MARGIN * max(self._shares) * rows.most, EXPERT_SHARE * fair)))

    def had_room(self, rows: ExpertRows, number: int) -> bool:
        self._shares = (*self._shares, rows.host.total / max(1, rows.most))[-_PASSES:]
        return rows.host.total <= number

    def matrices(self, key: str, find: FindMatrices, step: object | None) -> MatrixTable:
        """The table of addresses; it is rebuilt when a matrix has moved, which none does within a step."""
        if not key:
            return MatrixTable(find())
        self._tables = self._tables or {}
        table, checked = self._tables.get(key, (None, None))
        if checked is None or checked is not step:
            matrices = find()
            if table is None or not table.holds(matrices):
                table = MatrixTable(matrices)
            self._tables[key] = table, step
        return table

    def activate(self, first_QF: Tensor, weights_Q: Tensor) -> Tensor:
        if not is_swiglu(self.config):
            return super().activate(first_QF, weights_Q)
        return weighted_swiglu(first_QF, weights_Q)

    def activation_gradients(self, grad_QF: Tensor, first_QF: Tensor, weights_Q: Tensor) -> tuple[Tensor, Tensor]:
        if not is_swiglu(self.config):
            return super().activation_gradients(grad_QF, first_QF, weights_Q)
        return weighted_swiglu_backward(grad_QF, first_QF, weights_Q)
