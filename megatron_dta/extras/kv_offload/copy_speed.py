"""Judges whether computation hides the copies of keys and values that are on the host (``--kv-offload-fraction``).

The rate of copies between GPU and host is measured once at the start, on all ranks at the same time, since those of a
machine may share its links.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine.rank_model import RankModel
from megatron_dta.core.planning.costs.gpus import HOST_SHARE, gpu_named, least_offload_tokens

# Bytes of a copy and copies of a measurement. Larger ones reach the same rate.
COPY_BYTES, COPIES = 2**26, 4
# A measured rate varies from start to start: segments may be this much shorter than needed.
TOLERANCE = 0.1


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Bytes/s of copies between the GPU and pinned memory, the mean of both directions."""
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for turn in range(COPIES + 1):
            if turn == 1:  # the first copies only prepare
                begin.record()
            on_device.copy_(on_host, non_blocking=True)
            on_host.copy_(on_device, non_blocking=True)
        end.record()
    end.synchronize()
    return 2 * COPIES * COPY_BYTES / (begin.elapsed_time(end) / 1e3)


@dataclass(frozen=True)
class CopySpeed:
    """What hides the copies.

    Attributes:
        fraction: share of the layers whose keys and values are on the host.
        rate: bytes/s of copies.
        is_measured: whether it was measured; otherwise it is the data sheet's, of which a share is assumed.
        gpu: name of the GPU.
        needed: tokens of a segment from which computation hides the copies.
    """

    fraction: float
    rate: float
    is_measured: bool
    gpu: str
    needed: int

    @classmethod
    def of(cls, model: RankModel, measure: Callable[[torch.device], float] | None = copy_rate) -> CopySpeed | None:
        """The speed on the slowest rank; None without keys and values on the host of a GPU. Every rank calls this.

        Args:
            measure: measures the rate; None to take the data sheet's.
        """
        if model.kv_on_host is None or model.device.type != "cuda":
            return None
        gpu, _ = gpu_named(torch.cuda.get_device_name(model.device))
        model.mesh.wait_for_all()
        rate = HOST_SHARE * gpu.host if measure is None else measure(model.device)
        rate, fraction = min(model.mesh.gather_from_all(rate)), model.kv_on_host.fraction
        heads = (model.num_heads, model.num_kv_heads)
        needed = math.ceil(least_offload_tokens(gpu, fraction, heads, model.dtype.itemsize, rate))
        return cls(fraction, rate, measure is not None, gpu.name, needed)

    @property
    def _source(self) -> str:
        return f"{self.rate / 1e9:.1f} GB/s ({'measured' if self.is_measured else f'assumed for {self.gpu}'})"

    def refusal(self, segment_tokens: int | None) -> str | None:
        """The error message for segments of at most ``segment_tokens`` tokens if they are too short, else None."""
        if segment_tokens is not None and segment_tokens >= self.needed * (1 - TOLERANCE):
            return None
        lower = "" if segment_tokens is None else f", to {self.fraction * segment_tokens / self.needed:.2g} or less"
        return (
            f"--kv-offload-fraction {self.fraction:g}: at {self._source} computation hides the copies of a long path "
            f"for segments of {self.needed} tokens or more; give --tree-segment-tokens {self.needed} or more, or lower "
            f"the fraction in proportion{lower}"
        )

    def describe(self) -> str:
        """A line for the start of a run."""
        return f"copied at {self._source}; computation hides that for segments of {self.needed:,} tokens or more"


def check_copies(
    model: RankModel,
    segment_tokens: int | None,
    measure: Callable[[torch.device], float] | None = copy_rate,
    continues: bool = False,
) -> list[str]:
    """Lines about the copies for the start of a run; none without keys and values on the host of a GPU.

    Args:
        segment_tokens: maximum number of tokens of a segment.
        measure: measures the rate; None to take the data sheet's.
        continues: whether the run is resumed; it is then not stopped by a GPU whose copies are slower.

    Raises:
        InputError: the segments are too short.
    """
    speed = CopySpeed.of(model, measure)
    if speed is None:
        return []
    refusal = speed.refusal(segment_tokens)
    if refusal is not None and not continues:
        raise InputError(refusal)
    return [f"keys and values on the host: {speed.describe()}", *([] if refusal is None else [f"warning: {refusal}"])]
