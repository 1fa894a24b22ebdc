"""Measures what is lost by training only the longest path of every tree, and that trees lose nothing.

All gradients are those of the mean loss over the trained tokens of what is trained, on one small model in float64. The
exact one is that of every sequence computed alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.config import ModelConfig, ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.tree import build_prefix_tree
from papers.tree_training_parts.data import TreeSet


def longest_paths(lengths: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The longest sequence of each group, the first of several: ascending indices."""
    order = np.lexsort((-np.arange(len(lengths)), lengths, groups))
    last = np.flatnonzero(np.diff(groups[order], append=-1))
    return np.sort(order[last])


def small_model(vocab_size: int, longest: int, hidden_size: int = 64) -> ModelConfig:
    """Two layers with the features of Qwen3, in float64."""
    return ModelConfig(
        num_layers=2,
        hidden_size=hidden_size,
        ffn_hidden_size=2 * hidden_size,
        num_attention_heads=4,
        num_query_groups=2,
        qk_layernorm=True,
        swiglu=True,
        disable_bias_linear=True,
        vocab_size=vocab_size,
        max_position_embeddings=longest,
        params_dtype=torch.float64,
    )


def lost_shares(trees: TreeSet) -> dict[str, Any]:
    """What the longest paths leave out: shares of sequences, of unique tokens and of the terms of the loss."""
    lengths = np.array([len(sample.token_ids) for sample in trees.samples])
    kept = longest_paths(lengths, trees.groups)
    terms = np.array([sample.num_trained for sample in trees.samples])
    tokens = build_prefix_tree([trees.samples[i].token_ids for i in kept]).num_tokens
    return {
        "set": trees.name,
        "trees": len(kept),
        "sequences": len(lengths),
        "lost_sequences": 1 - len(kept) / len(lengths),
        "lost_tokens": 1 - tokens / trees.tree.num_tokens,
        "lost_terms": 1 - float(terms[kept].sum() / terms.sum()),
    }


def gradient_row(trees: TreeSet, seed: int, capacity: int) -> dict[str, Any]:
    """Distances of gradients from the exact one, relative to its norm: longest paths, packed trees, and trees."""
    trees = trees.renumbered()
    device = initialize_parallel(seed)
    engine = TreeEngine(build_model(small_model(trees.vocab_size, trees.longest), device))
    kept = longest_paths(np.array([len(sample.token_ids) for sample in trees.samples]), trees.groups)
    capacity = max(capacity, trees.longest)
    exact = _gradient(engine, trees.samples, TreeConfig(tree_mode="dense"))
    gradients = {
        "longest_path": _gradient(engine, [trees.samples[i] for i in kept], TreeConfig(tree_mode="dense")),
        "packed": _gradient(engine, trees.samples, TreeConfig(tree_mode="packed", tree_segment_tokens=capacity)),
        "dta": _gradient(engine, trees.samples, TreeConfig(tree_mode="dta")),
    }
    distances = {
        f"{name}_distance": float((gradient - exact).norm() / exact.norm()) for name, gradient in gradients.items()
    }
    paths = gradients["longest_path"]
    cosine = float(paths @ exact / paths.norm() / exact.norm())
    return {"seed": seed, "gradient_tokens": trees.tokens, **distances, "longest_path_cosine": cosine}


def _gradient(engine: TreeEngine, samples: list[TrainingSample], tree: TreeConfig) -> Tensor:
    """The gradient of all parameters in one vector."""
    parameters = list(engine.tree_models[0].parameters())
    for parameter in parameters:
        parameter.grad = None
    pipeline = engine.pipeline(tree.tree_segment_tokens)
    engine.forward_backward(
        prepare_batch(samples, tree, pipeline=pipeline), make_objective(ObjectiveConfig(objective="sft"))
    )
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
