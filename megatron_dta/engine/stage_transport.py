"""Messages between pipeline stages: hidden states go to the next virtual stage, their gradients to the one before.

Every rank knows the whole schedule, so nothing is negotiated: shapes follow from the plan, and all ranks post their
sends and receives in one common order (``message_order``), which is the order of an execution that works. So it cannot
deadlock even where two ranks share a single channel on which each message waits for its receiver, as with NCCL. A
receive is posted as soon as no earlier send is outstanding, long before it is needed, and no send is waited for: both
run beside the computation. The messages themselves are Megatron-Core's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_dta.model import TreeGPTModel
from megatron_dta.planning.pipeline_simulation import Message
from megatron_dta.planning.schedule import OpKind


class _Key(NamedTuple):
    """A message as its sender and its receiver know it; the virtual stage is the sender's."""

    kind: OpKind
    segment: int
    virtual_stage: int


class StageTransport:
    """Sends and receives of one rank in one pass over the schedule.

    Args:
        model: a part of the model.
        messages: all messages of the pass in the common order.
        lengths: tokens of each segment.
    """

    def __init__(self, model: TreeGPTModel, messages: Sequence[Message], lengths: Sequence[int]) -> None:
        self._communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), model.config)
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._shapes = [model.stage_shape(length) for length in lengths]
        self._posts = deque(message for message in messages if self._stage in (message.sender, message.receiver))
        self._arriving: dict[_Key, tuple[Tensor, dict[str, Any]]] = {}
        self._leaving: deque[tuple[Tensor, dict[str, Any]]] = deque()
        self._post_receives()

    def receive(self, kind: OpKind, segment: int, virtual_stage: int) -> Tensor:
        """Input of ``kind`` (FORWARD: hidden states, BACKWARD: gradient) of this rank's ``virtual_stage``; waits."""
        source = virtual_stage - 1 if kind is OpKind.FORWARD else virtual_stage + 1
        tensor, handles = self._arriving.pop(_Key(kind, segment, source))
        for handle in handles.values():
            handle.wait()
        return tensor.detach()

    def send(self, kind: OpKind, segment: int, virtual_stage: int, tensor: Tensor) -> None:
        """Send what this rank's ``virtual_stage`` made in its op of ``kind``; returns at once."""
        if tuple(tensor.shape) != self._shapes[segment]:
            raise ValueError(f"the message has shape {list(tensor.shape)}, not {list(self._shapes[segment])}")
        expected = self._posts.popleft()
        if (expected.kind, expected.segment, expected.virtual_stage) != (kind, segment, virtual_stage):
            raise ValueError(f"stage {virtual_stage} sends {kind.value}({segment}) where {expected} is planned")
        tensor = tensor.detach().contiguous()
        if kind is OpKind.FORWARD:
            _, handles = self._communicator.send_forward_recv_forward(tensor, False, None, overlap_p2p_comm=True)
        else:
            _, handles = self._communicator.send_backward_recv_backward(tensor, False, None, overlap_p2p_comm=True)
        self._leaving.append((tensor, handles))
        self._post_receives()
        while self._leaving and all(handle.is_completed() for handle in self._leaving[0][1].values()):
            self._leaving.popleft()

    def finish(self) -> None:
        """Wait for what is still leaving."""
        if self._posts or self._arriving:
            raise ValueError(f"{len(self._posts)} messages were not sent and {len(self._arriving)} not read")
        for _, handles in self._leaving:
            for handle in handles.values():
                handle.wait()
        self._leaving.clear()

    def _post_receives(self) -> None:
        """Post the receives up to this rank's next send."""
        while self._posts and self._posts[0].receiver == self._stage:
            message = self._posts.popleft()
            shape = self._shapes[message.segment]
            if message.kind is OpKind.FORWARD:
                arriving = self._communicator.send_forward_recv_forward(None, True, shape, overlap_p2p_comm=True)
            else:
                arriving = self._communicator.send_backward_recv_backward(None, True, shape, overlap_p2p_comm=True)
            self._arriving[_Key(message.kind, message.segment, message.virtual_stage)] = arriving
