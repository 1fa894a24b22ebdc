"""A small model with an optimizer that takes steps, saves and loads; its loss depends on the weights alone."""

import random
from pathlib import Path

import numpy as np
import torch

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.checkpoint.save_load import load_checkpoint, save_checkpoint
from megatron_dta.training.config import OptimizationConfig, TrainConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer

MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=3, vocab_size=37, swiglu=True, disable_bias_linear=True
)
RATES = OptimizationConfig(lr=3e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=2, train_iters=9)


class Run:
    """A model with its optimizer, and steps on a loss of its weights alone."""

    def __init__(self, seed: int, model: ModelConfig = MODEL, rates: OptimizationConfig = RATES) -> None:
        device = initialize_parallel(seed)
        self.config = TrainConfig(model=model, optimization=rates)
        self.model = build_model(model, device)
        self.optimizer = TrainingOptimizer(self.model, rates)

    def step(self, scale: float = 1.0) -> tuple[float, float, bool]:
        """One step whose gradient depends on the weights and on a random draw."""
        self.optimizer.zero_grad()
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        loss = sum(((parameter.float() - noise) ** 2).mean() for parameter in self.model.parameters()) * scale
        loss.backward()
        outcome = self.optimizer.step(loss.item())
        return loss.item(), outcome.grad_norm, outcome.applied

    def save(self, folder: Path, iteration: int, progress: dict | None = None) -> Path:
        return save_checkpoint(folder, self.config, self.model, self.optimizer, iteration, progress or {})

    def load(self, path: Path) -> tuple[int, dict, list[str]]:
        return load_checkpoint(path, self.config, self.model, self.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
