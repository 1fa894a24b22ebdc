"""Channels between stages and the device's queues: one direction on each channel, outputs gone once they are sent."""

import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dta.training.config.derived.device_queues import MANY_QUEUES, QUEUES, set_device_queues
from mesh_worker import MeshCase, run_cases, run_on_ranks
from pipeline_shared import pipeline_case


@pytest.mark.parametrize(
    ("before", "sizes", "after", "warns"),
    [
        (None, (1, 1), None, False),
        (None, (2, 1), "1", False),
        (None, (2, 2), MANY_QUEUES, False),
        ("1", (2, 2), "1", True),
    ],
)
def test_queues_of_a_device(before: str | None, sizes: tuple[int, int], after: str | None, warns: bool) -> None:
    environment = {} if before is None else {QUEUES: before}
    warning = set_device_queues(environment, *sizes)
    assert environment.get(QUEUES) == after
    assert (warning is not None) == warns


def watch_messages(rank: int, case: MeshCase) -> tuple[list[tuple[str, int, int, int]], int, int]:
    """Run a case on two stages of two parts; (call, group, from, to) of every message, outputs sent and still alive.

    Outputs are looked at at every forward, except for the one whose message may still be on its way.
    """
    import megatron_dta.core.engine.stage_transport as transport
    from megatron_dta.core.engine.stage_run import StageRun
    from megatron_dta.core.planning.segments.plan import OpKind

    calls: list[tuple[str, int, int, int]] = []
    outputs: list[weakref.ref] = []
    alive = 0
    send, isend, irecv = transport.StageTransport.send, torch.distributed.isend, torch.distributed.irecv

    def watched_send(self: Any, kind: Any, segment: int, stage: int, tensor: torch.Tensor, *more: Any) -> None:
        send(self, kind, segment, stage, tensor, *more)
        while self._leaving:
            self._leaving.popleft()[1].wait()
        if kind is OpKind.FORWARD:
            outputs.append(weakref.ref(tensor))

    def watched(function: Any, name: str) -> Any:
        def call(tensor: torch.Tensor, peer: int, group: Any) -> Any:
            calls.append((name, id(group), rank, peer) if name == "isend" else (name, id(group), peer, rank))
            return function(tensor, peer, group=group)

        return call

    forward = StageRun._forward

    def counted(self: Any, *arguments: Any, **keywords: Any) -> None:
        nonlocal alive
        forward(self, *arguments, **keywords)
        alive = max(alive, sum(output() is not None for output in outputs))

    with (
        mock.patch.object(transport.StageTransport, "send", watched_send),
        mock.patch.object(torch.distributed, "isend", watched(isend, "isend")),
        mock.patch.object(torch.distributed, "irecv", watched(irecv, "irecv")),
        mock.patch.object(StageRun, "_forward", counted),
    ):
        run_cases(rank, {"": case})
    return calls, len(outputs), alive


def test_a_channel_has_one_direction_and_outputs_are_free_once_sent(tmp_path) -> None:
    case = pipeline_case("pp2-vpp2")
    for calls, sent, alive in run_on_ranks(watch_messages, case, 2, tmp_path, "gloo"):
        directions: dict[int, set[tuple[int, int]]] = {}
        for _, group, sender, receiver in calls:
            directions.setdefault(group, set()).add((sender, receiver))
        assert sorted(directions.values(), key=sorted) == [{(0, 1)}, {(1, 0)}]
        assert {name for name, *_ in calls} == {"isend", "irecv"}
        assert sent >= 8
        assert alive == 0
