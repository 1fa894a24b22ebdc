"""Experts as grouped products: gradients in buffers, adapters, checkpoints, kernels and exchanged tokens."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from conftest import seed_all
from direct_layer_cases import check_both_ways, plain_weights
from dta_kernels.experts.reference import PlainRows
from expert_row_cases import check_expected_rows
from fused_layers_cases import fused
from lora_cases import lora_config, lora_weights
from main_grad_cases import BY_AUTOGRAD, DIRECT, Wrapped, distance
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from mesh_cases import FULL_RECOMPUTE, MeshSuite
from moe_cases import QWEN3_BALANCED, QWEN3_MOE, make_reference
from tree_attention_cases import poisoned_memory
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, tree_config
from triton_device import interpreter


def grouped(model: ModelConfig, **changes: object) -> ModelConfig:
    return replace(model, moe_grouped_gemm=True, **changes)


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in ("qwen3", "qwen2")}


def experts_of(model: torch.nn.Module) -> list[SequentialMLP]:
    return [module for module in model.modules() if isinstance(module, SequentialMLP)]


def test_a_lost_group_is_noticed(references, monkeypatch):
    """The control of the comparison with stock Megatron: two experts change places in one of the products."""
    model, weights, samples, expected = references["qwen3"]
    product = PlainRows.input_gradient
    monkeypatch.setattr(
        PlainRows,
        "input_gradient",
        lambda self, grad, matrices, indexed=False: product(
            self, grad, [matrices[1], matrices[0], *matrices[2:]], indexed
        ),
    )
    outcome, _ = run_tree(grouped(model), weights, samples, GRPO, tree_config("dta", 9), TEMPERATURE)
    assert compare_outcomes(outcome, expected).gradient > 1e-3


@pytest.mark.parametrize(("cut", "recompute"), [(("dta", 7, 12), False), (("dta", 9, 0), True)], ids=str)
def test_gradients_go_straight_into_buffers(references, cut, recompute):
    model, weights, samples, expected = references["qwen2"]
    model, tree = grouped(model, **(FULL_RECOMPUTE if recompute else {})), tree_config(*cut)
    for parallel in (DIRECT, BY_AUTOGRAD, replace(DIRECT, overlap_grad_reduce=True, ddp_bucket_size=900)):
        wrapped = Wrapped(model, weights, parallel)
        if parallel.overlap_grad_reduce:
            # From the second step on Megatron overlaps.
            wrapped.gradients(samples, tree)
            wrapped.optimizer.reduce_gradients()
        gradients = wrapped.gradients(samples, tree)
        wrapped.optimizer.reduce_gradients()
        assert distance(gradients, expected.gradients) < 1e-12
        routed = [p for name, p in wrapped.model.named_parameters() if ".local_experts." in name]
        # Autograd has heard of them only where their hooks had something to do.
        assert {p.grad_added_to_main_grad for p in routed} == {parallel.overlap_grad_reduce}


@interpreter
def test_adapters_of_experts_on_the_kernels_in_float32():
    settings = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    samples = random_training_samples(branching_sequences(seed_all(4), count=6, longest=8), seed=4)
    plain = lora_config(torch.float32, **QWEN3, **settings)
    model, tree = grouped(plain, fused_layer_impl="triton"), tree_config("dta", 9, 15)
    weights = {key: weight.float() for key, weight in lora_weights(plain, seed=9).items()}
    expected, _ = run_tree(plain, weights, samples, GRPO, tree, TEMPERATURE)
    with poisoned_memory():
        actual, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    assert any("linear_fc1_adapter.lora_B" in name for name in actual.gradients)
    assert compare_outcomes(actual, expected).largest() < 1e-5


@interpreter
@pytest.mark.parametrize(("name", "buffers"), [("qwen3", True), ("qwen2", False)])
def test_on_the_kernels_in_float32(references, name, buffers):
    from megatron_dta.core.model.experts.fused_experts import FusedGroupedExperts

    model, weights = references[name][:2]
    sequences = branching_sequences(seed_all(4), count=6, longest=8)
    samples, tree = random_training_samples(sequences, seed=4), tree_config("dta", 9, 15)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    model = grouped(model, params_dtype=torch.float32, fused_layer_impl="triton")
    weights = {key: weight.float() for key, weight in weights.items()}
    with poisoned_memory():
        if buffers:
            wrapped = Wrapped(model, weights, DIRECT)
            assert {type(module) for module in experts_of(wrapped.model)} == {FusedGroupedExperts}
            assert distance(wrapped.gradients(samples, tree), expected.gradients) < 5e-5
        else:
            outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
            assert compare_outcomes(outcome, expected).largest() < 1e-5


@interpreter
def test_rows_beyond_the_expected_number_are_computed_again():
    check_expected_rows(torch.float32, torch.device("cpu"))


@interpreter
@pytest.mark.parametrize(("mesh", "name"), [("ep2-idle", "qwen3"), ("cp2-ep2", "balanced")])
def test_layers_as_one_function_exchange_tokens(tmp_path, mesh, name):
    settings = {"qwen3": QWEN3_MOE | {"num_layers": 1}, "balanced": QWEN3_BALANCED | {"num_layers": 1}}
    models = {key: grouped(fused(vocab_size=8, **options)) for key, options in settings.items()}
    samples = random_training_samples(branching_sequences(seed_all(61), count=6, longest=6), seed=61)
    ep2 = ParallelConfig(expert_model_parallel_size=2)
    meshes = {"ep2-idle": (2, ep2, [0, 0])}
    meshes["cp2-ep2"] = (2, replace(ep2, context_parallel_size=2), [0])
    suite = MeshSuite(models, meshes, {"": samples}, {"": ("dta", 7, 8)}, plain_weights)
    check_both_ways(suite, mesh, name, tmp_path)
