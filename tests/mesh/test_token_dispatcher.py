"""Tokens to experts and back: bit for bit what Megatron's dispatcher makes of them, on one rank and on several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from conftest import seed_all
from dta_kernels.experts import reference
from megatron_dta.config import ParallelConfig
from megatron_dta.model import build_model, initialize_parallel
from megatron_dta.model.experts import token_dispatcher
from megatron_dta.model.experts.token_dispatcher import TreeDispatcher, inverse_of, order_by_expert, places_of
from mesh_worker import run_on_ranks
from tree_attention_cases import poisoned_memory
from tree_engine_cases import model_config
from triton_device import interpreter

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MODEL = model_config(torch.float32, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=4, num_layers=1)


E, K, C = MODEL.num_experts, MODEL.moe_router_topk, MODEL.hidden_size


def random_tokens(
    num_tokens: int, unused: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [N, 1, C], experts [N, K] other than the first ``unused``, weights [N, K], and a gradient [N, 1, C]."""
    seed_all(seed)
    chosen = unused + torch.rand(num_tokens, E - unused).argsort(dim=1)[:, :K]
    x, grad = torch.randn(2, num_tokens, 1, C, dtype=dtype)
    return x, chosen, torch.rand(num_tokens, K, dtype=dtype), grad


def megatrons(own: TreeDispatcher) -> MoEAlltoAllTokenDispatcher:
    groups = SimpleNamespace(ep=own.ep_group, expt_tp=own.tp_group, tp_ep=own.tp_ep_group)
    return MoEAlltoAllTokenDispatcher(own.num_local_experts, own.local_expert_indices, own.config, groups)


def through(
    dispatcher: MoEAlltoAllTokenDispatcher, x: Tensor, routed: Tensor, weights: Tensor, grad: Tensor
) -> list[Tensor]:
    """Rows of the experts here, their numbers, the output, and gradients by tokens and weights.

    An expert multiplies each column by another number, and by the row's weight.
    """
    given = [tensor.clone().requires_grad_() for tensor in (x, weights)]
    rows, counts, own_weights = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(given[0], routed, given[1]))
    )
    expert = torch.arange(len(counts)).repeat_interleave(counts.cpu()) + dispatcher.local_expert_indices[0]
    factors = torch.sin(torch.arange(E * C).view(E, C) + 1.0).to(x.dtype)
    made = rows * factors[expert] * own_weights.unsqueeze(-1)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(made)))
    return [rows.detach(), counts, output.detach(), *torch.autograd.grad(output, given, grad)]


def both_ways(own: TreeDispatcher, x: Tensor, chosen: Tensor, weights: Tensor, grad: Tensor) -> list[list[Tensor]]:
    with poisoned_memory():
        found = through(own, x, chosen, weights, grad)
    routed = torch.zeros(len(x), E, dtype=torch.bool).scatter(1, chosen, True)
    *expected, by_map = through(
        megatrons(own), x, routed, torch.zeros(len(x), E, dtype=x.dtype).scatter(1, chosen, weights), grad
    )
    return [found, [*expected, by_map.gather(1, chosen)]]


def dispatch(rank: int, meshes: dict[str, tuple[ParallelConfig, list[int]]]) -> dict[str, list[list[torch.Tensor]]]:
    """What our dispatcher and Megatron's make of this rank's tokens; a mesh comes with the number of each rank's."""
    from megatron_dta.model import build_model, destroy_parallel, initialize_parallel

    found = {}
    for number, (name, (parallel, tokens)) in enumerate(meshes.items()):
        model = build_model(MODEL, initialize_parallel(3, parallel), parallel)
        for unused in (0, 3):
            given = random_tokens(tokens[rank], unused, seed=7 * number + rank)
            found[f"{name} {unused}"] = both_ways(model.decoder.layers[0].mlp.token_dispatcher, *given)
        destroy_parallel()
    return found


def dispatcher_here() -> TreeDispatcher:
    layer = build_model(MODEL, initialize_parallel(1)).decoder.layers[0].mlp
    assert type(layer.token_dispatcher) is TreeDispatcher
    return layer.token_dispatcher


def are_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    same_shapes = all(one.shape == other.shape for one, other in zip(found, expected, strict=True))
    return same_shapes and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "unused"), [(61, 0), (7, 4), (1, 5), (0, 0)])
def test_one_rank_gets_the_bits_of_megatrons(num_tokens, unused, dtype):
    found, expected = both_ways(dispatcher_here(), *random_tokens(num_tokens, unused, num_tokens, dtype))
    assert expected[0].shape == (K * num_tokens, C)
    assert are_equal(found, expected)


@pytest.mark.parametrize("wrong", ["tokens", "sums", "weights"])
def test_a_lost_place_is_noticed(wrong, monkeypatch):
    """The control of the test above."""
    places = places_of

    def spoilt(chosen: Tensor) -> token_dispatcher.Places:
        entry, token, row = places(chosen)
        entry, token, row = (each.clone() for each in (entry, token, row))
        spoilt_one = {"tokens": token, "sums": row.view(-1), "weights": entry}[wrong]
        spoilt_one[[2, 40]] = spoilt_one[[40, 2]]
        return token_dispatcher.Places(entry, token, row)

    monkeypatch.setattr(token_dispatcher, "places_of", spoilt)
    found, expected = both_ways(dispatcher_here(), *random_tokens(61, 0, 4))
    assert not are_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_rounded_once(dtype):
    """Forward of what the experts have made, backward of their gradients."""
    dispatcher = dispatcher_here()
    x, chosen, weights, _ = random_tokens(83, 0, 5, dtype)
    x.requires_grad_()
    rows, _ = dispatcher.dispatch_preprocess(x, chosen, weights)
    made, grad = torch.randn(2, *rows.shape, dtype=dtype)
    rows.backward(grad)
    half_a_unit = torch.finfo(dtype).eps / 2
    for found, summands in ((dispatcher.combine_postprocess(made), made), (x.grad, grad)):
        parts = summands[dispatcher.places.rows]
        exact, one_by_one = parts.double().sum(1), (parts[:, 0] + parts[:, 1]) + parts[:, 2]
        allowed = 1.001 * half_a_unit * exact.abs() + 1e-6
        assert found.dtype == dtype
        assert ((found[:, 0] - exact).abs() <= allowed).all()
        assert ((one_by_one - exact).abs() > allowed).any()


@pytest.mark.parametrize("seed", range(3))
def test_order_by_expert(seed):
    generator = seed_all(seed)
    counts = torch.from_numpy(generator.integers(0, 4, size=(3, 5))) * torch.from_numpy(
        generator.integers(0, 2, (3, 5))
    )
    rows = [(expert, rank, i) for rank in range(3) for expert in range(5) for i in range(counts[rank, expert])]
    order = order_by_expert(counts, len(rows))
    assert [rows[i] for i in order] == sorted(rows)
    assert torch.equal(order[inverse_of(order)], torch.arange(len(rows)))


def test_shared_experts_beside_the_exchange_are_refused():
    with pytest.raises(NotImplementedError, match="shared experts"):
        dispatcher_here().set_shared_experts(None)


@interpreter
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 5e-4)])
@pytest.mark.parametrize(("num_rows", "num_sums", "each", "width"), [(50, 9, 5, 67), (8, 3, 1, 2050), (4, 0, 2, 16)])
def test_sums_of_rows_on_the_kernel(num_rows, num_sums, each, width, dtype, bound):
    from dta_kernels.experts.row_sums import sum_rows

    seed_all(width)
    rows, places = torch.randn(num_rows, width).to(dtype), torch.randint(num_rows, (num_sums, each))
    with poisoned_memory():
        found = sum_rows(rows, places)
        twin = reference.sum_rows(rows, places)
    assert found.dtype == twin.dtype == dtype
    exact = rows.double()[places].sum(1)
    for sums in (found, twin):
        torch.testing.assert_close(sums.double(), exact, rtol=bound, atol=4 * bound)


MESHES = {
    2: {
        "ep2": (ParallelConfig(expert_model_parallel_size=2), [31, 14]),
        "ep2-idle": (ParallelConfig(expert_model_parallel_size=2), [0, 9]),
        "etp2": (ParallelConfig(**SP), [12, 12]),
    },
    4: {
        "ep4": (ParallelConfig(expert_model_parallel_size=4), [5, 17, 0, 8]),
        "ep2-etp2": (ParallelConfig(expert_model_parallel_size=2, **SP), [6, 6, 19, 19]),
        "ep2-dp4": (ParallelConfig(expert_model_parallel_size=2), [5, 0, 3, 11]),
    },
}


@pytest.mark.parametrize("world_size", MESHES)
def test_several_ranks_get_the_bits_of_megatrons(world_size, tmp_path):
    ranks = run_on_ranks(dispatch, MESHES[world_size], world_size, tmp_path / "ranks")
    for rank, found in enumerate(ranks):
        assert len(found) == 2 * len(MESHES[world_size])
        for name, (own, expected) in found.items():
            assert are_equal(own, expected), (rank, name)
    assert any(len(own[0]) != len(own[2]) * K for found in ranks for own, _ in found.values())
