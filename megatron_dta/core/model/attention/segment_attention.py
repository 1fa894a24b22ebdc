"""Chooses the implementation of a segment's attention, and prepares its plans for a step.

``tree_attention_impl`` selects the Triton kernels or the plain PyTorch reference. The choice is made once per engine,
from the device, the dtype and the size of heads. For the kernels, a step then gets one plan per segment.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np
import torch

from dta_kernels.tree_attention.blocks import local_key_end
from dta_kernels.tree_attention.config import MAX_HEAD_SIZE, supports
from dta_kernels.tree_attention.plan import AttentionShape, TreeAttentionPlan, plan_tree_attention
from megatron_dta.core.model.kernels import choose_triton
from megatron_dta.core.planning.segments.plan import RootPaths, SegmentPlan

FLAG = "tree_attention_impl"
# The shape of an attention to a number of keys.
ShapeOf = Callable[[int], AttentionShape]


def choose_attention(impl: str, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton kernels compute an attention, rather than the reference.

    Args:
        impl: "triton", "reference", or "auto": Triton on a CUDA device if its kernels support the inputs.

    Raises:
        InputError: "triton" is requested and cannot run.
    """
    refusal = None
    if not supports(head_size, dtype):
        refusal = (
            f" takes float32, bfloat16 and float16 and heads of at most {MAX_HEAD_SIZE} channels, not "
            f"{str(dtype).removeprefix('torch.')} with {head_size}; use auto or reference"
        )
    return choose_triton(FLAG, impl, device, refusal)


class SegmentAttentionPlans:
    """Block tables of a step's segments, made and uploaded at a request and kept while a context uses them.

    Making the tables takes the host some milliseconds a segment. The device meanwhile computes the previous segment,
    so it does not stay idle until all tables are made.
    """

    def __init__(self, segments: SegmentPlan, paths: RootPaths, shape: ShapeOf, device: torch.device) -> None:
        self._segments, self._paths, self._shape, self._device = segments, paths, shape, device
        self._made: WeakValueDictionary[int, TreeAttentionPlan] = WeakValueDictionary()

    def of_segment(self, segment: int) -> TreeAttentionPlan | None:
        """The plan of a segment, None for one without tokens."""
        plan = self._made.get(segment)
        if plan is None:
            ends = key_ends(self._segments, self._paths, segment)
            if not ends[1]:
                return None
            plan = self._made[segment] = plan_tree_attention(*ends, self._shape(len(ends[0])), self._device)
        return plan


def key_ends(segments: SegmentPlan, paths: RootPaths, segment: int) -> tuple[np.ndarray, int]:
    """``local_key_end`` of a segment, and its tokens."""
    subtree_end, (begin, end) = segments.tree.subtree_end, segments.segment_start[segment : segment + 2].tolist()
    ancestor_end = subtree_end[paths.stream_indices(segment)]
    return local_key_end(begin, end - begin, ancestor_end, subtree_end[begin:end]), end - begin
