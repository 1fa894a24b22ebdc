"""Distances of bfloat16 gradients from float32 ones, trained as trees and dense, on the GPU or CPU."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from conftest import seed_all
from hybrid_cases import spread
from megatron_dta.core.config import ModelConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import random_training_samples
from megatron_dta.training.config import OptimizationConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of


def gradients_in_buffers(model: ModelConfig, weights: dict[str, torch.Tensor], samples: list, tree: TreeConfig) -> dict:
    """Gradients as training has them: accumulated over segments in Megatron's float32 buffers."""
    tree_model = build_model(model, initialize_parallel(0))
    tree_model.load_state_dict(weights)
    optimizer = TrainingOptimizer(tree_model, OptimizationConfig(train_iters=1, lr=1e-3))
    optimizer.zero_grad()
    TreeEngine(optimizer.chunks, TEMPERATURE).forward_backward(prepare_batch(samples, tree), GRPO)
    return {name: p.main_grad.clone() for name, p in tree_model.named_parameters()}


def tree_over_dense(seeds: Iterable[int], count: int = 60, **settings: object) -> np.ndarray:
    """Distance of the whole bfloat16 gradient from the float32 one, as a tree over dense, one ratio a batch.

    Args:
        count: sequences in a batch.
        settings: of the model.
    """
    settings = dict(hidden_size=128, ffn_hidden_size=256, kv_channels=32) | QWEN3 | settings
    ratios = []
    for seed in seeds:
        samples = random_training_samples(branching_sequences(seed_all(seed), count=count, longest=120), seed=seed)
        single = model_config(torch.float32, **settings)
        half = replace(single, params_dtype=torch.bfloat16)
        weights = weights_of(single, seed)
        if single.mixer is not None:
            weights = spread(weights, seed)
        rounded = {name: weight.bfloat16() for name, weight in weights.items()}
        exact = gradients_in_buffers(
            single, {name: weight.float() for name, weight in rounded.items()}, samples, tree_config("dense", 128)
        )
        distance = {}
        for mode in ("dense", "dta"):
            gradients = gradients_in_buffers(half, rounded, samples, tree_config(mode, 128))
            squares = [(gradients[name] - gradient).square().sum() for name, gradient in exact.items()]
            distance[mode] = float(torch.stack(squares).sum().sqrt())
        ratios.append(distance["dta"] / distance["dense"])
    return np.asarray(ratios)
