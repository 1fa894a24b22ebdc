"""Builds the tree engine of another trainer's model from this project's settings."""

from __future__ import annotations

from megatron_dta.config import TrainConfig
from megatron_dta.engine import TreeEngine
from megatron_dta.model import Model, current_mesh
from megatron_dta.planning.costs.file import load_cost_file
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer import TrainingOptimizer


def build_tree_engine(
    config: TrainConfig, model: Model, optimizer: TrainingOptimizer | None, temperature: float = 1.0
) -> TreeEngine:
    """The engine of ``model``, within the memory of ``config.tree``; ``optimizer`` is None for a model that is not
    trained.
    """
    tree, parallel = config.tree, config.parallel
    engine = TreeEngine(
        model if optimizer is None else optimizer.chunks,
        temperature,
        tree.logprob_chunk_tokens,
        parallel.pipeline_in_flight_tokens,
        tree.tree_attention_impl,
        costs=load_cost_file(tree.cost_model) if tree.cost_model is not None else None,
    )
    if tree.tree_memory_gib is not None:
        if optimizer is None:
            constant = constant_bytes(model.model_chunks)
        else:
            ranks = current_mesh().data_size if parallel.use_distributed_optimizer else 1
            constant = constant_bytes(optimizer.chunks, config.optimization, ranks)
        engine.limit_memory(tree.tree_memory_gib, constant)
    return engine
