"""Cuts a collection of samples into the mini-batches of several optimizer steps, along the tree and with whole groups.

Samples that share prefixes are worth most in one step. So the groups stand in depth-first order, mini-batches are runs
of them, and among the ways to make runs of equal size (one group more or less where the number does not divide) the one
is taken whose cuts separate least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.planning.chunks import Chunks
from megatron_dta.planning.cost_model import CostModel
from megatron_dta.planning.partition import Trained, trained_parts
from megatron_dta.planning.sequence_costs import SequenceCosts
from megatron_dta.tree import build_prefix_tree


def cut_mini_batches(
    samples: Sequence[Trained],
    num_mini_batches: int,
    keep_together: Sequence[str] | None = None,
    cost_model: CostModel | None = None,
) -> list[np.ndarray]:
    """Samples of each mini-batch, int64, ascending; every sample in exactly one.

    Args:
        samples: sequences with a trained token each.
        num_mini_batches: optimizer steps, at most the number of groups.
        keep_together: a group name for each sample; without names every sample is a group.
        cost_model: says what a separated prefix costs; None for the defaults.

    Raises:
        ValueError: num_mini_batches below 1 or above the number of groups, or names of another number than samples.
    """
    sequences, masks = trained_parts(samples)
    if keep_together is not None and len(keep_together) != len(sequences):
        raise ValueError(f"keep_together has {len(keep_together)} names for {len(sequences)} samples")
    costs = SequenceCosts.of(build_prefix_tree(sequences), cost_model or CostModel(), masks, keep_together)
    if keep_together is None:
        # Equal samples are groups of their own; between them a cut separates all that they are.
        order = np.argsort(costs.stop_of_sequence, kind="stable")
        stop = costs.stop_of_sequence[order]
        shared = np.where(np.diff(stop, prepend=-1) > 0, costs.shared[stop], costs.alone[stop])
        group = np.empty(len(order), dtype=np.int64)
        group[order] = np.arange(len(order))
    else:
        atoms, atom_of_stop = Chunks.atoms(costs)
        shared, group = atoms.shared[atoms.begin], atom_of_stop[costs.stop_of_sequence]
    if not 1 <= num_mini_batches <= len(shared):
        raise ValueError(
            f"{len(shared)} groups cannot be cut into {num_mini_batches} mini-batches, one or more in each"
        )
    batch = np.searchsorted(_even_cuts(shared, num_mini_batches), group, side="right")
    return [np.flatnonzero(batch == number) for number in range(num_mini_batches)]


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
