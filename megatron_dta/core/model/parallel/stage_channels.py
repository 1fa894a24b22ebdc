"""Creates the process groups between pipeline stages: one for messages up the ranks, one for messages down.

Within a group, every pair of ranks has its own communicator and stream (PyTorch makes them at the first message of a
pair), on which messages pass one after the other. With one group for each direction, a message never waits for one in
the opposite direction.

A send or receive of NCCL is a kernel that occupies its share of the device from its launch until both sides are done.
A message that waits for its peer takes this share from the computation. By default the share is up to 32
multiprocessors, about a quarter of an H200, but a few multiprocessors can move a segment's hidden states in a fraction
of a millisecond. The kernels have high priority: they run before the next kernels of the computation and end early.

None of this helps if all streams share one queue of the device, see ``training.config.derived.device_queues``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

# Maximum number of multiprocessors that a message uses.
MESSAGE_CTAS = 4


class StageChannels(NamedTuple):
    """Groups of the ranks of this pipeline.

    Attributes:
        up: for messages to a later rank of the pipeline.
        down: for messages to an earlier one.
        ranks: the pipeline's ranks in the order of their stages.
    """

    up: ProcessGroup
    down: ProcessGroup
    ranks: tuple[int, ...]


_channels: StageChannels | None = None


def stage_channels() -> StageChannels:
    """The channels that ``make_stage_channels`` made."""
    if _channels is None:
        raise RuntimeError("the channels between pipeline stages are not made yet; call initialize_parallel")
    return _channels


def make_stage_channels(host_group: ProcessGroup | None, timeout: timedelta) -> None:
    """Make the groups, once; all ranks must call this. A single stage needs no groups."""
    global _channels
    pipeline_ranks = tuple(
        torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    )
    if _channels is not None or len(pipeline_ranks) == 1:
        return
    pipelines_of_ranks: list[tuple[int, ...]] = [()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(pipelines_of_ranks, pipeline_ranks, group=host_group)
    pipelines = [list(ranks) for ranks in sorted(set(pipelines_of_ranks))]
    # The default group of another trainer may have several backends.
    backend = "nccl" if "nccl" in torch.distributed.get_backend() else None
    up, down = (
        torch.distributed.new_subgroups_by_enumeration(
            pipelines, timeout=timeout, backend=backend, pg_options=_options(timeout) if backend else None
        )[0]
        for _ in ("up", "down")
    )
    _channels = StageChannels(up, down, pipeline_ranks)


def forget_stage_channels() -> None:
    """Discard the channels, so that another mesh can make its own."""
    global _channels
    _channels = None


def _options(timeout: timedelta) -> object:
    """NCCL's settings."""
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MESSAGE_CTAS
    options._timeout = timeout  # new_group warns if the two differ
    return options
