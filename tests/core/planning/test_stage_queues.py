"""A model of a device's streams and queues: what the order of posts costs when ops take other times than planned.

With one queue an entry leaves it when it starts, so an entry that waits for an earlier one of its stream holds up all
behind it. With many queues only computation waits for computation, and a message for those on its own stream.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_counts import segment_counts
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.schedule import PipelineOp
from megatron_dta.core.planning.pipeline.simulation import Message, message_of, op_times, simulate
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.schedule import OpKind
from megatron_dta.core.planning.step.passes import PassPlan, PipelineShape, StepBudget
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.shapes.decoder import DecoderShape

STAGES = 4
MODEL = CostModel.from_shape(DecoderShape(40, 5120, 17408, 40, 8, 128, 151936))
SEND_SECONDS = 4e-4  # 16 MB between two GPUs of one host

Entry = tuple[str, PipelineOp | Message]


def entries_of(plan: PassPlan, stage: int) -> list[Entry]:
    """What a stage launches, in order: as ``engine.stage_transport`` posts its messages."""
    posts = deque(message for message in plan.messages if stage in (message.sender, message.receiver))
    entries: list[Entry] = []

    def post_receives() -> None:
        while posts and posts[0].receiver == stage:
            entries.append(("receive", posts.popleft()))

    post_receives()
    for op in plan.schedule.ops[stage]:
        entries.append(("op", op))
        if message_of(plan.schedule, stage, op) is not None:
            entries.append(("send", posts.popleft()))
            post_receives()
    return entries


class Devices:
    """Runs all stages' entries; single chunk."""

    def __init__(self, plan: PassPlan, costs: PipelineCosts, one_queue: bool) -> None:
        self.plan, self.times, self.one_queue = plan, op_times(costs), one_queue
        self.free, self.busy = [0.0] * STAGES, 0.0
        self.started: dict[tuple[int, Message], float] = {}
        self.done: dict[Message, float] = {}
        self.last: dict[tuple[int, int, int], Message] = {}
        self.posted: list[tuple[int, Message, float, Message | None]] = []

    def start(self, stage: int, message: Message, now: float, before: Message | None) -> bool:
        """Start a side of a message, if the one before on its stream is done."""
        if before is not None and before not in self.done:
            return False
        self.started[stage, message] = max(now, 0.0 if before is None else self.done[before])
        sides = [self.started.get((side, message)) for side in (message.sender, message.receiver)]
        if None not in sides:
            self.done[message] = max(sides) + SEND_SECONDS
        return True

    def launch(self, stage: int, what: str, entry: PipelineOp | Message) -> bool:
        """Take the entry off the stage's queue, if it can leave it."""
        if what == "op":
            source = stage - 1 if entry.kind is OpKind.FORWARD else stage + 1
            begin = self.free[stage]
            if 0 <= source < STAGES:
                needed = Message(source, stage, entry.kind, entry.segment, source)
                if needed not in self.done:
                    return False
                begin = max(begin, self.done[needed])
            seconds = self.times[entry.kind][stage][entry.segment]
            self.free[stage], self.busy = begin + seconds, self.busy + seconds
            return True
        stream = stage, entry.sender, entry.receiver
        before = self.last.get(stream)
        if self.one_queue:
            if not self.start(stage, entry, self.free[stage], before):
                return False
            self.free[stage] = self.started[stage, entry]
        else:
            self.posted.append((stage, entry, self.free[stage], before))
        self.last[stream] = entry
        return True

    def utilisation(self) -> float:
        queues = [deque(entries_of(self.plan, stage)) for stage in range(STAGES)]
        moved = True
        while moved:
            waiting = [each for each in self.posted if not self.start(*each)]
            moved, self.posted = len(waiting) < len(self.posted), waiting
            for stage, queue in enumerate(queues):
                while queue and self.launch(stage, *queue[0]):
                    queue.popleft()
                    moved = True
        assert not any(queues), "it came to a halt"
        return self.busy / (STAGES * max(self.free))


@pytest.fixture(scope="module")
def step() -> tuple[StepPlan, list[np.ndarray]]:
    rollouts = load_rollouts(rollout_file("tau1_airline_gpt4o_4x50.npz"), max_sequences=40)
    samples = [TrainingSample(rollout.token_ids, rollout.loss_mask) for rollout in rollouts]
    plan = plan_step(samples, "dta", StepBudget(1600, 16384), PipelineShape(STAGES, 1, (10,) * STAGES, MODEL))
    return plan, [sample.loss_mask[: sample.needed_length()] for sample in samples]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_only_many_queues_reach_what_the_schedule_can(step: tuple[StepPlan, list[np.ndarray]], noise: float) -> None:
    """A last stage that takes longer than planned, and noise."""
    plan, masks = step
    rng, segments = seed_all(1), plan.segments
    costs = PipelineCosts.of_segments(MODEL, *segment_counts(segments, masks), [10] * STAGES)
    forward, backward = (each * rng.lognormal(0, noise, each.shape) for each in (costs.forward, costs.backward))
    forward[-1] += 2e-3
    backward[-1] += 4e-3
    real = PipelineCosts(forward, backward)
    free = simulate(plan.training.schedule, segments.segment_parent, real).utilisation
    one, many = (Devices(plan.training, real, one_queue).utilisation() for one_queue in (True, False))
    print(f"schedule {free:.4f}, many queues {many:.4f}, one queue {one:.4f}")
    assert many > 0.995 * free
    assert one < 0.95 * many
