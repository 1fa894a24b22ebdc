"""Experts as grouped products (``--moe-grouped-gemm``) against experts one by one and the stock model, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from checkpoint_mesh_cases import EXPERTS, assert_same_tensors, in_bf16
from checkpoint_worker import Stretch, run_stretches
from conftest import seed_all
from direct_layer_cases import check_both_ways, plain_weights
from dta_kernels.experts.reference import PlainRows
from expert_row_cases import check_expected_rows
from fused_layers_cases import fused
from lora_cases import lora_config, lora_weights
from main_grad_cases import BY_AUTOGRAD, DIRECT, Wrapped, distance
from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import build_model, build_stock_model
from megatron_dta.core.model.experts.expert_rows import expert_rows
from megatron_dta.core.model.experts.grouped_experts import GroupedExperts
from megatron_dta.core.model.experts.weights import SameOnEveryMesh
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights
from mesh_cases import FULL_RECOMPUTE, MeshSuite
from mesh_worker import run_on_ranks
from moe_cases import CUTS, MODELS, QWEN3_BALANCED, QWEN3_MOE, make_reference
from tree_attention_cases import poisoned_memory
from tree_engine_cases import (
    GRPO,
    QWEN3,
    TEMPERATURE,
    branching_sequences,
    check_siblings,
    model_config,
    siblings,
    tree_config,
)
from triton_device import interpreter


def grouped(model: ModelConfig, **changes: object) -> ModelConfig:
    return replace(model, moe_grouped_gemm=True, **changes)


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in MODELS}


def experts_of(model: torch.nn.Module) -> list[SequentialMLP]:
    return [module for module in model.modules() if isinstance(module, SequentialMLP)]


@pytest.mark.parametrize(
    ("name", "cut"),
    [("qwen3", cut) for cut in CUTS] + [(name, CUTS[4]) for name in MODELS if name != "qwen3"],
    ids=str,
)
def test_equals_stock_megatron_in_float64(references, name, cut):
    model, weights, samples, expected = references[name]
    with poisoned_memory():
        outcome, _ = run_tree(grouped(model), weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    assert outcome.gradients.keys() == expected.gradients.keys()
    assert compare_outcomes(outcome, expected).largest() < 1e-12
    one_by_one, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    assert compare_outcomes(outcome, one_by_one).largest() < 1e-12


def test_a_lost_group_is_noticed(references, monkeypatch):
    """The control of the test above: two experts change places in one of the products."""
    model, weights, samples, expected = references["qwen3"]
    product = PlainRows.input_gradient
    monkeypatch.setattr(
        PlainRows,
        "input_gradient",
        lambda self, grad, each, indexed=False: product(self, grad, [each[1], each[0], *each[2:]], indexed),
    )
    outcome, _ = run_tree(grouped(model), weights, samples, GRPO, tree_config("dta", 9), TEMPERATURE)
    assert compare_outcomes(outcome, expected).gradient > 1e-3


def test_only_the_forward_is_another(references):
    """Names, shapes, first weights and conversions are those of experts one by one; the reference stays Megatron's."""
    model = references["deepseek"][0]
    built = [build_model(each, initialize_parallel(5)) for each in (model, grouped(model))]
    assert {type(each) for each in experts_of(built[0])} == {SameOnEveryMesh}
    assert {type(each) for each in experts_of(built[1])} == {GroupedExperts}
    assert len(experts_of(built[1])) == 2
    for (name, one), (other_name, other) in zip(*(each.named_parameters() for each in built), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
        assert getattr(one, "allreduce", True) == getattr(other, "allreduce", True)
    stock = experts_of(build_stock_model(grouped(model), torch.device("cpu")))
    assert {type(each) for each in stock} == {SameOnEveryMesh}


def test_hugging_face_weights_are_the_same(references):
    exported = []
    for config in (references["qwen3"][0], grouped(references["qwen3"][0])):
        built = build_model(config, initialize_parallel(5))
        exported.append(dict(HfWeights([built], "Qwen3MoeForCausalLM", ModelShape.of(config)).iterate()))
    assert exported[0].keys() == exported[1].keys()
    assert any(".experts.5." in name for name in exported[0])
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


class Alone:
    """Experts of one layer, and what they make of rows."""

    def __init__(self, counts: list[int], gated: bool = True) -> None:
        model = model_config(num_experts=len(counts), moe_ffn_hidden_size=11, swiglu=gated)
        built = [build_model(each, initialize_parallel(2)) for each in (model, grouped(model))]
        self.one_by_one, self.grouped = (experts_of(each)[0] for each in built)
        assert isinstance(self.grouped, GroupedExperts)
        width, num_rows = model.hidden_size, sum(counts)
        self.counts = torch.tensor(counts)
        self.rows, self.grad = torch.randn(2, num_rows, width, dtype=torch.float64)
        self.weights = torch.rand(num_rows, dtype=torch.float64)

    def run(self, experts: SequentialMLP) -> list[torch.Tensor]:
        """Output, gradients of rows and weights, gradients of all parameters."""
        inputs = self.rows.clone().requires_grad_(), self.weights.clone().requires_grad_()
        with poisoned_memory():
            if isinstance(experts, GroupedExperts):
                expert = torch.arange(len(self.counts)).repeat_interleave(self.counts).unsqueeze(1)
                rows = expert_rows(expert, 0, len(self.counts), True)
                output = experts(inputs[0], inputs[1].unsqueeze(1), rows)
            else:
                output, bias = experts(inputs[0], self.counts, inputs[1])
                assert bias is None
            return [output.detach(), *torch.autograd.grad(output, (*inputs, *experts.parameters()), self.grad)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("counts", [[3, 0, 8, 1], [0, 0, 5], [0, 0], [7, 2, 2, 9, 0, 1, 4]], ids=str)
def test_any_number_of_rows(counts, gated):
    seed_all(len(counts))
    alone = Alone(counts, gated)
    found, expected = alone.run(alone.grouped), alone.run(alone.one_by_one)
    assert len(found) == 3 + 2 * len(counts)
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("cut", "recompute"), [(("dense", 9, None), False), (("dta", 7, 12), False), (("dta", 9, 0), True)], ids=str
)
def test_gradients_go_straight_into_buffers(references, cut, recompute):
    model, weights, samples, expected = references["qwen2"]
    model, tree = grouped(model, **(FULL_RECOMPUTE if recompute else {})), tree_config(*cut)
    for parallel in (DIRECT, BY_AUTOGRAD, replace(DIRECT, overlap_grad_reduce=True, ddp_bucket_size=900)):
        wrapped = Wrapped(model, weights, parallel)
        wrapped.gradients(samples, tree)
        wrapped.optimizer.reduce_gradients()
        found = wrapped.gradients(samples, tree)
        wrapped.optimizer.reduce_gradients()
        assert distance(found, expected.gradients) < 1e-12
        routed = [p for name, p in wrapped.model.named_parameters() if ".local_experts." in name]
        # Autograd has heard of them only where their hooks had something to do.
        assert {p.grad_added_to_main_grad for p in routed} == {parallel.overlap_grad_reduce}


def test_frozen_experts_stay_out(references):
    model, weights, samples, expected = references["qwen3"]
    for frozen in ("linear_fc1", "local_experts.1.", "mlp.experts"):
        wanted = {name: gradient for name, gradient in expected.gradients.items() if frozen not in name}
        assert len(wanted) < len(expected.gradients)
        found = Wrapped(grouped(model), weights, DIRECT, frozen).gradients(samples, tree_config("dta", 7, 12))
        assert distance(found, wanted) < 1e-12


def test_beside_adapters_of_the_attention():
    settings = {"num_experts": 3, "moe_ffn_hidden_size": 16, "lora_target_modules": ["linear_proj", "linear_qkv"]}
    samples = random_training_samples([np.arange(9) % 7, np.arange(5) % 3], seed=3)
    model = lora_config(**settings)
    weights = lora_weights(model, seed=9)
    found, expected = (
        run_tree(each, weights, samples, GRPO, tree_config("dta", 4), TEMPERATURE)[0]
        for each in (grouped(model), model)
    )
    assert found.gradients.keys() == expected.gradients.keys()
    assert compare_outcomes(found, expected).largest() < 1e-12


@interpreter
def test_adapters_of_experts_on_the_kernels_in_float32():
    settings = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    samples = random_training_samples(branching_sequences(seed_all(4), count=6, longest=16), seed=4)
    plain = lora_config(torch.float32, **QWEN3, **settings)
    model, tree = grouped(plain, fused_layer_impl="triton"), tree_config("dta", 16, 30)
    weights = {key: weight.float() for key, weight in lora_weights(plain, seed=9).items()}
    expected, _ = run_tree(plain, weights, samples, GRPO, tree, TEMPERATURE)
    with poisoned_memory():
        found, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
    assert any("linear_fc1_adapter.lora_B" in name for name in found.gradients)
    assert compare_outcomes(found, expected).largest() < 1e-5


@pytest.mark.parametrize("model", [EXPERTS, in_bf16(EXPERTS)], ids=["fp32", "bf16"])
def test_checkpoints_go_on_either_way(tmp_path, model):
    one = ParallelConfig(use_distributed_optimizer=True)
    legs = []
    for name, first, then in (
        ("alone", model, model),
        ("in", model, grouped(model)),
        ("out", grouped(model), model),
    ):
        legs += [
            Stretch(one, 2, tmp_path / f"{name}-2", seed=17, model=first),
            Stretch(one, 2, tmp_path / f"{name}-4", tmp_path / f"{name}-2", seed=18, model=then),
        ]
    run_on_ranks(run_stretches, legs, 1, tmp_path / "ranks")
    for name in ("in", "out"):
        for step in (2, 4):
            assert_same_tensors(tmp_path / f"{name}-{step}", tmp_path / f"alone-{step}")


@pytest.mark.parametrize("segment_tokens", [4, 16])
def test_a_sibling_changes_no_bit_of_another_sequence(references, segment_tokens):
    # All experts take all tokens: the sizes of matrix products stay, and with them the rounding of other rows.
    model, weights = grouped(references["gpt"][0], params_dtype=torch.float32), references["gpt"][1]
    weights = {name: weight.float() for name, weight in weights.items()}
    tree = tree_config("dta", segment_tokens)
    check_siblings(*(run_tree(model, weights, siblings(changed), GRPO, tree)[0].logprobs for changed in (False, True)))


@interpreter
@pytest.mark.parametrize(("name", "buffers"), [("qwen3", True), ("qwen2", False), ("gpt", True)])
def test_on_the_kernels_in_float32(references, name, buffers):
    from megatron_dta.core.model.experts.fused_experts import FusedGroupedExperts

    model, weights = references[name][:2]
    sequences = branching_sequences(seed_all(4), count=6, longest=16)
    samples, tree = random_training_samples(sequences, seed=4), tree_config("dta", 16, 30)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    model = grouped(model, params_dtype=torch.float32, fused_layer_impl="triton")
    weights = {key: weight.float() for key, weight in weights.items()}
    with poisoned_memory():
        if buffers:
            wrapped = Wrapped(model, weights, DIRECT)
            assert {type(each) for each in experts_of(wrapped.model)} == {FusedGroupedExperts}
            assert distance(wrapped.gradients(samples, tree), expected.gradients) < 5e-5
        else:
            outcome, _ = run_tree(model, weights, samples, GRPO, tree, TEMPERATURE)
            assert compare_outcomes(outcome, expected).largest() < 1e-5


@interpreter
def test_rows_beyond_the_expected_number_are_computed_again():
    check_expected_rows(torch.float32, torch.device("cpu"))


@interpreter
@pytest.mark.parametrize(
    ("mesh", "name"), [("ep2", "qwen3"), ("ep2", "balanced"), ("ep2-idle", "qwen3"), ("cp2-ep2", "balanced")]
)
def test_layers_as_one_function_exchange_tokens(tmp_path, mesh, name):
    settings = {"qwen3": QWEN3_MOE, "balanced": QWEN3_BALANCED}
    models = {key: grouped(fused(vocab_size=8, **each)) for key, each in settings.items()}
    samples = random_training_samples(branching_sequences(seed_all(61), count=6, longest=9), seed=61)
    ep2 = ParallelConfig(expert_model_parallel_size=2)
    meshes = {"ep2": (2, ep2, [4, 0]), "ep2-idle": (2, ep2, [0, 0])}
    meshes["cp2-ep2"] = (2, replace(ep2, context_parallel_size=2), [0])
    suite = MeshSuite(models, meshes, {"": samples}, {"": ("dta", 7, 8)}, plain_weights)
    check_both_ways(suite, mesh, name, tmp_path)
