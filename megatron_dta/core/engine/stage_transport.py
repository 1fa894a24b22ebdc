"""Sends hidden states to the next virtual stage and their gradients to the previous one.

Every rank knows the whole schedule, so the ranks negotiate nothing: shapes follow from the plan, and all ranks post
their sends and receives in one common order (``message_order``), that of a valid execution. This order cannot deadlock,
even if two ranks share a single channel on which each message waits for its receiver, as with NCCL. A receive is posted
as soon as no earlier send is outstanding, which is about one op before its message is needed. Nothing waits for a send.
Both therefore overlap with the computation. Messages to higher and to lower ranks have separate channels
(``stage_channels``). Megatron-Core's own communicator is not used because its two directions wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_dta.core.model.parallel.stage_channels import StageChannels
from megatron_dta.core.planning.pipeline.simulation import Message
from megatron_dta.core.planning.segments.plan import OpKind


class _Key(NamedTuple):
    """Identifies a message for its sender and its receiver; the virtual stage is that of the sender."""

    kind: OpKind
    segment: int
    virtual_stage: int


class StageTransport:
    """Sends and receives of one rank in one pass over the schedule.

    Args:
        shape_of: gives the shape of the hidden states of a number of tokens.
        channels: process groups between the ranks of the pipeline.
        stage: this rank's position in the pipeline.
        messages: all messages of the pass in the common order.
        lengths: tokens of each segment.
        dtype, device: of the hidden states.
    """

    def __init__(
        self,
        shape_of: Callable[[int], tuple[int, int, int]],
        channels: StageChannels,
        stage: int,
        messages: Sequence[Message],
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._channels, self._stage, self._dtype, self._device = channels, stage, dtype, device
        self._shapes = [shape_of(length) for length in lengths]
        self._posts = deque(message for message in messages if self._stage in (message.sender, message.receiver))
        self._arriving: dict[_Key, tuple[Tensor, Work]] = {}
        self._leaving: deque[tuple[Tensor, Work]] = deque()
        self._post_receives()

    def receive(self, kind: OpKind, segment: int, virtual_stage: int) -> Tensor:
        """The input of ``kind`` (FORWARD: hidden states, BACKWARD: gradient) for this rank's ``virtual_stage``.

        The host waits for the message; on a GPU, the stream waits for it instead.
        """
        source = virtual_stage - 1 if kind is OpKind.FORWARD else virtual_stage + 1
        tensor, work = self._arriving.pop(_Key(kind, segment, source))
        work.wait()
        return tensor

    def send(self, kind: OpKind, segment: int, virtual_stage: int, tensor: Tensor) -> None:
        """Send the output of this rank's ``virtual_stage`` in its op of ``kind``; returns at once."""
        if tuple(tensor.shape) != self._shapes[segment]:
            raise ValueError(f"the message has shape {list(tensor.shape)}, not {list(self._shapes[segment])}")
        message = self._posts.popleft()
        if message[2:] != _Key(kind, segment, virtual_stage):
            raise ValueError(f"stage {virtual_stage} sends {kind.value}({segment}) where {message} is planned")
        leaving, receiver = tensor.detach().contiguous(), self._channels.ranks[message.receiver]
        self._leaving.append((leaving, torch.distributed.isend(leaving, receiver, group=self._channel(message))))
        self._post_receives()
        while self._leaving and self._leaving[0][1].is_completed():
            self._leaving.popleft()

    def finish(self) -> None:
        """Wait for the outstanding sends."""
        if self._posts or self._arriving:
            raise ValueError(f"{len(self._posts)} messages were not sent and {len(self._arriving)} not read")
        for _, work in self._leaving:
            work.wait()
        self._leaving.clear()

    def _post_receives(self) -> None:
        """Post the receives that come before this rank's next send."""
        while self._posts and self._posts[0].receiver == self._stage:
            message = self._posts.popleft()
            tensor = torch.empty(self._shapes[message.segment], dtype=self._dtype, device=self._device)
            sender = self._channels.ranks[message.sender]
            work = torch.distributed.irecv(tensor, sender, group=self._channel(message))
            self._arriving[_Key(message.kind, message.segment, message.virtual_stage)] = tensor, work

    def _channel(self, message: Message) -> ProcessGroup:
        return self._channels.up if message.sender < message.receiver else self._channels.down
