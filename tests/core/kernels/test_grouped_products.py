"""Products of groups of rows in Triton's interpreter and as a loop: against float64, groups without rows, odd sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from conftest import seed_all
from dta_kernels.experts import grouped_products
from dta_kernels.experts.grouped_products import MatrixTable
from dta_kernels.experts.reference import PlainRows
from dta_kernels.experts.reference import sum_rows as sum_rows_reference
from dta_kernels.experts.row_sums import sum_rows
from dta_kernels.layers.swiglu import weighted_swiglu, weighted_swiglu_backward
from expert_row_cases import ROW_ORDERS, check_row_order, grouped_rows
from tree_attention_cases import poisoned_memory
from triton_device import interpreter

# Rows of each group, outputs, inputs.
SHAPES = {
    "odd": ([5, 1, 70, 3], 53, 31),
    "groups without rows": ([0, 9, 0, 0, 66, 0], 24, 40),
    "no rows": ([0, 0, 0], 8, 16),
    "one group": ([67], 16, 300),
    "several tiles": ([130, 2, 400], 70, 8),
}
Products = tuple[Tensor, Tensor, list[Tensor]]


def inputs(name: str, dtype: torch.dtype) -> tuple[list[int], Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Rows of the groups; inputs, gradients, matrices, and sums that are not zero."""
    counts, out, inner = SHAPES[name]
    seed_all(out)
    x, grad = (torch.randn(sum(counts), width).to(dtype) for width in (inner, out))
    wide = torch.promote_types(dtype, torch.float32)
    sums = [torch.randn(out, inner, dtype=wide) for _ in counts]
    return counts, x, grad, [torch.randn(out, inner).to(dtype) for _ in counts], sums


def by_row(counts: list[int], x: Tensor, grad: Tensor, matrices: list[Tensor], sums: list[Tensor]) -> Products:
    """The slow twin: one product per row, in float64."""
    group = [index for index, count in enumerate(counts) for _ in range(count)]
    product = [matrices[expert].double() @ row for expert, row in zip(group, x.double(), strict=True)]
    back = [matrices[expert].double().t() @ row for expert, row in zip(group, grad.double(), strict=True)]
    sums = [total.double().clone() for total in sums]
    for expert, row, grad_row in zip(group, x.double(), grad.double(), strict=True):
        sums[expert] += torch.outer(grad_row, row)
    empty_y, empty_x = grad.new_empty(0, grad.shape[1]).double(), x.new_empty(0, x.shape[1]).double()
    return torch.stack(product) if product else empty_y, torch.stack(back) if back else empty_x, sums


def by_loop(counts: list[int], x: Tensor, grad: Tensor, matrices: list[Tensor], sums: list[Tensor]) -> Products:
    rows, sums = PlainRows(counts), [total.clone() for total in sums]
    rows.add_weight_gradients(sums, grad, x)
    return rows.product(x, matrices), rows.input_gradient(grad, matrices), sums


def by_kernels(counts: list[int], x: Tensor, grad: Tensor, matrices: list[Tensor], sums: list[Tensor]) -> Products:
    rows, table, sums = grouped_rows(counts, x), MatrixTable(matrices), [total.clone() for total in sums]
    rows.add_weight_gradients(MatrixTable(sums), grad, x)
    return rows.product(x, table), rows.input_gradient(grad, table), sums


def through_an_index(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An index, and tensors of which it reads ``x`` and ``grad``: every other row, backwards."""
    index = torch.arange(2 * len(x) - 2, -2, -2)
    spread = [rows.new_full((2 * len(x), rows.shape[1]), torch.nan) for rows in (x, grad)]
    for target, rows in zip(spread, (x, grad), strict=True):
        target[index] = rows
    return index, *spread


@interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_read_through_an_index(name, dtype):
    """The same bits as for copied rows; float64 on the loop, float32 on the kernels."""
    counts, x, grad, matrices, _ = inputs(name, dtype)
    index, spread_x, spread_grad = through_an_index(x, grad)
    if dtype == torch.float64:
        plain, indexed, tables = PlainRows(counts), PlainRows(counts, index), list
    else:
        plain, indexed, tables = grouped_rows(counts, x), grouped_rows(counts, x, index), MatrixTable
    sums = [[torch.zeros_like(matrix) for matrix in matrices] for _ in range(3)]
    with poisoned_memory():
        assert torch.equal(indexed.product(spread_x, tables(matrices), True), plain.product(x, tables(matrices)))
        gradient = indexed.input_gradient(spread_grad, tables(matrices), indexed=True)
        assert torch.equal(gradient, plain.input_gradient(grad, tables(matrices)))
        plain.add_weight_gradients(tables(sums[0]), grad, x)
        indexed.add_weight_gradients(tables(sums[1]), spread_grad, x, "grad")
        indexed.add_weight_gradients(tables(sums[2]), grad, spread_x, "x")
    for wanted, *others in zip(*sums, strict=True):
        assert all(torch.equal(wanted, other) for other in others)


@interpreter
def test_rows_beyond_the_counts_are_not_computed():
    counts, x, grad, matrices, sums = inputs("odd", torch.float32)
    wanted, more = [total.clone() for total in sums], torch.full((9, x.shape[1]), torch.nan)
    exact = grouped_rows(counts, x)
    rows = grouped_products.GroupedRows(torch.tensor(counts), x, sum(counts) + 9)
    product = rows.product(torch.cat([x, more]), MatrixTable(matrices))[: sum(counts)]
    assert torch.equal(product, exact.product(x, MatrixTable(matrices)))
    zeros = grad.new_zeros(9, grad.shape[1])
    rows.add_weight_gradients(MatrixTable(sums), torch.cat([grad, zeros]), torch.cat([x, more]))
    exact.add_weight_gradients(MatrixTable(wanted), grad, x)
    assert all(torch.equal(total, other) for total, other in zip(sums, wanted, strict=True))
    with pytest.raises(ValueError, match="through an index, and there is none"):
        rows.product(x, MatrixTable(matrices), indexed=True)


def worst(run: Callable[..., Products], name: str, dtype: torch.dtype) -> float:
    arguments = inputs(name, dtype)
    with poisoned_memory():
        actual, wanted = run(*arguments), by_row(*arguments)
    pairs = zip([*actual[:2], *actual[2]], [*wanted[:2], *wanted[2]], strict=True)
    errors = [float((got.double() - want).norm() / want.norm()) for got, want in pairs if want.numel()]
    assert not any(error != error for error in errors)
    return max(errors)


@pytest.mark.parametrize("name", SHAPES)
def test_the_loop_is_exact(name):
    assert worst(by_loop, name, torch.float64) < 1e-14


@interpreter
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_round_once(name):
    assert worst(by_kernels, name, torch.float32) < 1e-6
    assert worst(by_kernels, name, torch.float16) < 5e-4


@interpreter
def test_sums_of_16_bits_are_rounded_once():
    counts, x, grad, matrices, sums = inputs("odd", torch.float16)
    rounded = [total.half() for total in sums]
    *_, actual = by_kernels(counts, x, grad, matrices, rounded)
    *_, wanted = by_row(counts, x, grad, matrices, rounded)
    for got, want in zip(actual, wanted, strict=True):
        torch.testing.assert_close(got, want.half(), rtol=1e-3, atol=1e-3)


@interpreter
def test_a_row_does_not_depend_on_the_others():
    """Changing all other rows, and its position, leaves the result of row 3 unchanged."""
    counts, x, _, matrices, _ = inputs("several tiles", torch.float32)
    before = grouped_rows(counts, x).product(x, MatrixTable(matrices))
    other = torch.cat([torch.full((1, x.shape[1]), torch.nan), x[3:4], torch.randn(90, x.shape[1])])
    after = grouped_rows([92, 0, 0], other).product(other, MatrixTable(matrices))
    assert torch.equal(before[3], after[1])
    assert after[0].isnan().all()
    assert after[1:].isfinite().all()


def test_a_table_knows_when_a_matrix_has_moved():
    matrices = [torch.nn.Parameter(torch.randn(3, 5)) for _ in range(2)]
    table = MatrixTable(matrices)
    assert table.holds(matrices)
    matrices[1].data = matrices[1].data.clone()
    assert not table.holds(matrices)
    assert MatrixTable(matrices).holds(matrices)
    flat = torch.zeros(31)
    assert not MatrixTable([flat[1:16].view(3, 5)]).is_aligned
    with pytest.raises(ValueError, match="contiguous and of one shape"):
        MatrixTable([torch.zeros(3, 5), torch.zeros(5, 3)])


@interpreter
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(7, 53), (3, 1030), (0, 16)])
def test_weighted_swiglu(rows, width, weight_dtype):
    seed_all(width)
    x, weight, grad = 2 * torch.randn(rows, 2 * width), torch.rand(rows).to(weight_dtype), torch.randn(rows, width)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    gate, up = exact[0].chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up * exact[1].unsqueeze(-1)
    grads = torch.autograd.grad(wanted, exact, grad.double())
    with poisoned_memory():
        actual, gradients = weighted_swiglu(x, weight), weighted_swiglu_backward(grad, x, weight)
    assert gradients[1].dtype == weight_dtype
    tolerance = 1e-5 if weight_dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0].double(), grads[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1].double(), grads[1], rtol=tolerance, atol=10 * tolerance)


@interpreter
@pytest.mark.parametrize("sizes", ROW_ORDERS)
def test_the_kernel_orders_rows_as_its_twin(sizes):
    check_row_order(sizes, torch.int16, torch.device("cpu"))


@interpreter
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 5e-4)])
@pytest.mark.parametrize(
    ("num_rows", "num_sums", "rows_per_sum", "width"), [(50, 9, 5, 67), (8, 3, 1, 2050), (0, 3, 2, 5)]
)
def test_sums_of_rows(num_rows, num_sums, rows_per_sum, width, dtype, bound):
    """Some slots hold no row."""
    seed_all(width)
    rows = torch.randn(num_rows + 1, width).to(dtype)
    rows_of_sums = torch.randint(-1, num_rows, (num_sums, rows_per_sum))
    exact = (rows.double()[rows_of_sums] * (rows_of_sums >= 0).unsqueeze(-1)).sum(1)
    with poisoned_memory():
        sums = [add(rows[:num_rows], rows_of_sums) for add in (sum_rows, sum_rows_reference)]
    for actual in sums:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), exact, rtol=bound, atol=4 * bound)
