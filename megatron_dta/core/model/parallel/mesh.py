"""Megatron's process mesh: which ranks share a layer (tensor), the tokens of a segment (context), the stack of layers
(pipeline), or none of these (data).

The tensor, context and pipeline sizes are settings, the data size is what remains of the processes. The ranks of a
tensor group hold parts of the same weights, those of a pipeline group other layers, and those of a context group the
same weights for other tokens; together they are a replica of the model and run the same segments. Data-parallel ranks
hold the same weights and run segments of their own.

Only the engine divides tokens. To all else, which samples, stores or counts, the ranks of a context group are
data-parallel ranks: ``current_mesh`` has no context groups, ``training_mesh`` does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from megatron_dta.core.config import ParallelConfig
from megatron_dta.core.config.checks.mesh import check_world_size
from megatron_dta.core.model.parallel import megatron_patches
from megatron_dta.core.model.parallel.stage_channels import forget_stage_channels, make_stage_channels
from megatron_dta.core.model.parallel.tensor_sum import forget_tensor_sum

# Groups for objects on the host, made by ``initialize_parallel``, by context size (1 in ``current_mesh``): those
# of the replica's ranks, of the data ranks, and of this rank and its counterparts on the data ranks that share experts.
_host_group: ProcessGroup | None = None
_replica_groups: dict[int, ProcessGroup | None] = {}
_data_groups: dict[int, ProcessGroup | None] = {}
_expert_groups: dict[int, ProcessGroup | None] = {}
_initial_seed = 0
_thread = threading.local()


@dataclass(frozen=True)
class Mesh:
    """This process's position in the mesh, and exchange of small objects on the host (losses, rollouts, flags).

    Attributes:
        rank, world_size: position among all processes.
        tensor_rank, tensor_size: position among the ranks that share every layer.
        pipeline_rank, pipeline_size: the rank's stage among the stages that share the stack of layers.
        context_rank, context_size: position among the ranks that divide the tokens of each segment.
        data_rank, data_size: position among the ranks that train other sequences.
        data_group, host_group: gloo groups of those ranks and of all; None if there is only one rank.
        replica_group: gloo group of the ranks that hold one replica of the model; None if the model is on one rank.
        expert_data_ranks: data-parallel ranks that share experts, including this one; they must run the same ops.
        expert_group: gloo group of this rank's counterparts on them; None if there are no others.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    data_group: ProcessGroup | None
    host_group: ProcessGroup | None
    replica_group: ProcessGroup | None
    expert_data_ranks: tuple[int, ...]
    expert_group: ProcessGroup | None

    @property
    def is_first_of_replica(self) -> bool:
        """Whether this is the first of the ranks that hold a replica of the model."""
        return self.tensor_rank == 0 and self.context_rank == 0 and self.pipeline_rank == 0

    def gather_over_data(self, value: Any) -> list[Any]:
        """``value`` of every data-parallel rank, in rank order, on each of them."""
        return _gather(value, self.data_size, self.data_group)

    def gather_from_all(self, value: Any) -> list[Any]:
        """``value`` of every process, in rank order, on each of them."""
        return _gather(value, self.world_size, self.host_group)

    def gather_over_replica(self, value: Any) -> list[Any]:
        """``value`` of every process that holds a part of this replica of the model, on each of them."""
        return _gather(value, self.tensor_size * self.context_size * self.pipeline_size, self.replica_group)

    def gather_over_experts(self, value: Any) -> list[Any]:
        """``value`` of every data-parallel rank that shares experts with this one, in rank order."""
        return _gather(value, len(self.expert_data_ranks), self.expert_group)

    def gather_over_stages(self, value: Any) -> list[list[Any]]:
        """``value`` of every stage of every replica, of the first of the stage's ranks, on every process.

        The outer list is in the order of the replicas, the inner ones in that of the stages.
        """
        if self.pipeline_size == 1:
            return [[sent] for sent in self.gather_over_data(value)]
        stage_rank = (self.data_rank, self.pipeline_rank)
        pairs = self.gather_from_all((stage_rank, value) if self.tensor_rank == 0 and self.context_rank == 0 else None)
        by_place = dict(pair for pair in pairs if pair is not None)
        return [
            [by_place[data_rank, stage] for stage in range(self.pipeline_size)] for data_rank in range(self.data_size)
        ]

    def from_last_stage(self, value: Any) -> Any:
        """``value`` of the last pipeline stage, on every process of the replica."""
        is_last = self.pipeline_rank == self.pipeline_size - 1
        is_source = is_last and self.tensor_rank == 0 and self.context_rank == 0
        return next(sent for sent in self.gather_over_replica(value if is_source else None) if sent is not None)

    def from_first_of_replica(self, value: Any) -> Any:
        """``value`` of the first rank of the replica, on all its processes; the values of other ranks are ignored."""
        wrapped = (value,) if self.is_first_of_replica else None
        return next(sent for sent in self.gather_over_replica(wrapped) if sent is not None)[0]

    def gather_from_replicas(self, value: Any) -> list[Any]:
        """``value`` of the first rank of each replica, on every process; the values of other ranks are ignored."""
        pairs = self.gather_from_all((self.data_rank, value) if self.is_first_of_replica else None)
        return [sent for _, sent in sorted((pair for pair in pairs if pair is not None), key=lambda pair: pair[0])]

    def from_first(self, value: Any) -> Any:
        """``value`` of rank 0, on every process; the values of other ranks are ignored."""
        if self.world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, group=self.host_group, device=torch.device("cpu"))
        return values[0]

    def wait_for_all(self) -> None:
        """Wait until every process has called this."""
        if self.world_size > 1:
            torch.distributed.barrier(self.host_group)


def _gather(value: Any, size: int, group: ProcessGroup | None) -> list[Any]:
    values = [value] * size
    if size > 1:
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def initialize_parallel(seed: int, parallel: ParallelConfig | None = None) -> torch.device:
    """Set up torch.distributed (if the launcher has not), Megatron's mesh and its random states for this process.

    Without torchrun's environment variables, a group of one process is made in memory, without a network port. On a CPU
    the random state decides the weights. ``seed`` is the same on every rank, so the weights are the same for any tensor
    size.

    Args:
        parallel: sizes of the mesh, by default all 1.

    Returns:
        The device of this process: its CUDA GPU (by LOCAL_RANK) if there is one, else the CPU.

    Raises:
        InputError: the processes cannot be divided into a mesh of these sizes.
    """
    parallel = parallel or ParallelConfig()
    megatron_patches.install()
    # From 0.19 on, every GPTModel logs a notice about its successor; ``provider`` is the place to adopt it.
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_no_notice_of_experts)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    if not torch.distributed.is_initialized():
        _initialize_process_group("nccl" if has_cuda else "gloo", parallel.timeout)
    check_world_size(parallel, torch.distributed.get_world_size())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            distributed_timeout_minutes=parallel.distributed_timeout_minutes,
            high_priority_stream_groups=_high_priority_groups(parallel),
            **_sizes(parallel),
        )
    elif _sizes_of_mesh() != _sizes(parallel):
        raise ValueError(f"the mesh exists already, with {_sizes_of_mesh()}; destroy it first (destroy_parallel)")
    _make_host_groups(parallel)
    make_stage_channels(_host_group, parallel.timeout)
    global _initial_seed
    _initial_seed = seed
    # Stages draw different layers. The ranks of a tensor group draw the whole layer and keep their parts.
    torch.manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    # The inference tracker has no CUDA states, which suffices if nothing is drawn from it.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not has_cuda, force_reset_rng=True)
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")


def _is_no_notice_of_experts(record: logging.LogRecord) -> bool:
    """0.16 mentions that it does not know our class of layers with experts, which gets the default groups then."""
    return "Unknown MLP type" not in record.getMessage()


def initial_seed() -> int:
    """The seed passed to ``initialize_parallel``, the same on every rank."""
    return _initial_seed


def destroy_parallel() -> None:
    """Remove the mesh, so that ``initialize_parallel`` can make another one; the process group remains."""
    for groups in (_replica_groups, _data_groups, _expert_groups):
        groups.clear()
    forget_stage_channels()
    forget_tensor_sum()
    parallel_state.destroy_model_parallel()


def _sizes(parallel: ParallelConfig) -> dict[str, int | None]:
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
    }


def _sizes_of_mesh() -> dict[str, int | None]:
    getters = {name: f"get_{name.removesuffix('size')}world_size" for name in _sizes(ParallelConfig())}
    return {name: getattr(parallel_state, getter)() for name, getter in getters.items()}


def _high_priority_groups(parallel: ParallelConfig) -> list[str] | None:
    """Groups whose kernels have priority over other waiting kernels.

    With several stages, only this priority lets the communication of a tensor group start before the computation that
    it overlaps with (``config.derived.device_queues``). Tokens travel to experts beside large products, behind whose
    programs they would otherwise wait.
    """
    # Other trainers start groups of several backends, such as "cpu:gloo,cuda:nccl".
    if "nccl" not in torch.distributed.get_backend():
        return None
    groups = ["tp"] if parallel.pipeline_model_parallel_size > 1 else []
    # Megatron's name for the ranks that share experts, of tensor parallelism and of expert parallelism.
    if parallel.expert_model_parallel_size * parallel.expert_tensor_size > 1:
        groups.append("tp_ep_mp")
    return groups or None


@contextmanager
def alone() -> Iterator[None]:
    """In this thread, make ``current_mesh`` a single process, so that nothing is exchanged with other ranks."""
    before = getattr(_thread, "is_alone", False)
    _thread.is_alone = True
    try:
        yield
    finally:
        _thread.is_alone = before


def current_mesh() -> Mesh:
    """The mesh that ``initialize_parallel`` made; within ``alone``, a mesh of one process.

    The ranks of a context group are data-parallel ranks in it.
    """
    return _mesh(1)


def training_mesh() -> Mesh:
    """``current_mesh`` for the engine, where the ranks of a context group run the same segments."""
    return _mesh(parallel_state.get_context_parallel_world_size())


def _mesh(context_size: int) -> Mesh:
    if getattr(_thread, "is_alone", False):
        return Mesh(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, None, None, None, (0,), None)
    # Megatron counts tensor ranks first, then context ranks, then data ranks, then stages.
    data_context_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return Mesh(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_rank=data_context_rank % context_size,
        context_size=context_size,
        data_rank=data_context_rank // context_size,
        data_size=_places(context_size)[1],
        data_group=_data_groups.get(context_size),
        host_group=_host_group,
        replica_group=_replica_groups.get(context_size),
        expert_data_ranks=_expert_data_ranks(context_size),
        expert_group=_expert_groups.get(context_size),
    )


def _make_host_groups(parallel: ParallelConfig) -> None:
    global _host_group
    if torch.distributed.get_world_size() == 1:
        return
    timeout, on_host = parallel.timeout, torch.distributed.get_backend() == "gloo"
    if _host_group is None:
        _host_group = (
            torch.distributed.group.WORLD if on_host else torch.distributed.new_group(backend="gloo", timeout=timeout)
        )
    if _replica_groups:
        return
    rank, same_context = torch.distributed.get_rank(), parallel_state.get_model_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    data_context_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for size in sorted({1, parallel_state.get_context_parallel_world_size()}):
        (stride, data_size), (here, first) = _places(size), divmod(data_context_rank, size)
        counterparts = [rank + (data_rank - here) * stride for data_rank in range(data_size)]
        replica = [
            rank + (other - first) * tensor
            for rank in torch.distributed.get_process_group_ranks(same_context)
            for other in range(size)
        ]
        is_known = size == 1 and on_host
        _replica_groups[size] = same_context if is_known else _host_group_of(replica, timeout)
        _data_groups[size] = _host_group_of(counterparts, timeout)
        _expert_groups[size] = _host_group_of([counterparts[i] for i in _expert_data_ranks(size)], timeout)


def _host_group_of(group_ranks: Sequence[int], timeout: timedelta) -> ProcessGroup | None:
    """The gloo group of ``group_ranks``, None for a single one; the lists of all processes divide the processes."""
    lists: list[tuple[int, ...]] = [()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, tuple(sorted(group_ranks)), group=_host_group)
    if len(group_ranks) == 1:
        return None
    group, _ = torch.distributed.new_subgroups_by_enumeration(
        [list(ranks) for ranks in sorted(set(lists))], timeout=timeout, backend="gloo"
    )
    return group


def _places(context_size: int) -> tuple[int, int]:
    """Ranks from one data-parallel rank to the next, and number of data-parallel ranks."""
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_world_size() * context_size, ranks // context_size


def _expert_data_ranks(context_size: int) -> tuple[int, ...]:
    """Data-parallel positions of the ranks that exchange tokens in a layer with experts."""
    stride, data_size = _places(context_size)
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group())
    return tuple(sorted({rank // stride % data_size for rank in ranks}))


def _initialize_process_group(backend: str, timeout: timedelta) -> None:
    if torch.distributed.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        store, rank, world_size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            # torchrun keeps its store over restarts, including the addresses of the previous processes. (On several
            # nodes, the restart counts of the launchers may differ.)
            store = torch.distributed.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    else:
        store, rank, world_size = torch.distributed.HashStore(), 0, 1
    torch.distributed.init_process_group(
        backend=backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    if backend == "nccl":
        # Later barriers take this device; without one NCCL guesses it from the rank, and warns. With ``device_id``
        # above, Megatron's groups would all connect at once, which took 5.5 GiB of the first of two H100 and 1.1 s.
        torch.distributed.barrier(device_ids=[torch.cuda.current_device()])
