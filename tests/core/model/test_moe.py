"""Mixture of experts on one process: the tree against the stock model; routers, their loads and losses."""

from dataclasses import replace

import pytest
import torch

from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model, build_stock_model
from megatron_dta.core.model.experts import router
from megatron_dta.extras.parity import compare_outcomes, run_stock, run_tree
from megatron_dta.extras.parity.plain_router import PlainRouter
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer
from moe_cases import BALANCED_MODELS, CUTS, make_reference, run_plain_router
from tree_attention_cases import poisoned_memory
from tree_engine_cases import GRPO, TEMPERATURE, check_trained_siblings, tree_config


@pytest.fixture(scope="module")
def references() -> dict:
    return {name: make_reference(name) for name in BALANCED_MODELS}


@pytest.mark.parametrize(
    ("name", "cut", "is_grouped"),
    [("deepseek-balanced", cut, True) for cut in CUTS]
    + [(name, CUTS[4], True) for name in BALANCED_MODELS if name != "deepseek-balanced"]
    + [(name, CUTS[5], False) for name in ("deepseek-balanced", "gpt")],
    ids=str,
)
def test_equals_stock_megatron_in_float64(references, name, cut, is_grouped):
    """Experts as grouped products, or one by one."""
    model, weights, samples, expected = references[name]
    model = replace(model, moe_grouped_gemm=is_grouped)
    with poisoned_memory():
        outcome, _ = run_tree(model, weights, samples, GRPO, tree_config(*cut), TEMPERATURE)
    assert {name for name in weights if not name.endswith("expert_bias")} == outcome.gradients.keys()
    assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sibling_changes_no_bit_of_another_sequence(references, dtype):
    # All experts take all tokens: the sizes of matrix products stay, and with them the rounding of other rows.
    model = replace(references["gpt"][0], params_dtype=dtype)
    weights = {name: weight.to(dtype) for name, weight in references["gpt"][1].items()}
    check_trained_siblings(model, weights, (4, 16))


@pytest.mark.parametrize(("name", "seed"), [("mixtral", 1), ("qwen2", 2)])
def test_equals_megatrons_own_router_in_float32(references, name, seed):
    """Megatron's router as it is, balancing loss and z-loss included, with one sequence a micro-batch."""
    balance = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
    model = replace(references[name][0], params_dtype=torch.float32, **balance)
    weights = {key: weight.float() for key, weight in references[name][1].items()}
    samples = references[name][2]
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 7), TEMPERATURE)
    stock = build_stock_model(model, torch.device("cpu"))
    stock.load_state_dict(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dta.extras.parity.references.build_stock_model", lambda *_: stock)
        if not hasattr(router.moe_utils, "te_general_gemm"):  # then Megatron's own fails
            patch.setattr(router.TopKRouter, "gating", router.TreeRouter.gating)
        with megatrons_losses(samples):
            expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 2e-5, errors


def megatrons_losses(samples: list) -> pytest.MonkeyPatch:
    """Scale Megatron's auxiliary losses, which it multiplies by the tokens of a micro-batch, to their mean."""
    from megatron.core.transformer.moe import router as stock_router

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output, loss):
            ctx.rows = output.shape[0]
            return output.view_as(output)

        @staticmethod
        def backward(ctx, grad):
            return grad, grad.new_tensor(1 / ctx.rows / len(samples))

    patch = pytest.MonkeyPatch()
    patch.setattr(stock_router, "MoEAuxLossAutoScaler", Scaled)

    class Context:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            patch.undo()

    return Context()


@pytest.mark.parametrize("cut", [("dense", 9), ("packed", 45), ("dta", 9, 0)], ids=str)
def test_loads_count_every_sequence_and_auxiliary_losses_are_reported(references, cut):
    model, weights, samples, _ = references["deepseek-balanced"]
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    engine = TreeEngine(tree_model, TEMPERATURE)
    batch = prepare_batch(samples, tree_config(*cut))
    engine.compute_logprobs(batch)
    result = engine.forward_backward(batch, GRPO)
    stock = run_plain_router(model, weights, samples)
    plain = [module for module in stock.modules() if isinstance(module, PlainRouter)]
    ours = [module for module in tree_model.modules() if isinstance(module, router.TreeRouter)]
    assert len(plain) == len(ours) == 2
    for our_router, expected in zip(ours, plain, strict=True):
        assert our_router.local_tokens_per_expert.tolist() == expected.loads.tolist()
    total = float(sum(sum(module.losses) for module in plain).detach()) / len(samples)
    reported = result.metrics["seq_load_balancing_loss"] * 0.3 + result.metrics["z_loss"] * 0.02
    assert float(reported) * len(plain) == pytest.approx(total, rel=1e-12)


def test_a_skipped_step_keeps_the_biases_and_forgets_the_loads(references):
    model, weights, samples, _ = references["deepseek-balanced"]
    batches = [prepare_batch(part, tree_config("dta", 9)) for part in (samples[:5], samples[5:])]

    def after(*steps: tuple) -> tuple[dict[str, torch.Tensor], list[bool]]:
        tree_model = build_model(model, torch.device("cpu"))
        tree_model.load_state_dict(weights)
        optimizer = TrainingOptimizer(tree_model, OptimizationConfig(lr=1e-3, clip_grad=0.0), ParallelConfig())
        engine, applied = TreeEngine(optimizer.chunks, TEMPERATURE), []
        for batch, *arguments in steps:
            optimizer.zero_grad()
            engine.forward_backward(batch, GRPO)
            applied.append(optimizer.step(*arguments).applied)
        return {key: b.clone() for key, b in tree_model.named_buffers() if key.endswith("expert_bias")}, applied

    skipped, applied = after((batches[0], float("nan")))
    assert applied == [False]
    assert len(skipped) == 2
    assert all(torch.equal(bias, weights[key]) for key, bias in skipped.items())
    biases, applied = after((batches[0], float("nan")), (batches[1], 1.0))
    assert applied == [False, True]
    expected, _ = after((batches[1], 1.0))
    assert not any(torch.equal(bias, weights[key]) for key, bias in expected.items())
    assert all(torch.equal(bias, expected[key]) for key, bias in biases.items())


def test_a_recomputation_routes_as_the_first_forward(references, monkeypatch):
    """A router that would choose anew chooses at random here: every second choice would be seen."""
    model, weights, samples, _ = references["qwen3-balanced"]
    chosen = {}

    def once_a_pass(logits, bias, config):
        generator = torch.Generator().manual_seed(len(chosen))
        chosen[len(chosen)] = len(logits)
        return torch.rand(logits.shape, generator=generator).topk(config.moe_router_topk, dim=1)[1]

    monkeypatch.setattr(router, "choose_experts", once_a_pass)
    outcomes = []
    for activation_tokens in (None, 0):
        tree_model = build_model(model, torch.device("cpu"))
        tree_model.load_state_dict(weights)
        chosen.clear()
        batch = prepare_batch(samples, tree_config("dta", 9, activation_tokens))
        result = TreeEngine(tree_model, TEMPERATURE).forward_backward(batch, GRPO)
        assert len(chosen) == 2 * result.segments
        outcomes.append((float(result.loss), {name: p.grad for name, p in tree_model.named_parameters()}))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(outcomes[0][1][name], gradient) for name, gradient in outcomes[1][1].items())
