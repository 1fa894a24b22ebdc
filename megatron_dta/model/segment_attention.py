"""Which code computes a segment's attention, and what it needs to know before a step.

``--tree-attention-impl`` chooses between Triton kernels and the plain PyTorch reference. The choice is made once per
engine, from the device, the dtype and the head size; a step then gets one plan per segment, or none where the
reference runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from dta_kernels.tree_attention_blocks import local_key_end
from dta_kernels.tree_attention_config import MAX_HEAD_SIZE, supports
from dta_kernels.tree_attention_plan import AttentionShape, TreeAttentionPlan, plan_tree_attention
from megatron_dta.model.triton_choice import choose_triton
from megatron_dta.planning.root_paths import RootPaths
from megatron_dta.planning.segment_plan import SegmentPlan

FLAG = "--tree-attention-impl"


def choose_attention(impl: str, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton kernels compute the attention, rather than the reference.

    Args:
        impl: "triton", "reference", or "auto": Triton on a CUDA device wherever its kernels take the inputs.

    Raises:
        InputError: "triton" where it cannot run.
    """
    refusal = None
    if not supports(head_size, dtype):
        refusal = (
            f" takes float32, bfloat16 and float16 and heads of at most {MAX_HEAD_SIZE} channels, not "
            f"{str(dtype).removeprefix('torch.')} with {head_size}; use auto or reference"
        )
    return choose_triton(FLAG, impl, device, refusal)


def plan_segment_attention(
    segments: SegmentPlan, paths: RootPaths, shape: AttentionShape, device: torch.device
) -> list[TreeAttentionPlan]:
    """Block tables of all segments of a step but those without tokens, which are last; uploaded in one copy."""
    return plan_tree_attention(_key_ends(segments, paths), shape, device)


def _key_ends(segments: SegmentPlan, paths: RootPaths) -> Iterator[tuple[np.ndarray, int]]:
    subtree_end, start = segments.tree.subtree_end, segments.segment_start.tolist()
    for segment, (begin, end) in enumerate(pairwise(start)):
        if begin == end:
            return
        ancestor_end = subtree_end[paths.stream_indices(segment)]
        yield local_key_end(begin, end - begin, ancestor_end, subtree_end[begin:end]), end - begin
