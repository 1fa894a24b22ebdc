"""The order of messages: ranks with blocking, unbuffered sends and receives never deadlock."""

import numpy as np
import pytest

from common.planning.schedule_check import needs_of
from conftest import seed_all
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    children_of,
    forward_only_pipeline,
    tree_1f1b,
)
from megatron_dta.core.planning.pipeline.simulation import Message, Timeline, global_order, message_order, simulate
from megatron_dta.core.planning.segments.plan import OpKind
from pipeline_cases import SHAPES, random_costs, random_tree, uniform_costs


def rank_programs(schedule: PipelineSchedule, timeline: Timeline) -> list[list[PipelineOp | Message]]:
    """Arrange the ops and messages of each rank in the global order. A message is in the lists of both of its ranks.

    The position of a message is the end of its op in the timeline. On the receiver, it comes before the op that needs
    it and after the ops that begin before that time.
    """
    programs: list[list[PipelineOp | Message]] = [[] for _ in schedule.ops]
    for stage, entry in global_order(schedule, timeline):
        programs[stage].append(entry)
        if isinstance(entry, Message):
            programs[entry.receiver].append(entry)
    return programs


def run_with_rendezvous(
    schedule: PipelineSchedule, programs: list[list[PipelineOp | Message]], parents: list[int]
) -> list[int]:
    """How far each rank comes where a message passes only while both ranks stand at it; checks what ops need."""
    children = children_of(parents)
    at = [0] * len(programs)
    done: set[tuple[int, PipelineOp]] = set()
    arrived: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                entry = program[at[rank]]
                if isinstance(entry, Message):
                    other = entry.receiver if rank == entry.sender else entry.sender
                    if at[other] == len(programs[other]) or programs[other][at[other]] != entry:
                        break
                    sent = PipelineOp(entry.kind, entry.segment, entry.virtual_stage // schedule.num_stages)
                    assert (entry.sender, sent) in done, "sent before it was made"
                    arrived.add(entry)
                    at[other] += 1
                else:
                    for stage, need in needs_of(entry, rank, schedule, parents, children):
                        assert (stage, need) in done
                        if stage != rank:
                            v = schedule.virtual_stage(stage, need.chunk)
                            assert Message(stage, rank, need.kind, need.segment, v) in arrived
                    done.add((rank, entry))
                at[rank] += 1
                moved = True
    return at


@pytest.mark.parametrize("seed", range(4))
def test_rendezvous_never_halts(seed: int) -> None:
    rng = seed_all(seed)
    for number in range(30):
        count, stages, chunks = int(rng.integers(0, 14)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        parents, lengths = random_tree(rng, count, SHAPES[number % len(SHAPES)]), rng.integers(1, 50, count)
        costs = random_costs(rng, stages * chunks, lengths)
        if number % 5 == 0:
            schedule = forward_only_pipeline(count, stages, chunks)
        elif number % 5 == 1 and chunks == 1:
            schedule = tree_1f1b(parents, stages)
        else:
            schedule = plan_pipeline(parents, lengths, costs, stages, chunks)
        timeline = simulate(schedule, parents, costs, float(rng.choice([0.0, 0.3])))
        programs, order = rank_programs(schedule, timeline), message_order(schedule, timeline)
        assert [[e for e in p if isinstance(e, PipelineOp)] for p in programs] == schedule.ops
        for rank, program in enumerate(programs):
            messages = [entry for entry in program if isinstance(entry, Message)]
            assert messages == [message for message in order if rank in (message.sender, message.receiver)]
        directions = 1 if number % 5 == 0 else 2
        crossing = stages * chunks - 1 if stages > 1 else 0
        assert len(order) == len(set(order)) == directions * crossing * count
        assert run_with_rendezvous(schedule, programs, parents.tolist()) == [len(program) for program in programs]


def test_the_model_of_execution_sees_a_halt() -> None:
    """Ordering each rank's messages by its own ops alone deadlocks: two neighbours send to each other."""
    parents, stages = np.full(6, -1), 2
    schedule = tree_1f1b(parents, stages)
    programs: list[list[PipelineOp | Message]] = [[], []]
    for rank, ops in enumerate(schedule.ops):
        for op in ops:
            forward = Message(0, 1, OpKind.FORWARD, op.segment, 0)
            backward = Message(1, 0, OpKind.BACKWARD, op.segment, 1)
            message, receives = (forward, rank == 1) if op.kind is OpKind.FORWARD else (backward, rank == 0)
            programs[rank].extend([message, op] if receives else [op, message])
    at = run_with_rendezvous(schedule, programs, parents.tolist())
    assert at[0] < len(programs[0])
    timeline = simulate(schedule, parents, uniform_costs(6, stages))
    good = rank_programs(schedule, timeline)
    assert run_with_rendezvous(schedule, good, parents.tolist()) == [len(program) for program in good]
