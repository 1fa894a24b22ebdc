"""Divides a rollout batch into the mini-batches of several optimizer steps, along the tree and in whole groups.

Samples that share prefixes save most work in the same step. So the groups are ordered depth first, each mini-batch is a
run of groups, and the cuts are placed where neighbours share least, among all cuts into runs of equal size (or one
group more). The batch's own order is used instead unless these cuts save enough. If all groups share the same prefix,
such as a system prompt, there is nothing to save, and a shuffled batch stays shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, Trained, trained_parts
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.planning.partition.sequence_runs import SequenceRuns
from megatron_dta.core.tree import build_prefix_tree


@dataclass(frozen=True, eq=False)
class MiniBatches:
    """The samples of each optimizer step.

    Attributes:
        samples: int64 arrays, ascending, one for each mini-batch; every sample is in exactly one. The mini-batches are
            in the order of their first samples.
        separated_tokens: number of tokens computed again because a shared prefix was separated.
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
    """Divide samples into mini-batches of whole groups with group counts as even as possible; equal on all ranks.

    Args:
        samples: sequences with at least one trained token each.
        num_mini_batches: number of optimizer steps, at most the number of groups.
        groups: a group name for each sample.
        cost_model: cost of a separated prefix; None for the defaults.
        least_saving: share of the cost in the batch's own order that another order must save.

    Raises:
        ValueError: num_mini_batches is below 1 or above the number of groups, or the numbers of names and samples
            differ.
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
    # Groups are numbered because NumPy treats names that differ only in trailing zero bytes as equal.
    names = [str(group) for group in by_appearance]
    costs = SequenceCosts.of(build_prefix_tree(sequences), cost_model or CostModel(), masks, names)
    runs, run_of_stop = SequenceRuns.indivisible(costs)
    along_tree = run_of_stop[costs.stop_of_sequence]
    cuts = _even_cuts(runs.shared[runs.begin], num_mini_batches)
    even = np.array([part[0] for part in np.array_split(np.arange(len(number)), num_mini_batches)[1:]], dtype=np.int64)
    in_order, along = (
        Partition.of(costs, np.searchsorted(starts, group, side="right"), num_mini_batches)
        for starts, group in ((even, by_appearance), (cuts, along_tree))
    )
    best = along if along.total_cost < (1 - least_saving) * in_order.total_cost else in_order
    parts = [best.sequences_of(step) for step in range(num_mini_batches)]
    return MiniBatches(sorted(parts, key=lambda part: part[0]), best.duplicated_tokens)


def _even_cuts(shared: np.ndarray, runs: int) -> np.ndarray:
    """First group of each run but the first, int64 [runs - 1], for runs of equal size (or one more) that share least.

    ``least[x]`` is the smallest shared cost that the cuts so far separate if x of the runs have one group more.
    """
    size, longer = divmod(len(shared), runs)
    extra = np.arange(longer + 1)
    least = np.where(extra == 0, 0.0, np.inf)
    took = []
    for run in range(1, runs):
        with_more = np.append(np.inf, least[:-1])
        took.append(with_more < least)
        index = np.minimum(run * size + extra, len(shared) - 1)
        least = np.minimum(least, with_more) + shared[index]
        least[longer - extra > runs - run] = np.inf  # The remaining runs cannot hold the remaining groups.
    cuts = np.zeros(runs - 1, dtype=np.int64)
    # The last run has one group more if that separates less.
    more = longer - int(longer > 0 and least[longer - 1] < least[longer])
    for run in range(runs - 1, 0, -1):
        cuts[run - 1] = run * size + more
        more -= int(took[run - 1][more])
    return cuts
