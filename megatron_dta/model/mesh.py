"""Megatron's process mesh: which ranks share a layer (tensor parallel) and which train other sequences (data parallel).

The tensor size is a setting, the data size is what remains of the processes. Ranks of a tensor group hold parts of the
same weights and run the same segments; data-parallel ranks hold the same weights and run segments of their own.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from megatron_dta import cpu_compat
from megatron_dta.config import ParallelConfig
from megatron_dta.config.checks import check_world_size

# Group of all ranks for objects on the host; made by ``initialize_parallel`` where there is more than one rank.
_host_group: ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """Where this process stands, and exchange of small objects on the host (losses, rollouts, flags).

    Attributes:
        rank, world_size: place among all processes.
        tensor_rank, tensor_size: place among the ranks that share every layer.
        data_rank, data_size: place among the ranks that train other sequences.
        data_group, host_group: gloo groups of those ranks and of all; None where there is only one rank.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    data_group: ProcessGroup | None
    host_group: ProcessGroup | None

    def gather_over_data(self, value: Any) -> list[Any]:
        """``value`` of every data-parallel rank, in their order, on every one of them."""
        return _gather(value, self.data_size, self.data_group)

    def gather_from_all(self, value: Any) -> list[Any]:
        """``value`` of every process, in their order, on every one of them."""
        return _gather(value, self.world_size, self.host_group)

    def gather_from_replicas(self, value: Any) -> list[Any]:
        """``value`` of the first tensor rank of each replica, on every process: the others' need not be the same."""
        parts = self.gather_from_all((self.data_rank, value) if self.tensor_rank == 0 else None)
        return [part for _, part in sorted((part for part in parts if part is not None), key=lambda part: part[0])]

    def wait_for_all(self) -> None:
        """Return when every process has come here."""
        if self.world_size > 1:
            torch.distributed.barrier(self.host_group)


def _gather(value: Any, size: int, group: ProcessGroup | None) -> list[Any]:
    parts = [value] * size
    if size > 1:
        torch.distributed.all_gather_object(parts, value, group=group)
    return parts


def initialize_parallel(seed: int, parallel: ParallelConfig | None = None) -> torch.device:
    """Set up torch.distributed (if the launcher has not), Megatron's mesh and its random states for this process.

    Without torchrun's environment variables a group of one process is made in memory, with no network port. On a CPU
    the random state decides the weights, and ``seed`` is the same on every rank: so are the weights, whatever the
    tensor size.

    Args:
        parallel: sizes of the mesh, by default all 1.

    Returns:
        The device of this process: its CUDA GPU (by LOCAL_RANK) where there is one, else the CPU.

    Raises:
        InputError: the processes cannot be divided as asked.
    """
    parallel = parallel or ParallelConfig()
    cpu_compat.install()
    # From 0.19 on every GPTModel announces its successor; ``provider`` is where that change will be made.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    if not torch.distributed.is_initialized():
        _initialize_process_group("nccl" if has_cuda else "gloo", parallel.timeout)
    check_world_size(parallel, torch.distributed.get_world_size())
    size = parallel.tensor_model_parallel_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=size, distributed_timeout_minutes=parallel.distributed_timeout_minutes
        )
    elif parallel_state.get_tensor_model_parallel_world_size() != size:
        raise ValueError("the mesh exists already, with another tensor size; destroy it first")
    _make_host_group(parallel.timeout)
    torch.manual_seed(seed)
    # The inference tracker is a plain one without CUDA states: all there is to do where nothing is drawn from it.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not has_cuda, force_reset_rng=True)
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


def current_mesh() -> Mesh:
    """The mesh that ``initialize_parallel`` has set up."""
    data_size = parallel_state.get_data_parallel_world_size()
    return Mesh(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=data_size,
        data_group=parallel_state.get_data_parallel_group_gloo() if data_size > 1 else None,
        host_group=_host_group,
    )


def _make_host_group(timeout: timedelta) -> None:
    global _host_group
    if _host_group is None and torch.distributed.get_world_size() > 1:
        on_host = torch.distributed.get_backend() == "gloo"
        _host_group = (
            torch.distributed.group.WORLD if on_host else torch.distributed.new_group(backend="gloo", timeout=timeout)
        )


def _initialize_process_group(backend: str, timeout: timedelta) -> None:
    if torch.distributed.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            # torchrun keeps its store over restarts, with the addresses of the processes before. (On several nodes the
            # restart counts of their launchers may differ.)
            store = torch.distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        torch.distributed.init_process_group(
            backend=backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    else:
        torch.distributed.init_process_group(backend=backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
