"""Tokens to experts and back on one rank and several: against sums over the experts of each token, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from conftest import seed_all
from dta_kernels.experts import reference
from expert_row_cases import ROW_ORDERS, check_row_order
from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.experts import expert_rows as rows_module
from megatron_dta.core.model.experts.routed_layer import TreeMoELayer
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.expert_parallel.row_exchange import RowExchange
from mesh_cases import sizes
from mesh_worker import run_on_ranks
from tree_attention_cases import poisoned_memory
from tree_engine_cases import model_config
from triton_device import interpreter

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MODEL = model_config(torch.float64, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=4, num_layers=1)
E, K, C = MODEL.num_experts, MODEL.moe_router_topk, MODEL.hidden_size

Given = tuple[Tensor, Tensor, Tensor, Tensor]


def random_tokens(num_tokens: int, kind: str, seed: int, dtype: torch.dtype = torch.float64) -> Given:
    """Tokens [N, 1, C], experts [N, K], weights [N, K], and a gradient [N, 1, C].

    All tokens of "skewed" choose expert 5 and others beside it on the last rank; "few" leaves out experts 0 to 2.
    """
    seed_all(seed)
    first = {"any": 0, "few": 3, "skewed": 5}[kind]
    chosen = first + torch.rand(num_tokens, E - first).argsort(dim=1)[:, :K]
    x, grad = torch.randn(2, num_tokens, 1, C, dtype=dtype)
    return x, chosen, torch.rand(num_tokens, K, dtype=dtype), grad


class Scaling(torch.nn.Module):
    """Experts that multiply each column by another number, and by the row's weight; a tensor rank has a part of it."""

    def __init__(self, first: int, share: float) -> None:
        super().__init__()
        self.first, self.share = first, share

    def forward(self, rows: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        expert = torch.arange(len(counts)).repeat_interleave(counts) + self.first
        return rows * factors(rows.dtype)[expert] * (weights * self.share).unsqueeze(-1), None


def factors(dtype: torch.dtype) -> Tensor:
    return torch.sin(torch.arange(E * C).view(E, C) + 1.0).to(dtype)


def plain(case: Given) -> list[Tensor]:
    """Output, and gradients of tokens and weights, without any exchange."""
    x, chosen, weights, grad = case
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    output = (inputs[0] * factors(x.dtype)[chosen] * inputs[1].unsqueeze(-1)).sum(1, keepdim=True)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def through(layer: TreeMoELayer, case: Given, rows_per_rank: int) -> list[Tensor]:
    """The same through the layer."""
    x, chosen, weights, grad = case
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    layer.router.forward = lambda _: (inputs[1], chosen)
    layer.experts = Scaling(layer.local_expert_indices[0], 1 / layer.token_dispatcher.tp_size)
    layer.context = SimpleNamespace(rows_per_rank=rows_per_rank, turn=None)
    with poisoned_memory():
        output, _ = layer(inputs[0])
        return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def exchange(rank: int, meshes: dict[str, tuple[ParallelConfig, list[int]]]) -> dict[str, list[list[Tensor]]]:
    """What the layer makes of this rank's tokens, twice, and what it should; a mesh comes with each rank's number."""
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import destroy_parallel, initialize_parallel

    results = {}
    for number, (name, (parallel, tokens)) in enumerate(meshes.items()):
        layer = build_model(MODEL, initialize_parallel(3, parallel), parallel).decoder.layers[0].mlp
        for kind in ("any", "few", "skewed"):
            case = random_tokens(tokens[rank], kind, seed=7 * number + rank)
            most = max(tokens) + (kind == "few")
            results[f"{name} {kind}"] = [through(layer, case, most), through(layer, case, most), plain(case)]
        with pytest.raises(ValueError, match=r"\d+ rows in a pass planned for at most \d+"):
            RowExchange(layer.token_dispatcher.tp_ep_group, max(tokens) + 1, max(tokens), reference.sum_rows)
        destroy_parallel()
    return results


MESHES = {
    2: {
        "ep2": (sizes(ep=2), [31, 14]),
        "ep2-idle": (sizes(ep=2), [1, 9]),
        "etp2": (sizes(**SP), [12, 12]),
    },
    4: {
        "ep4": (sizes(ep=4), [5, 17, 1, 8]),
        "ep2-etp2": (sizes(ep=2, **SP), [6, 6, 19, 19]),
        "ep2-dp4": (sizes(ep=2), [5, 1, 3, 11]),
    },
}


@pytest.mark.parametrize("world_size", MESHES)
def test_several_ranks_sum_over_all_experts(world_size, tmp_path):
    ranks = run_on_ranks(exchange, MESHES[world_size], world_size, tmp_path / "ranks")
    for rank, results in enumerate(ranks):
        assert len(results) == 3 * len(MESHES[world_size])
        for name, (first, again, expected) in results.items():
            for tensor, other, wanted in zip(first, again, expected, strict=True):
                assert torch.equal(tensor, other), (rank, name)
                torch.testing.assert_close(tensor, wanted, rtol=1e-14, atol=1e-14, msg=f"{rank} {name}")


def layer_here() -> TreeMoELayer:
    layer = build_model(MODEL, initialize_parallel(1)).decoder.layers[0].mlp
    assert type(layer) is TreeMoELayer
    return layer


@pytest.mark.parametrize(("num_tokens", "kind"), [(61, "any"), (7, "few"), (1, "skewed")])
def test_one_rank_gets_the_bits_of_megatrons_dispatcher(num_tokens, kind):
    dtype = torch.float32
    x, chosen, weights, grad = case = random_tokens(num_tokens, kind, num_tokens, dtype)
    layer = layer_here()
    actual = through(layer, case, num_tokens)
    inputs = x.clone().requires_grad_(), torch.zeros(num_tokens, E, dtype=dtype).scatter(1, chosen, weights)
    inputs[1].requires_grad_()
    routed, dispatcher = torch.zeros(num_tokens, E, dtype=torch.bool).scatter(1, chosen, True), layer.token_dispatcher
    rows, counts, row_weights = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(inputs[0], routed, inputs[1]))
    )
    scaled, _ = Scaling(0, 1)(rows, counts, row_weights)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(scaled)))
    *expected, by_map = output.detach(), *torch.autograd.grad(output, inputs, grad)
    for tensor, other in zip(actual, [*expected, by_map.gather(1, chosen)], strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("wrong", ["tokens", "token_rows"])
def test_a_lost_place_is_noticed(wrong, monkeypatch):
    """The control of the tests above."""
    original = rows_module.expert_rows

    def spoilt(*arguments: object) -> rows_module.ExpertRows:
        rows = original(*arguments)
        spoilt_one = getattr(rows, wrong).clone()
        spoilt_one.view(-1)[[2, 40]] = spoilt_one.view(-1)[[40, 2]]
        return rows._replace(**{wrong: spoilt_one})

    monkeypatch.setattr("megatron_dta.core.model.experts.routed_layer.expert_rows", spoilt)
    case = random_tokens(61, "any", 4)
    pairs = zip(through(layer_here(), case, 61), plain(case), strict=True)
    assert not all(torch.allclose(actual, wanted) for actual, wanted in pairs)


@interpreter
@pytest.mark.parametrize("sizes", ROW_ORDERS)
def test_the_kernel_orders_rows_as_its_twin(sizes):
    check_row_order(sizes, torch.int16, torch.device("cpu"))


@interpreter
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 5e-4)])
@pytest.mark.parametrize(
    ("num_rows", "num_sums", "rows_per_sum", "width"), [(50, 9, 5, 67), (8, 3, 1, 2050), (0, 3, 2, 5)]
)
def test_sums_of_rows_on_the_kernel(num_rows, num_sums, rows_per_sum, width, dtype, bound):
    """Some slots hold no row."""
    from dta_kernels.experts.row_sums import sum_rows

    seed_all(width)
    rows = torch.randn(num_rows + 1, width).to(dtype)
    rows_of_sums = torch.randint(-1, num_rows, (num_sums, rows_per_sum))
    exact = (rows.double()[rows_of_sums] * (rows_of_sums >= 0).unsqueeze(-1)).sum(1)
    rows = rows[:num_rows]
    with poisoned_memory():
        actual = sum_rows(rows, rows_of_sums)
        twin = reference.sum_rows(rows, rows_of_sums)
    assert actual.dtype == twin.dtype == dtype
    for sums in (actual, twin):
        torch.testing.assert_close(sums.double(), exact, rtol=bound, atol=4 * bound)
