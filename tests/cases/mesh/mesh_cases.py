"""Cases and helpers that tests of mesh share."""

from __future__ import annotations

import numpy as np
import torch

from megatron_dta.config import ModelConfig
from megatron_dta.parity import random_training_samples
from megatron_dta.parity.outcome import Outcome
from megatron_dta.parity.shards import join_shards
from mesh_worker import RankResult
from tree_engine_cases import (
    VOCABULARY,
)

GRPO = {"objective": "grpo", "kl_loss_coef": 0.05, "entropy_coef": 0.02, "dual_clip": 3.0}


# (mode, tokens of a segment, in-flight tokens kept): odd segments that sequence parallelism must fill up.
CUTS = {
    "dense": ("dense", 9, None),
    "dense-recomputed": ("dense", 9, 0),
    "packed": ("packed", 45, None),
    "packed-recomputed": ("packed", 45, 0),
    "dta": ("dta", 6, None),
    "dta-mixed": ("dta", 7, 12),
    "dta-recomputed": ("dta", 9, 0),
}


def _partition(count: int, sizes: list[int]) -> list[list[int]]:
    """Contiguous runs of the given sizes, the last one takes the rest."""
    bounds = [0, *np.cumsum(sizes[:-1]).tolist(), count]
    return [list(range(bounds[i], bounds[i + 1])) for i in range(len(sizes))]


def _siblings(changed: bool) -> list:
    """Three branches of one trunk, of odd length; ``changed`` gives the middle one other tokens."""
    generator = np.random.default_rng(31)
    trunk = generator.integers(0, VOCABULARY, size=21)
    tails = [np.append([first], generator.integers(0, VOCABULARY, size=n)) for first, n in ((0, 12), (1, 9), (2, 30))]
    if changed:
        tails[1][1:] = (tails[1][1:] + 1) % VOCABULARY
    return random_training_samples([np.append(trunk, tail).astype(np.int32) for tail in tails], seed=1)


def joined(ranks: list[RankResult], case_model: ModelConfig, partition: list[list[int]]) -> Outcome:
    """The outcome of all ranks as if one had computed it; whatever ranks should agree on must agree bit for bit."""
    assert len({rank.loss for rank in ranks}) == 1
    assert all(rank.metrics == ranks[0].metrics and rank.grad_norm == ranks[0].grad_norm for rank in ranks)
    replicas: dict[int, list[RankResult]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.tensor_rank):
        replicas.setdefault(rank.data_rank, []).append(rank)
    gradients = [join_shards([rank.gradients for rank in group], case_model) for group in replicas.values()]
    for other in gradients[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in gradients[0].items())
    logprobs: dict[int, np.ndarray] = {}
    for data_rank, group in replicas.items():
        for rank in group:
            assert len(rank.logprobs) == len(partition[data_rank])
            for index, values in zip(partition[data_rank], rank.logprobs, strict=True):
                assert np.array_equal(logprobs.setdefault(index, values), values)
    return Outcome(ranks[0].loss, [logprobs[index] for index in sorted(logprobs)], gradients[0])
