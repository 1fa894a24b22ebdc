"""A model's weights in host memory, as Hugging Face tensors packed into buckets.

A bucket is one buffer of bytes, which is what is sent. Its tensors have one dtype, follow one another in the model's
order without gaps, and are views of the buffer. A bucket ends with the tensor that exceeds its size, as vLLM counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of a model.

    Attributes:
        shapes: shape of each tensor, by Hugging Face name.
        buffer: uint8 [bytes of all tensors], on the host.
    """

    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    buffer: Tensor

    @property
    def dtype_name(self) -> str:
        """The dtype as servers name it, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Views of the buffer, by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = self.buffer.view(self.dtype).split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


@dataclass(frozen=True)
class HostWeights:
    """All weights of a model.

    Attributes:
        buckets: in the model's order.
        bucket_bytes: what a bucket exceeds by its last tensor, unless it is the last one of its dtype.
    """

    buckets: tuple[Bucket, ...]
    bucket_bytes: int

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Views of the buckets, by name."""
        return {name: values for bucket in self.buckets for name, values in bucket.tensors.items()}

    @property
    def runs(self) -> list[tuple[Bucket, ...]]:
        """Consecutive buckets of one dtype."""
        return [tuple(run) for _, run in groupby(self.buckets, key=lambda bucket: bucket.dtype)]


def empty_weights(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int, pinned: bool = False
) -> HostWeights:
    """Buckets with room for the tensors in ``shapes`` (name -> shape and dtype); their values are undefined.

    Args:
        pinned: in page-locked memory, from which a GPU copies faster.
    """
    groups: list[tuple[torch.dtype, dict[str, tuple[int, ...]]]] = []
    bytes_left = -1
    for name, (shape, dtype) in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if not groups or groups[-1][0] != dtype or bytes_left < 0:
            groups.append((dtype, {}))
            bytes_left = bucket_bytes
        groups[-1][1][name] = tuple(shape)
        bytes_left -= size
    buckets = []
    for dtype, members in groups:
        size = sum(torch.Size(shape).numel() for shape in members.values()) * dtype.itemsize
        buckets.append(Bucket(dtype, members, torch.empty(size, dtype=torch.uint8, pin_memory=pinned)))
    return HostWeights(tuple(buckets), bucket_bytes)
