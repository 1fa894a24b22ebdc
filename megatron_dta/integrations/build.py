"""Builds the tree engine of another trainer's model from this project's settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.extras.kv_offload.copy_speed import check_copies
from megatron_dta.training.autotune import Autotuner, build_autotuner
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer.build import TrainingOptimizer


def build_tree_engine(
    config: TrainConfig,
    model: Model,
    optimizer: TrainingOptimizer | None,
    temperature: float = 1.0,
    frozen: Sequence[torch.nn.Module] = (),
) -> tuple[TreeEngine, Autotuner]:
    """The engine of ``model`` and what decides its memory where ``config.tree`` does not.

    Args:
        optimizer: the model's optimizer; None for a model that is not trained.
        frozen: chunks of other models that are on the device throughout a step.
    """
    tree, parallel = config.tree, config.parallel
    engine = TreeEngine(
        model if optimizer is None else optimizer.chunks,
        temperature,
        tree.logprob_chunk_tokens,
        tree.tree_attention_impl,
    )
    engine.offload_kv(tree.kv_offload_fraction)
    check_copies(engine, tree.tree_segment_tokens)
    frozen = list(frozen) if optimizer is not None else [*frozen, *model.model_chunks]
    constant = constant_bytes(frozen)
    if optimizer is not None:
        ranks = current_mesh().data_size if parallel.use_distributed_optimizer else 1
        constant += constant_bytes(optimizer.chunks, config.optimization, ranks)
    if tree.tree_memory_gib is not None:
        engine.limit_memory(tree.tree_memory_gib, constant)
    tuner = build_autotuner(config, engine, constant, [] if optimizer is None else [optimizer], frozen)
    # Rollout servers on the same GPU give memory back between the phases of the other trainer.
    tuner.follows = True
    return engine, tuner
