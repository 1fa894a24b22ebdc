"""Cuts a collection of samples into the mini-batches of several optimizer steps, along the tree and with whole groups.

Samples that share prefixes are worth most in one step. So the groups stand in depth-first order, mini-batches are runs
of them, and among the ways to make runs of equal size (one group more or less where the number does not divide) the one
is taken whose cuts separate least. Runs of the collection's own order are taken instead unless these cost enough more:
where all groups share the same, as a system prompt, there is nothing to gain, and a shuffled collection stays shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.partition.divide import Partition, Trained, trained_parts
from megatron_dta.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.planning.partition.sequence_runs import Chunks
from megatron_dta.tree import build_prefix_tree


@dataclass(frozen=True, eq=False)
class MiniBatches:
    """The samples of each optimizer step.

    Attributes:
        samples: int64 arrays, ascending, one for each mini-batch; every sample is in exactly one. The mini-batches come
            in the order of their first samples.
        separated_tokens: tokens that the mini-batches compute beyond computing each once.
    """

    samples: list[np.ndarray]
    separated_tokens: int


def cut_mini_batches(
    samples: Sequence[Trained],
    num_mini_batches: int,
    groups: Sequence[str],
    cost_model: CostModel | None = None,
    least_saving: float = 0.0,
) -> MiniBatches:
    """Mini-batches of whole groups, as even in their number as possible. The same on every rank that has the samples.

    Args:
        samples: sequences with a trained token each.
        num_mini_batches: optimizer steps, at most the number of groups.
        groups: a group name for each sample.
        cost_model: says what a separated prefix costs; None for the defaults.
        least_saving: part of the cost in the collection's own order that leaving it must save.

    Raises:
        ValueError: num_mini_batches below 1 or above the number of groups, or names of another number than samples.
    """
    if len(groups) != len(samples):
        raise ValueError(f"there are {len(groups)} names of groups for {len(samples)} samples")
    number: dict[str, int] = {}
    by_appearance = np.array([number.setdefault(name, len(number)) for name in groups], dtype=np.int64)
    if not 1 <= num_mini_batches <= len(number):
        raise ValueError(
            f"{len(number)} groups cannot be cut into {num_mini_batches} mini-batches, one or more in each"
        )
    sequences, masks = trained_parts(samples)
    # By number: NumPy takes names that differ in zero bytes at their ends for the same.
    names = [str(group) for group in by_appearance]
    costs = SequenceCosts.of(build_prefix_tree(sequences), cost_model or CostModel(), masks, names)
    atoms, atom_of_stop = Chunks.atoms(costs)
    along_tree = atom_of_stop[costs.stop_of_sequence]
    cuts = _even_cuts(atoms.shared[atoms.begin], num_mini_batches)
    even = np.array([part[0] for part in np.array_split(np.arange(len(number)), num_mini_batches)[1:]], dtype=np.int64)
    in_order, along = (
        Partition.of(costs, np.searchsorted(starts, group, side="right"), num_mini_batches)
        for starts, group in ((even, by_appearance), (cuts, along_tree))
    )
    best = along if along.total_cost < (1 - least_saving) * in_order.total_cost else in_order
    found = [best.sequences_of(step) for step in range(num_mini_batches)]
    return MiniBatches(sorted(found, key=lambda part: part[0]), best.duplicated_tokens)


def _even_cuts(shared: np.ndarray, runs: int) -> np.ndarray:
    """First group of each run but the first, int64 [runs - 1]: runs of equal size (or one more) that share least.

    ``least[x]`` is the least that the cuts so far separate when x of the runs before them have one group more.
    """
    size, longer = divmod(len(shared), runs)
    extra = np.arange(longer + 1)
    least = np.where(extra == 0, 0.0, np.inf)
    took = []
    for run in range(1, runs):
        with_more = np.append(np.inf, least[:-1])
        took.append(with_more < least)
        place = np.minimum(run * size + extra, len(shared) - 1)
        least = np.minimum(least, with_more) + shared[place]
        least[longer - extra > runs - run] = np.inf  # The runs to come cannot take what is left.
    cuts = np.zeros(runs - 1, dtype=np.int64)
    # The last run is longer if that separates less.
    more = longer - int(longer > 0 and least[longer - 1] < least[longer])
    for run in range(runs - 1, 0, -1):
        cuts[run - 1] = run * size + more
        more -= int(took[run - 1][more])
    return cuts
