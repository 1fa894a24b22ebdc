"""Plans made before a step runs: ranks, segments, schedule, what is recomputed, index arrays. NumPy only."""

from megatron_dta.planning.cost_model import CostModel
from megatron_dta.planning.mini_batches import cut_mini_batches
from megatron_dta.planning.partition import Partition, partition_samples, partition_sequences
from megatron_dta.planning.recompute import choose_kept_segments
from megatron_dta.planning.schedule import Op, OpKind, allocate_slots, depth_first_schedule, forward_only_schedule
from megatron_dta.planning.segment_plan import SegmentPlan, segment_parents
from megatron_dta.planning.segments import plan_segments

__all__ = [
    "CostModel",
    "Op",
    "OpKind",
    "Partition",
    "SegmentPlan",
    "allocate_slots",
    "choose_kept_segments",
    "cut_mini_batches",
    "depth_first_schedule",
    "forward_only_schedule",
    "partition_samples",
    "partition_sequences",
    "plan_segments",
    "segment_parents",
]
