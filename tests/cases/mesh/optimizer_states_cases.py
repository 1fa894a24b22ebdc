"""A small bfloat16 model with a distributed optimizer, whose loss depends on the weights alone."""

import torch

from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.config import OptimizationConfig, TrainConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    vocab_size=37,
    swiglu=True,
    disable_bias_linear=True,
    bf16=True,
    params_dtype=torch.bfloat16,
)
RATES = OptimizationConfig(lr=3e-3, train_iters=9)
SHARDED = ParallelConfig(use_distributed_optimizer=True)


class Run:
    """A model and its optimizer, and steps on a loss of its weights alone."""

    def __init__(self, seed: int, rates: OptimizationConfig) -> None:
        device = initialize_parallel(seed)
        self.config = TrainConfig(model=MODEL, optimization=rates, parallel=SHARDED)
        self.model = build_model(MODEL, device)
        self.optimizer = TrainingOptimizer(self.model, rates, SHARDED)

    def step(self, number: int) -> tuple[float, bool]:
        self.optimizer.zero_grad()
        loss = sum(((p.float() - 0.3 * number) ** 2).mean() for p in self.model.parameters())
        loss.backward()
        outcome = self.optimizer.step(loss.item())
        return outcome.grad_norm, outcome.applied

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
