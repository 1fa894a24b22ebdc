"""Cases and helpers that tests of moe mesh share."""

from __future__ import annotations

import numpy as np
import torch

from megatron_dta.parity.outcome import Outcome
from megatron_dta.parity.shards import join_shards
from mesh_worker import RankResult


def joined(ranks: list[RankResult], model: object, partition: list[list[int]]) -> Outcome:
    """The outcome of all ranks as if one had computed it; replicas of a weight agree bit for bit."""
    assert len({rank.loss for rank in ranks}) == 1
    assert all(rank.metrics == ranks[0].metrics and rank.grad_norm == ranks[0].grad_norm for rank in ranks)
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for name, gradient in rank.gradients.items():
            place = rank.expert_tensor_rank if ".local_experts." in name else rank.tensor_rank
            assert torch.equal(parts.setdefault(name, {}).setdefault(place, gradient), gradient), name
    gradients = {}
    for name, by_rank in parts.items():
        gradients |= join_shards([{name: by_rank[place]} for place in sorted(by_rank)], model)
    logprobs: dict[int, np.ndarray] = {}
    for rank in ranks:
        for index, values in zip(partition[rank.data_rank], rank.logprobs, strict=True):
            assert np.array_equal(logprobs.setdefault(index, values), values)
    return Outcome(ranks[0].loss, [logprobs[index] for index in sorted(logprobs)], gradients)
