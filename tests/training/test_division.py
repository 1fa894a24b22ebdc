"""The choice of context groups for a step: by the slowest rank, within the memory, the same on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.planning.costs.gpus import LayerSplit, gpu_cost_model, gpu_named
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.training.data.division import divide_and_plan

RANKS = 8
SHAPE = DecoderShape(28, 2048, 6144, 16, 8, 128, 150_000)


class Engine:
    """What the choice needs of an engine on one of eight H200s, with context groups of up to four."""

    has_device_costs, possible_context_sizes = True, [1, 2, 4]

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.divide_tokens(4)

    def divide_tokens(self, size: int) -> None:
        self.mesh = SimpleNamespace(
            context_size=size,
            data_rank=self.rank // size,
            data_size=RANKS // size,
            expert_data_ranks=[self.rank // size],
            gather_from_all=lambda own: [own],
        )

    def cost_model(self, segment_tokens: int | None) -> object:
        split = LayerSplit(context_size=self.mesh.context_size)
        return gpu_cost_model(SHAPE, gpu_named("H200")[0], split, segment_tokens or 8192)


def _samples(lengths: list[int]) -> list[TrainingSample]:
    rng = seed_all(7)
    return [TrainingSample(rng.integers(0, 1000, n), np.arange(n) > n // 2) for n in lengths]


@pytest.mark.parametrize(
    ("lengths", "size"),
    [([3000] * 16, 1), ([60_000, *[3000] * 16], 4), ([24_000] * 4, 2)],
)
def test_ranks_share_sequences_that_bound_the_step(lengths, size):
    samples, owners = _samples(lengths), {}
    for rank in range(RANKS):
        engine = Engine(rank)
        own, planned = divide_and_plan(samples, engine, TreeConfig(), lambda own, _: tuple(own))
        assert planned == tuple(own)
        assert engine.mesh.context_size == size
        assert owners.setdefault(engine.mesh.data_rank, own) == own
    assert sorted(i for own in owners.values() for i in own) == list(range(len(lengths)))


def test_groups_that_do_not_fit_are_not_taken():
    samples, engine, tried = _samples([3000] * 16), Engine(0), []

    def plan(own: list[int], _: TreeConfig) -> int:
        tried.append(engine.mesh.context_size)
        if tried[-1] < 4:
            raise InputError(f"too long for {tried[-1]}")
        return len(own)

    own, planned = divide_and_plan(samples, engine, TreeConfig(), plan)
    assert planned == len(own) == 8
    assert tried == [1, 2, 4]
    assert engine.mesh.context_size == 4


def test_a_rank_that_lacks_memory_decides_for_all():
    engine, tried = Engine(0), []

    def plan(own: list[int], _: TreeConfig) -> int:
        size = engine.mesh.context_size
        tried.append(size)
        engine.mesh.gather_from_all = lambda own: [own, "too long" if size < 2 else None]
        return size

    assert divide_and_plan(_samples([3000] * 16), engine, TreeConfig(), plan)[1] == 2
    assert tried == [1, 2]


def test_a_step_that_fits_nowhere_is_refused():
    def plan(own: list[int], _: TreeConfig) -> int:
        raise InputError("needs 3 GiB more")

    with pytest.raises(InputError, match="needs 3 GiB more"):
        divide_and_plan(_samples([30] * 16), Engine(0), TreeConfig(), plan)


def test_ranks_of_smaller_groups_hold_as_many_tokens():
    tree, engine = TreeConfig(tree_segment_tokens=8000, tree_memory_tokens=20_001, tree_activation_tokens=0), Engine(0)
    _, taken = divide_and_plan(_samples([3000] * 16), engine, tree, lambda own, limited: limited)
    assert engine.mesh.context_size == 1
    assert (taken.tree_segment_tokens, taken.tree_memory_tokens, taken.tree_activation_tokens) == (2000, 5000, 0)
