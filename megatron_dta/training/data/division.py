"""Divides the samples of a step over the data-parallel ranks, and chooses how many ranks divide their segments
(--dynamic-context-parallel).

One long sequence cannot be divided over data-parallel ranks, so it may take longer than all others together. With more
ranks in a context group there are fewer groups, each of them faster. All ranks know all samples, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeBatch, TreeEngine
from megatron_dta.core.extensions import EXPERT_PARALLEL
from megatron_dta.core.planning.partition.divide import Partition, partition_sequences, trained_parts
from megatron_dta.core.planning.step.choice import DEFAULT_SEGMENT_TOKENS, PIPELINE_SIZES, SIZES
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample


def divide_and_plan(
    samples: Sequence[TrainingSample],
    engine: TreeEngine,
    tree: TreeConfig,
    plan: Callable[[list[int], TreeConfig], TreeBatch],
) -> tuple[list[int], TreeBatch]:
    """The numbers of this rank's samples and their plan, in the context groups that ``engine`` has afterwards.

    Args:
        tree: limits in tokens are those of the largest groups.
        plan: plans samples of these numbers in the engine's context groups.

    Raises:
        InputError: the step does not fit into the memory, with any size of context groups.
    """
    sizes = engine.possible_context_sizes
    trees = {size: _limited(tree, size / sizes[-1]) for size in sizes}
    divisions = [_divided(samples, engine, trees[size], size) for size in sizes]
    divisions.sort(key=lambda each: each[0])
    for _, size, own in divisions:
        engine.divide_tokens(size)
        if len(divisions) == 1:
            return own, plan(own, tree)
        batch, refusal = None, None
        try:
            batch = plan(own, trees[size])
        except InputError as error:
            refusal = str(error)
        refusals = [each for each in engine.mesh.gather_from_all(refusal) if each is not None]
        if batch is not None and not refusals:
            return own, batch
    raise InputError(refusals[0])


def _limited(tree: TreeConfig, share: float) -> TreeConfig:
    """The settings with this share of the tokens, so that a rank of a smaller group computes and holds no more."""
    names = ("tree_segment_tokens", "tree_memory_tokens", "tree_activation_tokens")
    given = {name: getattr(tree, name) for name in names}
    return replace(tree, **{name: min(n, max(1, int(share * n))) for name, n in given.items() if n is not None})


def _divided(
    samples: Sequence[TrainingSample], engine: TreeEngine, tree: TreeConfig, context_size: int
) -> tuple[float, int, list[int]]:
    """Predicted time of the slowest rank, the size of context groups, and the numbers of this rank's samples."""
    engine.divide_tokens(context_size)
    mesh = engine.mesh
    if mesh.data_size == 1 and len(engine.possible_context_sizes) == 1:
        return 0.0, context_size, list(range(len(samples)))
    partition = partition_samples(samples, engine, tree)
    # Operations, unlike seconds, are those of all ranks of a group.
    slowest = float(partition.cost_per_rank.max()) / (1 if engine.has_device_costs else context_size)
    return slowest, context_size, partition.sequences_of(mesh.data_rank).tolist()


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
        found = mesh.gather_from_all([step.slowest(each) for each in divisions[mesh.rank :: mesh.world_size]])
        return [found[i % mesh.world_size][i // mesh.world_size] for i in range(len(divisions))]

    return partition_sequences(sequences, mesh.data_size, masks, model, step_seconds=seconds)
