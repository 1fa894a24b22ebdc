"""Decides which sequence trains a shared sampled token if only one may.

By default every path counts: sequences that branch from one another are trained as if each had been sampled alone. With
``--shared-token-ownership first``, the first sequence that trains a token owns it, in the order of the samples. The
token is context for the later ones, and the loss's denominators count only owned tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.tree import build_prefix_tree


def first_owners(samples: Sequence[TrainingSample]) -> list[np.ndarray]:
    """For each sample, bool [T]: its trained tokens that no earlier sample trains."""
    lengths = [sample.needed_length() for sample in samples]
    tree = build_prefix_tree([s.token_ids[:length] for s, length in zip(samples, lengths, strict=True)])
    taken = np.zeros(tree.num_tokens, bool)
    owned = []
    for number, sample in enumerate(samples):
        trained = np.flatnonzero(sample.loss_mask)
        stream = tree.stream_indices(number)[trained]
        mask = np.zeros(len(sample.token_ids), bool)
        mask[trained] = ~taken[stream]
        taken[stream] = True
        owned.append(mask)
    return owned
