"""Rows of grouped experts: their order, and rows beyond the number for which there was room."""

from unittest import mock

import numpy as np
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from conftest import seed_all
from dta_kernels.experts import reference
from dta_kernels.experts.grouped_products import GroupedRows
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.experts import fused_experts
from megatron_dta.core.model.experts.expert_rows import expert_rows
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from tree_attention_cases import poisoned_memory
from tree_engine_cases import QWEN3, model_config

# Tokens, experts of each, experts in all, and the first and the number of those whose rows are ordered.
ROW_ORDERS = [
    (300, 8, 128, 0, 128), (61, 3, 8, 2, 3), (1, 1, 4, 0, 4), (40, 5, 5, 4, 1), (0, 2, 8, 0, 8), (33, 1, 99, 20, 65),
]  # fmt: skip


def grouped_rows(counts: list[int], like: torch.Tensor, index: torch.Tensor | None = None) -> GroupedRows:
    """Rows of which the host knows how many each group has."""
    return GroupedRows(torch.tensor(counts, device=like.device), like, sum(counts), index)


def check_row_order(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """The kernels' order against that of their reference, with tokens of no expert if not all experts are here."""
    from dta_kernels.experts.row_order import order_rows

    tokens, experts_per_token, experts, first, local = sizes
    seed_all(tokens)
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :experts_per_token].to(device, dtype)
    if local < experts:
        chosen[::7] = -1
    most = tokens * min(experts_per_token, local)
    with poisoned_memory():
        ordered, twin = (order(chosen, first, local, most) for order in (order_rows, reference.order_rows))
    for actual, other in zip(ordered, twin, strict=True):
        assert torch.equal(actual, other)


def check_expected_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Passes of a rank with many, few, and no rows of its experts, and with all tokens at two: the same bit for bit as
    with room for the largest possible number. Counted: how often the products of a pass run.
    """
    settings = dict(num_experts=8, moe_ffn_hidden_size=16, fused_layer_impl="triton")
    initialize_parallel(2)
    model = build_model(model_config(dtype, **QWEN3, **settings), device)
    experts = next(module for module in model.modules() if isinstance(module, SequentialMLP))
    products, width, runs = experts.products, experts.config.hidden_size, []

    def one_pass(
        chosen: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor
    ) -> list[torch.Tensor]:
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        with poisoned_memory():
            output = experts(*inputs, expert_rows(chosen, 0, 8, are_all_here=False))
            return [output.detach(), *torch.autograd.grad(output, (*inputs, *experts.parameters()), grad)]

    passes, number, seed = [], 24, seed_all(8)
    for share in (0.6, 0.6, 0.62, 1.0, 0.3, 0.0, 0.0, 0.0, 0.3, 0.4):
        chosen = torch.from_numpy(np.stack([seed.permutation(8)[:2] for _ in range(number)]))
        if share == 1.0:
            chosen = torch.tensor([[3, 5]]).repeat(number, 1)
        chosen[torch.arange(number) >= share * number] = -1
        x, weights, grad = (torch.randn(number, columns, dtype=dtype, device=device) for columns in (width, 2, width))
        outcomes = []
        for most_bytes in (2**30, 0):
            runs.clear()
            with (
                mock.patch.object(fused_experts, "_MOST_BYTES_KEPT", most_bytes),
                mock.patch.object(experts, "products", lambda *args: runs.append(args) or products(*args)),
            ):
                outcomes.append(one_pass(chosen.to(device), x, weights, grad))
        assert all(torch.equal(first, other) for first, other in zip(*outcomes, strict=True))
        passes.append(len(runs))
    # The first pass waits; 18 of 48 rows more than in the four before are too many, and so are 2.
    assert passes == [1, 1, 1, 2, 1, 1, 1, 1, 1, 2]
