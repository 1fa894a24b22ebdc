"""Cases and helpers that tests of pipeline segments share."""

from __future__ import annotations

import numpy as np

from conftest import seed_all
from megatron_dta.planning import CostModel
from megatron_dta.planning.costs.decoder_shape import DecoderShape

MODEL = CostModel.from_shape(DecoderShape(64, 5120, 25600, 64, 8, 128, 151936))


def forest(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trajectories of several turns that share beginnings, some 40,000 tokens."""
    rng = seed_all(seed)
    sequences, masks = [], []
    for _ in range(8):
        trunk = rng.integers(0, 9999, rng.integers(300, 1500))
        for _ in range(6):
            own = rng.integers(0, 9999, rng.integers(100, 2500))
            sequences.append(np.concatenate([trunk[: rng.integers(len(trunk) // 2, len(trunk))], own]).astype(np.int32))
            masks.append(np.arange(len(sequences[-1])) >= len(sequences[-1]) - len(own))
    return sequences, masks
