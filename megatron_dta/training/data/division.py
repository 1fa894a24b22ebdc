"""Divides the samples of a step over the data-parallel ranks. All ranks know all samples, so they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.extensions import EXPERT_PARALLEL
from megatron_dta.core.planning.partition.divide import Partition, partition_sequences, trained_parts
from megatron_dta.core.planning.pipeline.choice import PIPELINE_SIZES
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS, SIZES


def partition_samples(samples: Sequence[TrainingSample], engine: TreeEngine, tree: TreeConfig) -> Partition:
    """Divide the samples of a step over the data-parallel ranks. All processes call this together.

    Ranks that share experts wait for each other in every layer. Among several divisions for them, the one with the
    shortest predicted step is taken.
    """
    model, mesh = engine.cost_model(tree.tree_segment_tokens), engine.mesh
    sequences, masks = trained_parts(samples)
    ranks = len(mesh.expert_data_ranks)
    if ranks == 1:
        return partition_sequences(sequences, mesh.data_size, masks, model)
    size = tree.tree_segment_tokens
    if size is None:
        # Where the planner chooses the size, it is mostly the largest.
        sizes = PIPELINE_SIZES if mesh.pipeline_size > 1 else SIZES
        is_free = tree.tree_mode != "packed" and (engine.memory is not None or engine.has_device_costs)
        size = (sizes[0] if is_free else DEFAULT_SEGMENT_TOKENS) * mesh.context_size
    budget = StepBudget(size, tree.tree_memory_tokens, tree.tree_activation_tokens)
    shape = replace(engine.pipeline(tree.tree_segment_tokens), group=None, memory=None)
    step = EXPERT_PARALLEL.part.group_step(sequences, masks, ranks, budget, shape, tree.tree_mode)

    def seconds(divisions: list[np.ndarray]) -> list[float]:
        # Each process predicts some of them, and all get the same figures.
        seconds_of_ranks = mesh.gather_from_all(
            [step.slowest(division) for division in divisions[mesh.rank :: mesh.world_size]]
        )
        return [seconds_of_ranks[i % mesh.world_size][i // mesh.world_size] for i in range(len(divisions))]

    return partition_sequences(sequences, mesh.data_size, masks, model, step_seconds=seconds)
