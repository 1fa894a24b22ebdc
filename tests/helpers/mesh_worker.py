"""Runs cases on several processes and returns what every rank has found; the tests compare it."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from forked import forkserver, use_errors_of_parent
from megatron_dta.core.config import ModelConfig, ParallelConfig, TreeConfig
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.wiring.attach import attach_extras
from roomy import call_with_room
from socket_group import socket_pairs, use_sockets

attach_extras()

# Far more than any case takes; on a loaded machine ranks get slower.
LONGEST_S = 900
# After one rank has failed, for the others to notice it and to say where they were.
ENDING_S = 15
STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class MeshCase:
    """One step on a mesh.

    Attributes:
        partition: indices of the samples of each data-parallel rank.
        weights: of the whole model.
        loss_length, preference_pairs: see ``prepare_batch`` and ``StepPart``.
        sabotage: name of something to leave out, for tests that must fail.
        forward_only: logprobs come from a pass of their own, otherwise from the training pass.
    """

    model: ModelConfig
    parallel: ParallelConfig
    tree: TreeConfig
    samples: Sequence[TrainingSample]
    partition: Sequence[Sequence[int]]
    weights: dict[str, torch.Tensor]
    objective: dict[str, Any]
    temperature: float = 1.0
    aggregation: str = "token-mean"
    sabotage: str = ""
    loss_length: float | None = None
    preference_pairs: np.ndarray | None = None
    forward_only: bool = True


@dataclass
class RankResult:
    """What one rank found; tensors are the rank's parts.

    With limited memory, ``pools`` has for each model chunk the counted bytes of its pools and those that they hold.
    """

    tensor_rank: int
    data_rank: int
    stage: int = 0
    expert_tensor_rank: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    expert_biases: dict[str, torch.Tensor] = field(default_factory=dict)
    grad_norm: float = 0.0
    pools: list[tuple[float, int]] = field(default_factory=list)
    recomputed_tokens: int = 0


def run_on_ranks(
    function: Callable[[int, Any], Any], argument: Any, world_size: int, folder: Path, backend: str = "sockets",
    longest_s: float = LONGEST_S,
) -> list[Any]:  # fmt: skip
    """``function(rank, argument)`` in ``world_size`` processes of one group; the results in order of rank.

    Args:
        backend: "sockets" for groups of ``socket_group``, "gloo", or "nccl", with which each process has its own GPU.
    """
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn") if backend == "nccl" else forkserver()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(argument, folder / "argument.pt")
    # A store that ranks ask over a socket; they would read a file again and again.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sockets = socket_pairs(world_size) if backend == "sockets" else [{}] * world_size
    processes = [
        context.Process(
            target=_process, args=(function, (rank, world_size), str(folder), store.port, backend, rank_sockets)
        )
        for rank, rank_sockets in enumerate(sockets)
    ]
    for process in processes:
        process.start()
    for rank_sockets in sockets:
        for end in rank_sockets.values():
            end.close()
    why = ""
    try:
        why = _wait_for(processes, longest_s)
        if why:
            _write_stacks(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.join(0 if why else ENDING_S)
                process.kill()
            process.join()
    failures = [path.read_text() for path in sorted(folder.glob("failed_*.txt"))]
    missing = [rank for rank in range(world_size) if not (folder / f"result_{rank}.pt").exists()]
    if failures or missing:
        stacks = [f"rank {path.stem[6:]} was here:\n{path.read_text()}" for path in sorted(folder.glob("stack_*.txt"))]
        raise RuntimeError(f"ranks {missing} gave no result{why}:\n" + "\n".join([*failures, *(stacks if why else [])]))
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait_for(processes: list[Any], longest_s: float) -> str:
    """Wait until all have ended or one has failed; otherwise returns why they should be ended."""
    end = time.monotonic() + longest_s
    while running := [process for process in processes if process.is_alive()]:
        if any(process.exitcode for process in processes):
            return ""
        if time.monotonic() > end:
            return f" in {longest_s} s"
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=1.0)
    return ""


def _write_stacks(processes: list[Any]) -> None:
    """Let each rank say in its ``stack_RANK.txt`` where it is."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, STACK_SIGNAL)
    time.sleep(1.0)


def _process(
    function: Callable[[int, Any], Any],
    rank_and_size: tuple[int, int],
    folder: str,
    port: int,
    backend: str,
    sockets: dict[int, socket.socket],
) -> None:
    use_errors_of_parent()
    torch.set_num_threads(1)
    (rank, world_size), path = rank_and_size, Path(folder)
    stack = (path / f"stack_{rank}.txt").open("w")
    faulthandler.register(STACK_SIGNAL, stack)
    if backend == "nccl":
        os.environ["LOCAL_RANK"] = str(rank)
        torch.cuda.set_device(rank)
    elif backend == "sockets":
        use_sockets(sockets)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        name = "nccl" if backend == "nccl" else "gloo"
        torch.distributed.init_process_group(name, store=store, rank=rank, world_size=world_size)
        argument = torch.load(path / "argument.pt", weights_only=False)
        torch.save(call_with_room(function, rank, argument), path / f"result_{rank}.tmp")
        (path / f"result_{rank}.tmp").rename(path / f"result_{rank}.pt")
        gc.collect()  # graphs with sums of NCCL must go before its communicators
        torch.distributed.barrier(device_ids=[rank] if backend == "nccl" else None)
        torch.distributed.destroy_process_group()
    except BaseException:
        (path / f"failed_{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


def run_cases(rank: int, cases: dict[str, MeshCase]) -> dict[str, RankResult]:
    """Every case, those of one mesh together: it is made anew where its sizes change."""
    from megatron_dta.core.model.parallel.mesh import destroy_parallel

    by_sizes: dict[tuple, dict[str, MeshCase]] = {}
    for name, case in cases.items():
        parallel = case.parallel
        sizes = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.num_virtual_stages_per_pipeline_rank,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_size,
        )
        by_sizes.setdefault(sizes, {})[name] = case
    results = {}
    for alike in by_sizes.values():
        results |= {name: _run_case(case) for name, case in alike.items()}
        destroy_parallel()
    return results


def named_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """The rank's parameters by their names in the whole model; a tied output weight is not there twice."""
    from weight_shards import name_in_whole_model

    parameters = {}
    for part in model.model_chunks:
        for name, parameter in part.named_parameters():
            name = name_in_whole_model(part, name)
            if name == "output_layer.weight" and part.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            parameters[name] = parameter
    return parameters


def expert_biases(model: Any) -> dict[str, torch.Tensor]:
    """The rank's biases of experts by their names in the whole model."""
    from weight_shards import name_in_whole_model

    return {
        name_in_whole_model(part, name): buffer
        for part in model.model_chunks
        for name, buffer in part.named_buffers()
        if name.endswith("expert_bias")
    }


def copy_shards(
    model: Any, weights: dict[str, torch.Tensor], config: ModelConfig, sharded: dict[str, torch.Tensor] | None = None
) -> None:
    """Give the model the rank's shards of the whole ``weights``, biases of experts included, or ``sharded``."""
    from megatron.core import parallel_state

    from megatron_dta.core.model.parallel.mesh import current_mesh
    from weight_shards import shard_weights

    mesh = current_mesh()
    experts = {name: weight for name, weight in weights.items() if ".local_experts." in name}
    expert_rank = parallel_state.get_expert_tensor_parallel_rank()
    expert_size = parallel_state.get_expert_tensor_parallel_world_size()
    shard = shard_weights(weights, config, mesh.tensor_rank, mesh.tensor_size)
    shard |= shard_weights(experts, config, expert_rank, expert_size)
    with torch.no_grad():
        for name, tensor in (named_parameters(model) | expert_biases(model)).items():
            tensor.copy_((shard | (sharded or {}))[name])


def _run_case(case: MeshCase) -> RankResult:
    from megatron.core import parallel_state

    from megatron_dta.core.config import ObjectiveConfig
    from megatron_dta.core.engine import StepPart, TreeEngine, cost_inputs, prepare_batch
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import initialize_parallel, training_mesh
    from megatron_dta.core.objectives.registry import make_objective
    from megatron_dta.core.objectives.weights import count_trained
    from megatron_dta.training.config import OptimizationConfig
    from megatron_dta.training.optimizer.build import TrainingOptimizer
    from pool_bytes import noting_pools

    device = initialize_parallel(5, case.parallel)
    mesh = training_mesh()
    expert_tensor_rank = parallel_state.get_expert_tensor_parallel_rank()
    result = RankResult(mesh.tensor_rank, mesh.data_rank, mesh.pipeline_rank, expert_tensor_rank)
    model = build_model(case.model, device, case.parallel)
    parameters = named_parameters(model)
    result.initial = {name: p.detach().clone() for name, p in parameters.items()}
    copy_shards(model, case.weights, case.model)
    optimizer = TrainingOptimizer(model, OptimizationConfig(train_iters=1, lr=1e-3), case.parallel)
    attention = case.tree.tree_attention_impl
    engine = TreeEngine(
        optimizer.chunks, case.temperature, case.tree.logprob_chunk_tokens, tree_attention_impl=attention
    )
    engine.offload_kv(case.tree.kv_offload_fraction)
    if case.tree.tree_memory_gib is not None:
        # Plain experts count as grouped ones: a limit need not be right to be kept.
        with mock.patch.object(cost_inputs, "why_not_predicted", return_value=None):
            engine.limit_memory(case.tree.tree_memory_gib, 0.0)
    indices = case.partition[mesh.data_rank]
    samples = [case.samples[i] for i in indices]
    counts = count_trained([sample.num_trained for sample in case.samples])
    pipeline, part = engine.pipeline(case.tree.tree_segment_tokens), StepPart(counts, indices, case.preference_pairs)
    batch = prepare_batch(samples, case.tree, case.aggregation, pipeline, case.loss_length, part)
    if case.forward_only:
        result.logprobs = engine.compute_logprobs(batch)
    if case.parallel.overlap_grad_reduce:
        # In its first step Megatron only learns which gradients to expect; from the second on it overlaps.
        optimizer.zero_grad()
        engine.forward_backward(batch, make_objective(ObjectiveConfig(**case.objective)))
        optimizer.reduce_gradients()
        # Megatron moves the biases of experts while it reduces gradients.
        copy_shards(model, case.weights, case.model)
    optimizer.zero_grad()
    with _sabotaged(case.sabotage), noting_pools(engine, batch, result.pools):
        step = engine.forward_backward(
            batch, make_objective(ObjectiveConfig(**case.objective)), return_outputs=not case.forward_only
        )
    if not case.forward_only:
        result.logprobs = step.outputs.logprobs
    result.loss = float(step.loss)
    result.recomputed_tokens = step.recomputed_tokens
    result.metrics = {name: float(value) for name, value in step.metrics.items()}
    if case.sabotage != "reduction":
        optimizer.reduce_gradients()
    result.gradients = {name: p.main_grad.clone() for name, p in parameters.items() if p.requires_grad}
    result.expert_biases = {name: bias.clone() for name, bias in expert_biases(model).items()}
    optimizer.optimizer.prepare_grads()
    result.grad_norm = float(optimizer.optimizer.get_grad_norm())
    return result


def count_collectives(rank: int, cases: Sequence[MeshCase]) -> list[tuple[int, int, dict[str, int]]]:
    """For every case: segments of a training step, those with logprobs, and how often each collective ran in it."""
    return [_count_collectives(case) for case in cases]


def _count_collectives(case: MeshCase) -> tuple[int, int, dict[str, int]]:
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_dta.core.config import ObjectiveConfig
    from megatron_dta.core.engine import TreeEngine, prepare_batch
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import initialize_parallel
    from megatron_dta.core.objectives.registry import make_objective
    from megatron_dta.training.optimizer.build import data_parallel_chunks

    counts: dict[str, int] = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = str(function).partition(".")
            if namespace == "c10d":
                counts[name] = counts.get(name, 0) + 1
            return function(*args, **(kwargs or {}))

    device = initialize_parallel(5, case.parallel)
    chunks = data_parallel_chunks(build_model(case.model, device, case.parallel), case.parallel)
    engine = TreeEngine(chunks, case.temperature, 5)
    batch = prepare_batch(case.samples, case.tree)
    with Counting():
        engine.forward_backward(batch, make_objective(ObjectiveConfig(**case.objective)))
    with_logprobs = int((batch.plan.segment_rows[1:] > batch.plan.segment_rows[:-1]).sum())
    return batch.plan.segments.num_segments, with_logprobs, counts


def _sabotaged(name: str) -> Any:
    """Leave a part of the communication out, or of the gradients."""
    from megatron.core import tensor_parallel

    from megatron_dta.core.model import main_grad
    from megatron_dta.core.model.parallel import context_group

    if name == "weight gradients":
        return mock.patch.object(main_grad, "add_weight_gradient")
    if name == "logprobs":
        return mock.patch.object(context_group.ContextGroup, "joined", _with_zeros)
    if name == "attention gradients":
        lost = staticmethod(lambda ctx, *grads: (None, *(0 * part for part in ctx.group.to_rows(*grads))))
        return mock.patch.object(context_group.ToHeads, "backward", lost)
    function = {"hidden": "copy_to_tensor_model_parallel_region"}.get(name, "")
    if not function:
        return mock.patch.dict({}, {})
    return mock.patch.object(tensor_parallel, function, lambda hidden, group=None: hidden)


def _with_zeros(_: Any, values: Sequence[torch.Tensor], begins: Sequence[int], lengths: Sequence[int]) -> tuple:
    """``ContextGroup.joined`` without the other ranks' values."""
    padded = tuple(part.new_zeros(length) for part, length in zip(values, lengths, strict=True))
    for vector, part, begin in zip(padded, values, begins, strict=True):
        vector[begin : begin + len(part)] = part.detach()
    return padded
