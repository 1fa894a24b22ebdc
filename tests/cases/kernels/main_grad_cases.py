"""Models in Megatron's gradient buffers, and checks of weight gradients that are accumulated in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conftest import seed_all
from megatron_dta.core.config import ModelConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer
from tree_engine_cases import GRPO, QWEN2, QWEN3, TEMPERATURE, model_config

DIRECT, BY_AUTOGRAD = ParallelConfig(), ParallelConfig(no_gradient_accumulation_fusion=True)
PADDED = {"make_vocab_size_divisible_by": 16}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 24}


# Tied with padding rows, untied with biases, tied with biases everywhere, experts.
MODELS = {
    "tied": QWEN3 | PADDED,
    "untied": QWEN2 | PADDED,
    "biases": {"disable_bias_linear": False, "normalization": "LayerNorm", "swiglu": False},
    "experts": QWEN3 | EXPERTS,
}


class Wrapped:
    """A model in Megatron's gradient buffers and its engine."""

    def __init__(self, model: ModelConfig, weights: dict, parallel: ParallelConfig, frozen: str = "nothing") -> None:
        self.model = build_model(model, initialize_parallel(0, parallel), parallel)
        self.model.load_state_dict(weights, strict=False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        self.optimizer = TrainingOptimizer(self.model, OptimizationConfig(train_iters=1, lr=1e-3), parallel)
        self.engine = TreeEngine(self.optimizer.chunks, TEMPERATURE, 5)

    def gradients(
        self, samples: list, tree: TreeConfig, steps: int = 1, objective: Objective = GRPO
    ) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad()
        batch = prepare_batch(samples, tree)
        for _ in range(steps):
            self.engine.forward_backward(batch, objective)
        assert all(p.grad is None for p in self.model.parameters())
        return {name: p.main_grad.clone() for name, p in self.model.named_parameters() if p.requires_grad}


def distance(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest error of a parameter's gradient, relative to its norm."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name].double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
        for name, wanted in expected.items()
    )


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_weights_lose_nothing_between_segments():
    """Linear layer and embedding over many passes: the buffer against float64 sums of the same products."""
    seed_all(3)
    device = initialize_parallel(0)
    model = model_config(torch.bfloat16, **QWEN2)
    errors = {}
    for parallel in (DIRECT, BY_AUTOGRAD):
        torch.manual_seed(5)
        built = build_model(model, device, parallel)
        TrainingOptimizer(built, OptimizationConfig(train_iters=1, lr=1e-3), parallel).zero_grad()
        layer, embedding = built.decoder.layers[0].mlp.linear_fc1, built.embedding.word_embeddings
        exact = [torch.zeros_like(m.weight, dtype=torch.float64) for m in (layer, embedding)]
        for _ in range(40):
            random = torch.randn(11, 1, 24), torch.randn(11, 1, layer.weight.shape[0]), torch.randn(1, 11, 24)
            rows, *grads = (x.to(device, torch.bfloat16) for x in random)
            tokens = torch.randint(0, 7, (1, 11)).to(device)
            torch.autograd.backward([layer(rows.requires_grad_())[0], embedding(tokens)], grads)
            exact[0] += grads[0].double().squeeze(1).t() @ rows.detach().double().squeeze(1)
            exact[1].index_add_(0, tokens[0], grads[1][0].double())
        pairs = zip((layer, embedding), exact, strict=True)
        errors[parallel is DIRECT] = [float((m.weight.main_grad - e).norm() / e.norm()) for m, e in pairs]
    print(f"errors of sums of bfloat16 products: straight {errors[True]}, by autograd {errors[False]}")
    assert max(errors[True]) < 1e-6
    assert min(errors[False]) > 5e-4
