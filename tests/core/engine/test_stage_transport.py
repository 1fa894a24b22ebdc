"""Messages of a stage leave in the common order of the plan."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_dta.core.engine.stage_transport import StageTransport
from megatron_dta.core.model.parallel.stage_channels import StageChannels
from megatron_dta.core.planning.pipeline.simulation import Message
from megatron_dta.core.planning.segments.schedule import OpKind

F, B = OpKind.FORWARD, OpKind.BACKWARD
# Of stage 1 of 3: the inputs of F(0) and of F(1), then the messages of F(1) and B(0).
MESSAGES = [
    Message(0, 1, F, 0, 0),
    Message(1, 2, F, 0, 1),
    Message(0, 1, F, 1, 0),
    Message(2, 1, B, 0, 2),
    Message(1, 2, F, 1, 1),
    Message(1, 0, B, 0, 1),
]


@pytest.fixture
def sent():
    """(rank, channel, tensor) of each message in the order of sending."""
    found, done = [], mock.Mock(**{"is_completed.return_value": True})

    def isend(tensor, receiver, group):
        found.append((receiver, group, float(tensor[0, 0, 0])))
        return done

    with (
        mock.patch.object(torch.distributed, "isend", isend),
        mock.patch.object(torch.distributed, "irecv", return_value=done),
    ):
        yield found


def make_transport() -> StageTransport:
    channels = StageChannels("up", "down", (10, 11, 12))
    return StageTransport(
        lambda length: (length, 1, 1), channels, 1, MESSAGES, [2, 3], torch.float32, torch.device("cpu")
    )


def output(segment: int, value: float) -> torch.Tensor:
    return torch.full(((2, 3)[segment], 1, 1), value)


def test_messages_leave_in_the_planned_order(sent):
    transport = make_transport()
    transport.receive(F, 0, 1)
    transport.send(F, 0, 1, output(0, 1.0))
    transport.receive(F, 1, 1)
    transport.receive(B, 0, 1)
    transport.send(F, 1, 1, output(1, 2.0))
    transport.send(B, 0, 1, output(0, 3.0))
    transport.finish()
    assert sent == [(12, "up", 1.0), (12, "up", 2.0), (10, "down", 3.0)]


def test_a_message_out_of_order_is_an_error(sent):
    transport = make_transport()
    with pytest.raises(ValueError, match=r"stage 1 sends B\(0\) where .* is planned"):
        transport.send(B, 0, 1, output(0, 3.0))
    with pytest.raises(ValueError, match="messages were not sent"):
        make_transport().finish()
    assert sent == []
