"""Divides the samples of a step over the data-parallel ranks, and chooses how many ranks divide their segments
(--dynamic-context-parallel).

One long sequence cannot be divided over data-parallel ranks, so it may take longer than all others together. With more
ranks in a context group there are fewer groups, each of them faster. All ranks know all samples, so they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dta.common.errors import InputError
from megatron_dta.config import TreeConfig
from megatron_dta.engine import TreeBatch, TreeEngine
from megatron_dta.planning.step.sample import TrainingSample


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
    partition = engine.partition(samples, tree)
    # Operations, unlike seconds, are those of all ranks of a group.
    slowest = float(partition.cost_per_rank.max()) / (1 if engine.has_device_costs else context_size)
    return slowest, context_size, partition.sequences_of(mesh.data_rank).tolist()
