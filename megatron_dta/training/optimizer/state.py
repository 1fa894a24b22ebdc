"""Collects a distributed optimizer's state for a checkpoint with little communication and host memory.

Megatron's distributed optimizer divides a buffer of all parameters evenly over the data-parallel ranks, regardless of
parameter boundaries. A checkpoint that loads on any mesh holds whole parameters. Megatron gathers the whole buffer for
it, either on one rank, which then writes alone, or on every rank. Here only parameters that cross a boundary between
ranks are sent, each to the rank with its largest piece. Each rank then writes about its share of the buffer, and the
files hold the same tensors.

Example: a buffer of 10 elements on two ranks (0-4 and 5-9) holds parameters a = 0-2, b = 3-8 and c = 9. Rank 0 owns a,
rank 1 owns c. Parameter b has 2 elements on rank 0 and 4 on rank 1, so rank 0 sends its 2 elements to rank 1.

Each rank copies only what it writes to the host: twelve bytes per parameter, divided by the number of data-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Adam's states; newer versions of Megatron list the states of an optimizer.
_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Placement:
    """A parameter's place in its buffer and its pieces on the data-parallel ranks.

    Attributes:
        begin, end: range of elements in the buffer.
        bucket: number of the buffer's bucket that holds the parameter.
        pieces: the elements of the parameter that each rank holds, by rank.
    """

    parameter: torch.nn.Parameter
    begin: int
    end: int
    bucket: int
    pieces: dict[int, slice]

    @property
    def owner(self) -> int:
        """The rank with the largest piece; the first one if several pieces are equally large."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank].stop - self.pieces[rank].start, -rank))


class WholeParameters:
    """A stand-in for the whole buffer that holds only this rank's parameters.

    ``[begin:end]`` returns the elements of a parameter, or a meta tensor if another rank owns the parameter.
    """

    def __init__(self, parts: dict[tuple[int, int], Tensor]) -> None:
        self._parts = parts

    def __getitem__(self, part: slice) -> Tensor:
        values = self._parts.get((part.start, part.stop))
        return torch.empty(part.stop - part.start, device="meta") if values is None else values


def owned_state(optimizer: Any) -> dict[Any, Any]:
    """Replaces ``DistributedOptimizer.get_parameter_state_dp_zero``; the result holds only this rank's parameters.

    Every data-parallel rank of the optimizer must call this at the same time.
    """
    names = ("param", *getattr(optimizer, "optimizer_state_keys", _STATES))
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        parts_of: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in names}
        for placement in placements(optimizer.buffers[index], optimizer.data_parallel_group.size()):
            tensors = _whole(optimizer, index, ranges[dtype][placement.bucket], placement, names)
            for name, values in tensors.items():
                parts_of[name][placement.begin, placement.end] = values
        state[index] = {dtype: {name: WholeParameters(parts) for name, parts in parts_of.items()}}
    return state


def placements(buffer: Any, num_ranks: int) -> Iterator[Placement]:
    """Yield the placement of every parameter of a buffer, in the buffer's order."""
    for parameter, (begin, end, bucket) in buffer.param_index_map.items():
        first = buffer.buckets[bucket].offset
        share = buffer.buckets[bucket].grad_data.numel() // num_ranks
        pieces = {}
        for rank in range((begin - first) // share, (end - 1 - first) // share + 1):
            from_, to = max(begin, first + rank * share), min(end, first + (rank + 1) * share)
            pieces[rank] = slice(from_ - begin, to - begin)
        yield Placement(parameter, begin, end, bucket, pieces)


def keep_owned(state: Any) -> Any:
    """Remove the parameters of other ranks from a sharded state and make this rank the writer of its own."""
    if not isinstance(state, dict):
        return state
    kept = {}
    for name, part in state.items():
        if isinstance(part, dict) and part:
            part = keep_owned(part)
            if not part:
                continue
        elif torch.is_tensor(getattr(part, "data", None)):
            if part.data.is_meta:
                continue
            # The last number is the data-parallel rank. The others differ between tensor ranks with the same values.
            part.replica_id = (*part.replica_id[:-1], 0)
        kept[name] = part
    return kept


def _whole(
    optimizer: Any, index: int, bucket_ranges: dict[str, Any], placement: Placement, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """Gather a parameter's state on its owner, in float32 on the host; returns {} on the other ranks."""
    rank = optimizer.data_parallel_group.rank()
    if rank not in placement.pieces:
        return {}
    group, owner = optimizer.data_parallel_group_gloo, placement.owner
    tensors = optimizer._get_main_param_and_optimizer_states(placement.parameter)
    rank_tensors = {name: tensors[name].detach().to("cpu", torch.float32).contiguous().view(-1) for name in names}
    part = bucket_ranges["param_map"][placement.parameter]["param"]
    if (part.start, part.end) != (placement.pieces[rank].start, placement.pieces[rank].stop):
        raise RuntimeError(f"a parameter of buffer {index} has an unexpected offset")
    if len(placement.pieces) == 1:
        # The state itself may already be on the host, where the next step would change it.
        return {name: values.clone() for name, values in rank_tensors.items()}
    whole = {}
    for name in names:
        if rank != owner:
            torch.distributed.send(rank_tensors[name], group=group, group_dst=owner)
            continue
        whole[name] = torch.empty(placement.end - placement.begin, dtype=torch.float32)
        for other, piece in placement.pieces.items():
            if other == owner:
                whole[name][piece] = rank_tensors[name]
            else:
                torch.distributed.recv(whole[name][piece], group=group, group_src=other)
    return whole
