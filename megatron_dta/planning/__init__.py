"""Plans made before a step runs: segments, their schedule, what is recomputed, the step's index arrays. NumPy only."""

from megatron_dta.planning.recompute import choose_kept_segments
from megatron_dta.planning.schedule import Op, OpKind, allocate_slots, depth_first_schedule, forward_only_schedule
from megatron_dta.planning.segment_plan import SegmentPlan, segment_parents
from megatron_dta.planning.segments import plan_segments

__all__ = [
    "Op",
    "OpKind",
    "SegmentPlan",
    "allocate_slots",
    "choose_kept_segments",
    "depth_first_schedule",
    "forward_only_schedule",
    "plan_segments",
    "segment_parents",
]
