"""Weights for verl's rollout servers, under Hugging Face's names: whole tensors, or shards for its delta sync."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from verl.workers.engine.spec import BlockPlacement, ShardSpec

from megatron_dta.training.huggingface.weights import HfWeights


def shards(weights: HfWeights, device: torch.device) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """This rank's shard of every tensor of the model, flat, with its place; in one order on all ranks.

    verl compares shards with those of the last export on every rank and sends only elements that changed. A rank that
    holds no part of a tensor takes part with an empty shard.
    """
    group = torch.distributed.group.WORLD
    for name, shape, dtype, shard in weights.iterate_places():
        if shard is None:
            empty = torch.empty(0, dtype=dtype, device=device)
            yield name, empty, ShardSpec(shape, place=0, gather_group=group, contributes=False)
            continue
        offsets = (*shard.offsets, *[0] * (len(shape) - len(shard.offsets)))
        block = BlockPlacement(tuple(shard.values.shape), offsets, shape)
        yield name, shard.values.reshape(-1), ShardSpec(shape, place=block, gather_group=group)
