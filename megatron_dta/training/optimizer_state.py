"""A distributed optimizer's state for a checkpoint, each parameter's on the rank that has most of it.

Megatron's distributed optimizer divides a buffer of all parameters evenly over the data-parallel ranks, without regard
to where a parameter begins. A checkpoint that loads on any mesh has whole parameters. Megatron gathers the whole buffer
for it: on one rank, which then writes alone, or on all, in the memory of all. Here only the parameters that lie across
a boundary move, to the rank with the largest piece; each rank then writes about its share of the buffer, and the files
hold the same tensors as otherwise.

A copy on the host is made of what the rank writes and of nothing else: twelve bytes a parameter, divided by the number
of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of Adam; a newer Megatron says which states an optimizer has.
_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Placement:
    """Where a parameter lies in its buffer, and what each data-parallel rank has of it.

    Attributes:
        begin, end: elements of the buffer.
        bucket: the part of the buffer that it is in.
        pieces: the ranks that have some of it, and which elements of the parameter.
    """

    parameter: torch.nn.Parameter
    begin: int
    end: int
    bucket: int
    pieces: dict[int, slice]

    @property
    def owner(self) -> int:
        """The rank with the largest piece, the first of several."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank].stop - self.pieces[rank].start, -rank))


class WholeParameters:
    """Stands for a buffer with all elements, and has only those of some parameters.

    ``[begin:end]`` gives the elements of a parameter, or a tensor without memory if it is another rank's.
    """

    def __init__(self, found: dict[tuple[int, int], Tensor]) -> None:
        self._found = found

    def __getitem__(self, part: slice) -> Tensor:
        own = self._found.get((part.start, part.stop))
        return torch.empty(part.stop - part.start, device="meta") if own is None else own


def owned_state(optimizer: Any) -> dict[Any, Any]:
    """What ``DistributedOptimizer.get_parameter_state_dp_zero`` gives, with only this rank's parameters in it.

    Every data-parallel rank of the optimizer must call this at the same time.
    """
    names = ("param", *getattr(optimizer, "optimizer_state_keys", _STATES))
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        found: dict[str, dict[tuple[int, int], Tensor]] = {name: {} for name in names}
        for placement in placements(optimizer.buffers[index], optimizer.data_parallel_group.size()):
            tensors = _whole(optimizer, index, ranges[dtype][placement.bucket], placement, names)
            for name, values in tensors.items():
                found[name][placement.begin, placement.end] = values
        state[index] = {dtype: {name: WholeParameters(parts) for name, parts in found.items()}}
    return state


def placements(buffer: Any, num_ranks: int) -> Iterator[Placement]:
    """All parameters of a buffer, in its own order."""
    for parameter, (begin, end, bucket) in buffer.param_index_map.items():
        first = buffer.buckets[bucket].offset
        share = buffer.buckets[bucket].grad_data.numel() // num_ranks
        pieces = {}
        for rank in range((begin - first) // share, (end - 1 - first) // share + 1):
            from_, to = max(begin, first + rank * share), min(end, first + (rank + 1) * share)
            pieces[rank] = slice(from_ - begin, to - begin)
        yield Placement(parameter, begin, end, bucket, pieces)


def keep_owned(state: Any) -> Any:
    """A sharded state without the parameters of other ranks, and with this rank as the one that writes its own."""
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
            # Its last number is the data-parallel rank's: the others may differ, where tensor ranks hold the same.
            part.replica_id = (*part.replica_id[:-1], 0)
        kept[name] = part
    return kept


def _whole(
    optimizer: Any, index: int, bucket_ranges: dict[str, Any], placement: Placement, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """A parameter's state on its owner, in float32 on the host; nothing on the other ranks."""
    rank = optimizer.data_parallel_group.rank()
    if rank not in placement.pieces:
        return {}
    group, owner = optimizer.data_parallel_group_gloo, placement.owner
    tensors = optimizer._get_main_param_and_optimizer_states(placement.parameter)
    own = {name: tensors[name].detach().to("cpu", torch.float32).contiguous().view(-1) for name in names}
    part = bucket_ranges["param_map"][placement.parameter]["param"]
    if (part.start, part.end) != (placement.pieces[rank].start, placement.pieces[rank].stop):
        raise RuntimeError(f"a parameter of buffer {index} does not lie where it was expected")
    if len(placement.pieces) == 1:
        # The state itself may be on the host, and the next step changes it.
        return {name: values.clone() for name, values in own.items()}
    whole = {}
    for name in names:
        if rank != owner:
            torch.distributed.send(own[name], group=group, group_dst=owner)
            continue
        whole[name] = torch.empty(placement.end - placement.begin, dtype=torch.float32)
        for other, piece in placement.pieces.items():
            if other == owner:
                whole[name][piece] = own[name]
            else:
                torch.distributed.recv(whole[name][piece], group=group, group_src=other)
    return whole
