"""Computes the terms of pairwise losses (DPO) before the training pass.

``objectives.dpo`` explains why one number for each sequence is enough. The two sequences of a pair may be on different
data-parallel ranks, so the ranks exchange one sum for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.engine.batch import TreeBatch
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.objectives.fields import PairFunction


def with_pair_terms(
    batch: TreeBatch, pair_function: PairFunction, logprobs: Sequence[np.ndarray], mesh: Mesh
) -> tuple[TreeBatch, dict[str, float]]:
    """``batch`` with ``pair_gradient`` and ``pair_loss``, and metrics of all pairs, the same on every rank.

    Args:
        pair_function: the pairwise part of the objective.
        logprobs: of this rank's sequences under the weights being trained, [T] each, 0 where not trained.
    """
    if batch.preference_pairs is None or not len(batch.preference_pairs):
        raise ValueError("the objective is over pairs of sequences, but prepare_batch was given no preference_pairs")
    reference = batch.fields["ref_logprobs"]
    if reference is None and len(logprobs):
        raise ValueError("the objective compares with a reference, but the samples have no ref_logprobs")
    references = [] if reference is None else batch.per_sequence(reference)
    sums = [
        (int(number), float(np.sum(present, dtype=np.float64) - np.sum(ref, dtype=np.float64)))
        for number, present, ref in zip(batch.sequences, logprobs, references, strict=True)
    ]
    of_all = dict(pair for part in mesh.gather_over_data(sums) for pair in part)
    totals = np.zeros(max(of_all) + 1)
    totals[list(of_all)] = list(of_all.values())
    terms = pair_function(totals, batch.preference_pairs)
    fields: dict[str, list[np.ndarray]] = {"pair_gradient": [], "pair_loss": []}
    for number, mask in zip(batch.sequences, batch.loss_mask, strict=True):
        fields["pair_gradient"].append(np.full(len(mask), terms.gradient[number]))
        fields["pair_loss"].append(np.full(len(mask), terms.loss[number] / np.count_nonzero(mask)))
    return batch.with_fields(**fields), terms.metrics
