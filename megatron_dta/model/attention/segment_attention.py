"""Chooses the implementation of a segment's attention, and prepares its plans for a step.

``--tree-attention-impl`` selects the Triton kernels, FlashAttention 4 or the plain PyTorch reference. The choice is
made once per engine, from the device, the dtype and the sizes of heads. For the kernels, a step then gets one plan per
segment.
"""

from __future__ import annotations

import numpy as np
import torch

from dta_kernels.tree_attention.blocks import local_key_end
from dta_kernels.tree_attention.config import MAX_HEAD_SIZE, supports
from dta_kernels.tree_attention.flash.plan import (
    DTYPES,
    HEAD_SIZES,
    PACKAGE,
    VERSION,
    FlashAttentionPlan,
    installed_version,
    plan_flash_attention,
)
from dta_kernels.tree_attention.plan import AttentionShape, TreeAttentionPlan, plan_tree_attention
from megatron_dta.common.errors import InputError
from megatron_dta.model.kernels import choose_triton, is_interpreted
from megatron_dta.planning.segments.ancestors import RootPaths
from megatron_dta.planning.segments.plan import SegmentPlan

FLAG = "--tree-attention-impl"


# What "auto" tries in this order before the reference.
AUTO = ("triton",)


def choose_segment_attention(
    impl: str, head_size: int, heads_per_group: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What computes the attention of segments: "triton", "fa4" (FlashAttention 4) or "reference".

    Args:
        impl: one of these, or "auto": the first of ``AUTO`` that supports the inputs on this device.
        heads_per_group: query heads per key/value head.

    Raises:
        InputError: ``impl`` cannot run.
    """
    for candidate in AUTO if impl == "auto" else (impl,):
        if candidate == "fa4":
            refusal = flash_refusal(head_size, heads_per_group, dtype, device)
            if refusal is None:
                return "fa4"
            if impl == "fa4":
                raise InputError(f"{FLAG} fa4{refusal}")
        elif choose_attention(impl, head_size, dtype, device):
            return "triton"
    return "reference"


def choose_attention(impl: str, head_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton kernels compute an attention, rather than the reference.

    Args:
        impl: "triton", "reference", or "auto": Triton on a CUDA device if its kernels support the inputs. "fa4" is for
            the attention of segments; elsewhere it means "auto".

    Raises:
        InputError: "triton" is requested and cannot run.
    """
    impl = "auto" if impl == "fa4" else impl
    refusal = None
    if not supports(head_size, dtype):
        refusal = (
            f" takes float32, bfloat16 and float16 and heads of at most {MAX_HEAD_SIZE} channels, not "
            f"{str(dtype).removeprefix('torch.')} with {head_size}; use auto or reference"
        )
    return choose_triton(FLAG, impl, device, refusal, others=("fa4",))


def flash_refusal(head_size: int, heads_per_group: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention 4 cannot compute the attention of segments, to follow the flag; None if it can."""
    version = installed_version()
    if version != VERSION:
        found = "is not installed" if version is None else f"has version {version}, which is not supported"
        return (
            f": {PACKAGE} {found}; install it (pip install 'megatron_dta[fa4]' or {PACKAGE}=={VERSION}) or use triton"
        )
    if dtype not in DTYPES or head_size not in HEAD_SIZES:
        return (
            f" takes bfloat16 and float16 and heads of {', '.join(map(str, HEAD_SIZES))} channels, not "
            f"{str(dtype).removeprefix('torch.')} with {head_size}; use auto or triton"
        )
    if heads_per_group == 1:
        return " needs several query heads per key/value head, to add dK and dV up in float32; use auto or triton"
    if torch.are_deterministic_algorithms_enabled():
        return " is not deterministic, as --deterministic-mode asks; use auto or triton"
    if not (torch.cuda.get_device_capability(device)[0] == 9 if device.type == "cuda" else is_interpreted()):
        return " needs a Hopper GPU (compute capability 9); use auto or triton"
    return None


class SegmentAttentionPlans:
    """Block tables of a step's segments; each is made and uploaded when it is first requested.

    Making the tables takes the host some milliseconds a segment. The device meanwhile computes the previous segment,
    so it does not stay idle until all tables are made.
    """

    def __init__(
        self,
        segments: SegmentPlan,
        paths: RootPaths,
        shape: AttentionShape,
        device: torch.device,
        impl: str = "triton",
    ) -> None:
        self._segments, self._paths, self._shape, self._device = segments, paths, shape, device
        self._plan = plan_flash_attention if impl == "fa4" else plan_tree_attention
        self._made: dict[int, TreeAttentionPlan | FlashAttentionPlan] = {}

    def of_segment(self, segment: int) -> TreeAttentionPlan | FlashAttentionPlan | None:
        """The plan of a segment, None for one without tokens."""
        if segment not in self._made:
            ends = key_ends(self._segments, self._paths, segment)
            if not ends[1]:
                return None
            self._made[segment] = self._plan(*ends, self._shape, self._device)
        return self._made[segment]


def key_ends(segments: SegmentPlan, paths: RootPaths, segment: int) -> tuple[np.ndarray, int]:
    """``local_key_end`` of a segment, and its tokens."""
    subtree_end, (begin, end) = segments.tree.subtree_end, segments.segment_start[segment : segment + 2].tolist()
    ancestor_end = subtree_end[paths.stream_indices(segment)]
    return local_key_end(begin, end - begin, ancestor_end, subtree_end[begin:end]), end - begin
