"""Plans made before a step runs: ranks, segments, schedule, what is recomputed, index arrays. NumPy only."""

from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, partition_sequences
from megatron_dta.core.planning.partition.mini_batches import cut_mini_batches
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.planner import plan_pipeline
from megatron_dta.core.planning.pipeline.schedule import (
    PipelineOp,
    PipelineSchedule,
    check_schedule,
    forward_only_pipeline,
    tree_1f1b,
)
from megatron_dta.core.planning.pipeline.simulation import Message, Timeline, message_order, simulate
from megatron_dta.core.planning.segments.cut import plan_segments
from megatron_dta.core.planning.segments.plan import SegmentPlan, segment_parents
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.planning.segments.schedule import Op, OpKind, allocate_slots, depth_first_schedule

__all__ = [
    "CostModel",
    "Message",
    "Op",
    "OpKind",
    "Partition",
    "PipelineCosts",
    "PipelineOp",
    "PipelineSchedule",
    "SegmentPlan",
    "Timeline",
    "allocate_slots",
    "check_schedule",
    "choose_kept_segments",
    "cut_mini_batches",
    "depth_first_schedule",
    "forward_only_pipeline",
    "message_order",
    "partition_sequences",
    "plan_pipeline",
    "plan_segments",
    "segment_parents",
    "simulate",
    "tree_1f1b",
]
