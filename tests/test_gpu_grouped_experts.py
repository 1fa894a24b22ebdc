"""Grouped experts on a GPU in bfloat16: as near to float32 as experts one by one, and faster.

python -m pytest -m gpu -s tests/test_gpu_grouped_experts.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.grouped_products import GroupedRows, MatrixTable
from dta_kernels.grouped_products_reference import PlainRows
from dta_kernels.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward
from megatron_dta.engine import prepare_batch
from megatron_dta.parity import random_training_samples
from test_gpu_main_grad import milliseconds, no_waiting
from test_main_grad import BY_AUTOGRAD, DIRECT, Wrapped
from test_tree_engine import GRPO, QWEN3, branching_sequences, model_config, tree_config, weights_of
from tree_attention_cases import poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
# Rows of each group, outputs, inputs, elements before the first matrix.
SHAPES = {
    "odd": ([5, 0, 70, 3, 1], 53, 31, 3),
    "wide": ([300, 0, 129, 1, 513], 192, 320, 0),
    "narrow": ([7, 4, 0], 512, 64, 0),
    "no rows": ([0, 0], 16, 24, 0),
}
EXPERTS = QWEN3 | {"num_experts": 8, "moe_ffn_hidden_size": 96, "hidden_size": 128, "kv_channels": 64}


def norm_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def random_bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.parametrize("name", SHAPES)
def test_products_are_as_near_to_float64_as_single_ones(name):
    counts, out, inner, offset = SHAPES[name]
    seed_all(out)
    x, grad = random_bfloat16(sum(counts), inner), random_bfloat16(sum(counts), out)
    # As in Megatron's buffers the matrices may begin anywhere.
    flat = random_bfloat16(offset + len(counts) * out * inner)
    matrices = flat[offset:].view(len(counts), out, inner).unbind()
    kept = torch.randn(offset + len(counts) * out * inner, device="cuda")
    found_sums, loop_sums, exact_sums = kept.clone(), kept.clone(), kept.double()
    views = [each[offset:].view(len(counts), out, inner).unbind() for each in (found_sums, loop_sums, exact_sums)]
    with poisoned_memory():
        rows, table = GroupedRows(counts, x), MatrixTable(matrices)
        found = [rows.product(x, table), rows.input_gradient(grad, table)]
        rows.add_weight_gradients(MatrixTable(views[0]), grad, x)
        again = kept.clone()
        sums = again[offset:].view(len(counts), out, inner).unbind()
        GroupedRows(counts, x).add_weight_gradients(MatrixTable(sums), grad, x)
    assert torch.equal(again, found_sums)
    loop, doubles = PlainRows(counts), [matrix.double() for matrix in matrices]
    single = [loop.product(x, matrices), loop.input_gradient(grad, matrices)]
    loop.add_weight_gradients(views[1], grad, x)
    exact = [loop.product(x.double(), doubles), loop.input_gradient(grad.double(), doubles)]
    loop.add_weight_gradients(views[2], grad.double(), x.double())
    for got, other, want in zip(found, single, exact, strict=True):
        assert got.isfinite().all()
        assert norm_error(got, want) <= 1.02 * norm_error(other, want) + 1e-6
    assert norm_error(found_sums, exact_sums) < 1e-5
    assert torch.equal(found_sums[:offset], kept[:offset])


def test_weighted_swiglu_is_as_near_to_float64_as_plain_operations():
    seed_all(3)
    x, weight, grad = (
        random_bfloat16(301, 2 * 770),
        torch.rand(301, device="cuda").bfloat16(),
        random_bfloat16(301, 770),
    )

    def plain(dtype: torch.dtype) -> list[torch.Tensor]:
        given = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        gate, up = given[0].chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up * given[1].unsqueeze(-1)
        return [y.detach(), *torch.autograd.grad(y, given, grad.to(dtype))]

    found = [weighted_swiglu(x, weight), *weighted_swiglu_backward(grad, x, weight)]
    for got, other, want in zip(found, plain(torch.bfloat16), plain(torch.float64), strict=True):
        assert norm_error(got, want) <= 1.02 * norm_error(other, want)


@pytest.mark.parametrize(("overlap", "topk", "layers"), [(False, 8, 2), (True, 2, 1)])
def test_gradients_are_as_near_to_float32(overlap, topk, layers):
    """All experts take all tokens, or routers see the same rows: no token may go to another expert for a rounding."""
    samples = random_training_samples(branching_sequences(seed_all(81), count=40, longest=90), seed=81)
    model = model_config(torch.bfloat16, **EXPERTS, moe_router_topk=topk, num_layers=layers)
    parallel = replace(DIRECT, overlap_grad_reduce=overlap, ddp_bucket_size=50000 if overlap else None)
    weights, tree = weights_of(model, seed=4), tree_config("dta", 64, 200)
    single = replace(model, params_dtype=torch.float32, fused_layer_impl="reference")
    exact = Wrapped(single, {name: weight.float() for name, weight in weights.items()}, BY_AUTOGRAD)
    wanted = exact.gradients(samples, tree)
    experts = [name for name in wanted if ".local_experts." in name]
    errors = {}
    for is_grouped in (False, True):
        wrapped = Wrapped(replace(model, moe_grouped_gemm=is_grouped), weights, parallel)
        for _ in range(2):
            wrapped.optimizer.zero_grad()
            wrapped.engine.forward_backward(prepare_batch(samples, tree), GRPO)
            wrapped.optimizer.reduce_gradients()
        found = {name: p.main_grad for name, p in wrapped.model.named_parameters()}
        errors[is_grouped] = sum(norm_error(found[name], wanted[name].double()) for name in experts) / len(experts)
    print(f"mean error of experts' gradients in bfloat16: grouped {errors[True]:.4f}, one by one {errors[False]:.4f}")
    assert errors[True] < 1.05 * errors[False] + 1e-4


@pytest.mark.parametrize(("num_experts", "rows_each"), [(32, 1024), (128, 256)])
def test_speed_of_the_products_of_a_layer(num_experts, rows_each):
    """Prints it for the Qwen3-30B-A3B shape; asserted is that nothing waits, and at most twice the loop's time."""
    seed_all(num_experts)
    width, hidden = 1536, 2048
    counts = torch.randint(rows_each // 2, rows_each * 3 // 2, (num_experts,)).tolist()
    num_rows = sum(counts)
    x, grad = random_bfloat16(num_rows, hidden), random_bfloat16(num_rows, width)
    matrices = random_bfloat16(num_experts, width, hidden).unbind()
    sums = torch.zeros(num_experts, width, hidden, device="cuda").unbind()
    table, sums_table = MatrixTable(matrices), MatrixTable(sums)
    loop = PlainRows(counts)
    stacked, ends = torch.stack(matrices), torch.tensor(counts, device="cuda").cumsum(0).int()
    cases = {
        "product": (
            lambda: GroupedRows(counts, x).product(x, table),
            lambda: loop.product(x, matrices),
            lambda: torch.nn.functional.grouped_mm(x, stacked.transpose(1, 2), offs=ends),
        ),
        "input gradient": (
            lambda: GroupedRows(counts, x).input_gradient(grad, table),
            lambda: loop.input_gradient(grad, matrices),
            lambda: torch.nn.functional.grouped_mm(grad, stacked, offs=ends),
        ),
        "weight gradients": (
            lambda: GroupedRows(counts, x).add_weight_gradients(sums_table, grad, x),
            lambda: loop.add_weight_gradients(sums, grad, x),
            lambda: torch.nn.functional.grouped_mm(grad.t(), x, offs=ends),
        ),
    }
    for name, (grouped, single, library) in cases.items():
        grouped()
        with no_waiting():
            grouped()
        times = [milliseconds(run) for run in (grouped, single)]
        try:
            others = milliseconds(library)
        except (RuntimeError, AttributeError) as error:
            others = float("nan")
            print(f"grouped_mm: {str(error).splitlines()[0][:100]}")
        rate = 2 * num_rows * width * hidden / times[0] / 1e9
        print(
            f"{num_experts} experts, {num_rows} rows, {name}: {times[0]:.3f} ms ({rate:.0f} TFLOP/s), one by one "
            f"{times[1]:.3f} ms, grouped_mm on stacked weights {others:.3f} ms"
        )
        assert times[0] < 2 * times[1]
