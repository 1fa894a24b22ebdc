"""Layers as one autograd function against the same layers made of modules, on the ranks of a mesh."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from megatron_dta.core.config import ModelConfig
from megatron_dta.extras.parity import compare_outcomes, run_stock
from megatron_dta.extras.parity.outcome import Outcome
from mesh_cases import MeshSuite, joined
from mesh_worker import MeshCase, RankResult, run_cases, run_on_ranks
from moe_cases import moe_weights
from tree_engine_cases import TEMPERATURE


def plain_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Weights of a model on the kernels, made without them."""
    return moe_weights(replace(model, fused_layer_impl="reference"), seed)


def check_both_ways(suite: MeshSuite, mesh: str, model: str, folder: Path, forest: str = "") -> list[RankResult]:
    """Float32 on the kernels: bit for bit the modules of the same ranks, and within rounding of one process.

    Returns:
        The ranks' results of the layers as one function.
    """
    case = suite.case(mesh, model, "", forest)
    case = replace(case, tree=replace(case.tree, tree_attention_impl="triton"))
    ranks = run_on_ranks(_with_kernels, case, suite.meshes[mesh][0], folder)
    modules, direct = ([rank[way][1] for rank in ranks] for way in ("modules", "direct"))
    # A rank without segments has none to pass through its layers.
    is_idle = [not suite.partition(mesh, forest)[result.data_rank] for result in direct]
    assert [rank["direct"][0] == 0 for rank in ranks] == is_idle
    assert not any(rank["modules"][0] for rank in ranks)
    outcome = joined(direct, suite.models[model], suite.partition(mesh, forest))
    assert compare_outcomes(outcome, _in_float64(suite, model, forest)).largest() < 1e-4
    for stock, other in zip(modules, direct, strict=True):
        for name, gradient in stock.gradients.items():
            if "norm" not in name and "router" not in name:
                assert torch.equal(other.gradients[name], gradient), name
    return direct


def _with_kernels(rank: int, case: MeshCase) -> dict[str, tuple[int, RankResult]]:
    """Layers as modules and as one function: how many passes took the latter, and what came out."""
    from megatron_dta.core.model.layers.fused_autograd_layer import FusedAutogradLayer

    results = {}
    for way in ("modules", "direct"):
        count, takes = [0], FusedAutogradLayer.takes

        def counted(layer, *arguments, way=way, count=count, takes=takes):
            is_taken = way == "direct" and takes(layer, *arguments)
            count[0] += is_taken
            return is_taken

        with mock.patch.object(FusedAutogradLayer, "takes", counted):
            result = run_cases(rank, {"": replace(case, forward_only=way == "direct")})[""]
        results[way] = count[0], result
    return results


def _in_float64(suite: MeshSuite, name: str, forest: str) -> Outcome:
    model = replace(suite.models[name], fused_layer_impl="reference", params_dtype=torch.float64)
    weights = {key: weight.double() for key, weight in suite.weights[name].items()}
    return run_stock(model, weights, suite.samples[forest], suite.objective, TEMPERATURE)
