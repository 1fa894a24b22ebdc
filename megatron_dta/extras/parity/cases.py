"""Makes batches that expose mistakes: real token sequences with random fields that differ at shared tokens.

Sequences through the same token get different advantages, old logprobs, reference logprobs and masks there. A loss
computed once per unique token, or a gradient added to the wrong sequence, therefore differs from the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.planning.step.sample import TrainingSample


def compact_vocabulary(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Renumber token ids to 0 .. V - 1 for a small model, one to one, so the tree stays the same. Also returns V."""
    vocabulary, inverse = np.unique(np.concatenate(sequences), return_inverse=True)
    ends = np.cumsum([len(sequence) for sequence in sequences])[:-1]
    return [part.astype(np.int32) for part in np.split(inverse.reshape(-1), ends)], len(vocabulary)


def random_training_samples(
    sequences: Sequence[np.ndarray], seed: int, loss_masks: Sequence[np.ndarray] | None = None
) -> list[TrainingSample]:
    """Training samples over ``sequences`` with random fields.

    A quarter of the trained tokens of ``loss_masks`` (default: all tokens but the first) is masked at random,
    independently for every sequence. Sequences of one token, which cannot be trained, are dropped.
    """
    generator = np.random.default_rng(seed)
    samples = []
    for i, token_ids in enumerate(sequences):
        length = len(token_ids)
        base = np.ones(length, bool) if loss_masks is None else np.asarray(loss_masks[i], bool)
        mask = base & (generator.random(length) < 0.75)
        mask[0] = False
        if not mask.any():
            if length < 2:
                continue
            mask[generator.integers(1, length)] = True
        samples.append(
            TrainingSample(
                token_ids=np.asarray(token_ids, dtype=np.int32),
                loss_mask=mask,
                # Not centered, so that no loss is near zero and its relative error is meaningful.
                advantages=generator.normal(0.5, 1.0, size=length),
                # Around the logprobs of a freshly initialized model, so that clipping is active for some tokens.
                old_logprobs=generator.normal(-4.0, 0.3, size=length),
                ref_logprobs=generator.normal(-4.0, 0.3, size=length),
            )
        )
    return samples
