"""Plans the passes of a step over a pipeline, and extracts the part of one stage.

A pass is a schedule of ops and one order of messages that all stages follow. A stage's part is its ops, the slots in
which each of its model chunks keeps keys and values, and its messages. A single process is a pipeline of one stage: its
ops run depth first, nothing is sent, and nothing of ``pipeline`` but the schedule's form is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dta.core.planning.costs.memory_budget import ChunkTensors, MemoryBudget, peak_bytes
from megatron_dta.core.planning.costs.model import DEFAULT_COSTS, CostModel
from megatron_dta.core.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    forward_only_pipeline,
    next_op_is_backward,
)
from megatron_dta.core.planning.segments.plan import Op, OpKind, SegmentPlan, SegmentTree, depth_first_schedule
from megatron_dta.core.planning.segments.recompute import kept_on_stages
from megatron_dta.core.planning.segments.slots import allocate_slots

if TYPE_CHECKING:
    from megatron_dta.core.planning.costs.state_bytes import StateBytes, StepStates
    from megatron_dta.core.planning.pipeline.simulation import Message, Timeline
    from megatron_dta.core.planning.pipeline.timeline import TimelineEvent
    from megatron_dta.core.planning.segments.runs import ForkCounts, SegmentRuns


@dataclass(frozen=True)
class StepBudget:
    """Limits within which a step is planned.

    Attributes:
        segment_tokens: maximum number of tokens in a segment. None lets the planner choose if costs were measured or
            memory is limited (``choose_step``), and means 2,048 otherwise.
        memory_tokens: maximum number of tokens in flight; None for the planner's choice.
        activation_tokens: maximum number of tokens in flight whose activations are kept; None keeps all, 0 recomputes
            all. Not used if memory is limited in bytes.
    """

    segment_tokens: int | None = None
    memory_tokens: int | None = None
    activation_tokens: int | None = None


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share experts. They exchange their plans and run the same ops.

    Attributes:
        rank: this rank's index in the group.
        gather: function that returns the argument of every rank, in the order of the group.
        min_segments: every rank runs at least this many segments, even if no rank has any.
    """

    rank: int
    gather: Callable[[Any], list[Any]]
    min_segments: int = 0


@dataclass(frozen=True)
class PipelineShape:
    """The pipeline that a step is planned for.

    Attributes:
        num_stages, num_model_chunks: number of pipeline ranks, and of virtual stages (model chunks) on each.
        layers: number of layers of each virtual stage.
        cost_model: cost model of the whole model.
        max_in_flight_tokens: maximum number of tokens that a stage holds; None for the planner's default.
        memory: memory budget of each rank, within which the planner chooses the tokens in flight and the kept
            activations; None for no limit in bytes.
        is_measured: whether the cost model is in seconds of this machine, so that it may choose the segment size.
        group: the ranks with which this one shares experts; None to plan for this rank alone.
        context_size: ranks that divide the tokens of a segment; segments are longer by this factor.
    """

    num_stages: int = 1
    num_model_chunks: int = 1
    layers: tuple[int, ...] = (1,)
    cost_model: CostModel = DEFAULT_COSTS
    max_in_flight_tokens: int | None = None
    memory: MemoryBudget | None = None
    is_measured: bool = False
    group: RankGroup | None = None
    context_size: int = 1


@dataclass(frozen=True)
class PassPlan:
    """One pass over the segments.

    Attributes:
        schedule: the ops of all stages.
        messages: all messages in an order in which they can be posted.
        timeline: predicted times of the ops; None for a single stage.
        kept: bool [virtual stages, segments], segments that keep their activations from forward to backward; the others
            run their forward again before the backward. None for a pass without backwards.
        most_tokens: for each stage and op, the most tokens that any rank which shares experts with this one runs in it;
            None if this rank plans alone.
    """

    schedule: PipelineSchedule
    messages: list[Message]
    timeline: Timeline | None = None
    kept: np.ndarray | None = None
    most_tokens: list[list[int]] | None = None

    def planned_events(self) -> list[TimelineEvent]:
        """The events of the timeline; none for a single stage."""
        from megatron_dta.core.planning.pipeline.timeline import timeline_events

        return [] if self.timeline is None else timeline_events(self.schedule, self.timeline)


@dataclass(frozen=True)
class StageProgram:
    """One stage's part of a pass.

    Attributes:
        ops: the ops of the stage, in order.
        slot_start, num_slots: for each model chunk, the first K/V slot of every segment (int64 [num_segments]) and the
            number of slots.
        messages: the messages of all stages.
        most_tokens: of each op, see ``PassPlan``; None if the rank plans alone.
    """

    ops: list[PipelineOp]
    slot_start: list[np.ndarray]
    num_slots: list[int]
    messages: list[Message]
    most_tokens: list[int] | None


def plan_passes(
    segments: SegmentPlan, segment_edges: Sequence[int], kept: np.ndarray, shape: PipelineShape
) -> tuple[PassPlan, PassPlan]:
    """Plan the training pass and the forward-only pass.

    Args:
        segment_edges: number of trained edges in each segment.
        kept: bool [num_segments], see ``plan_training_pass``.
    """
    if shape.num_stages == 1:
        forwards = [PipelineOp(OpKind.FORWARD, segment) for segment in range(segments.num_segments)]
        return _depth_first_pass(segments, kept), PassPlan(PipelineSchedule(1, 1, [forwards]), [])
    from megatron_dta.core.planning.pipeline.costs import PipelineCosts
    from megatron_dta.core.planning.pipeline.simulation import message_order, simulate

    counts = segments.lengths, segments.attention_pairs, np.asarray(segment_edges)
    training = plan_training_pass(segments, counts, kept, shape)
    forward_only = forward_only_pipeline(segments.num_segments, shape.num_stages, shape.num_model_chunks)
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers)
    timeline = simulate(forward_only, segments.segment_parent, costs)
    return training, PassPlan(forward_only, message_order(forward_only, timeline), timeline)


def _depth_first_pass(tree: SegmentTree, kept: np.ndarray) -> PassPlan:
    """The training pass of a single stage."""
    ops = [PipelineOp(kind, segment) for kind, segment in depth_first_schedule(tree)]
    return PassPlan(PipelineSchedule(1, 1, [ops]), [], None, np.array(kept, dtype=bool, ndmin=2))


def plan_training_pass(
    tree: SegmentTree, counts: tuple[np.ndarray, np.ndarray, np.ndarray], kept: np.ndarray, shape: PipelineShape
) -> PassPlan:
    """Plan the forwards and backwards of all segments.

    Args:
        counts: number of tokens, attention pairs and trained edges in each segment.
        kept: bool [num_segments], segments that keep their activations on all stages. A pipeline stage that runs a
            segment's backward right after its forward keeps them as well, because that is free.
    """
    if shape.num_stages == 1:
        return _depth_first_pass(tree, kept)
    from megatron_dta.core.planning.pipeline.costs import PipelineCosts
    from megatron_dta.core.planning.pipeline.planner import plan_pipeline
    from megatron_dta.core.planning.pipeline.simulation import message_order, simulate

    parents, expected = tree.segment_parent, kept_on_stages(kept, tree.segment_parent, len(shape.layers))
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers, ~expected)
    schedule = plan_pipeline(
        parents, tree.lengths, costs, shape.num_stages, shape.num_model_chunks, shape.max_in_flight_tokens
    )
    keeps = kept | next_op_is_backward(schedule, tree.num_segments)
    costs = PipelineCosts.of_segments(shape.cost_model, *counts, shape.layers, ~keeps)
    timeline = simulate(schedule, parents, costs)
    return PassPlan(schedule, message_order(schedule, timeline), timeline, keeps)


def stage_program(segments: SegmentPlan, plan: PassPlan, stage: int) -> StageProgram:
    """The part of a pass that ``stage`` runs."""
    ops = plan.schedule.ops[stage]
    slots = [allocate_slots(segments, of_chunk) for of_chunk in _ops_of_chunks(plan, stage)]
    most = None if plan.most_tokens is None else plan.most_tokens[stage]
    return StageProgram(ops, [start for start, _ in slots], [number for _, number in slots], plan.messages, most)


def state_slots(runs: SegmentRuns, plan: PassPlan, stage: int) -> list[tuple[np.ndarray, int]]:
    """For each model chunk of ``stage``, the first slot of every segment's open forks, and the number of slots."""
    return [allocate_slots(runs.segments, ops, runs.open_forks) for ops in _ops_of_chunks(plan, stage)]


def _ops_of_chunks(plan: PassPlan, stage: int) -> list[list[Op]]:
    """The ops of each model chunk of ``stage``."""
    ops = plan.schedule.ops[stage]
    chunks = range(plan.schedule.num_model_chunks)
    return [[Op(op.kind, op.segment) for op in ops if op.chunk == chunk] for chunk in chunks]


def stage_peak_bytes(
    tree: SegmentTree, plan: PassPlan, shape: PipelineShape, stage: int, forks: Sequence[ForkCounts] | None = None
) -> float:
    """Largest number of bytes that ``stage`` holds at once in a training pass; arguments as in ``stage_chunks``."""
    chunks = stage_chunks(tree, plan, shape, stage, forks)
    lengths, paths = tree.lengths.tolist(), tree.in_flight_tokens.tolist()
    return peak_bytes(plan.schedule.ops[stage], lengths, paths, chunks)


def stage_chunks(
    tree: SegmentTree, plan: PassPlan, shape: PipelineShape, stage: int, forks: Sequence[ForkCounts] | None = None
) -> list[ChunkTensors]:
    """What the model chunks of ``stage`` hold in a training pass.

    Args:
        shape: the pipeline; it must have a memory budget, whose byte counts are used.
        forks: of each rank that runs ``tree``, if that is a merged segment tree.
    """
    from megatron_dta.core.planning.segments.runs import SegmentRuns

    if forks is None and shape.memory.has_states:
        forks = [SegmentRuns.of(tree).counts]
    program, chunks = stage_program(tree, plan, stage), []
    for chunk, ops in enumerate(_ops_of_chunks(plan, stage)):
        virtual_stage = chunk * shape.num_stages + stage
        stage_bytes = shape.memory.stages[virtual_stage]
        of_chunk = plan.kept[virtual_stage].tolist(), program.num_slots[chunk], shape.layers[virtual_stage]
        states = states_of_ops(tree, ops, stage_bytes.states, forks)
        chunks.append(ChunkTensors(*of_chunk, virtual_stage > 0, stage_bytes.segments, states))
    return chunks


def states_of_ops(
    tree: SegmentTree, ops: Sequence[Op], sizes: StateBytes | None, forks: Sequence[ForkCounts] | None
) -> StepStates | None:
    """Bytes of the states of a model chunk with these ``ops``, on the rank with most; None if it has none.

    Args:
        forks: of each rank that runs ``tree``.
    """
    from megatron_dta.core.planning.costs.state_bytes import StepStates

    if sizes is None:
        return None
    return StepStates.of(forks, sizes, max(allocate_slots(tree, ops, of_rank.open_forks)[1] for of_rank in forks))
