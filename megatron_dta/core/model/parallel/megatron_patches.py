"""Adapts Megatron-Core to machines without CUDA: the only monkey patches of this project, each with its reason.

Megatron-Core 0.16.1 to 0.19 names the CUDA device in code that models, optimizers and checkpoints run. ``install``
patches exactly this code, and only if CUDA is absent; no result changes. The functions
``import_megatron_uncompiled``, ``write_checkpoints_in_process``, ``read_checkpoints_without_running_them``,
``handle_tensors_together``, ``run_adam_without_compiler``, ``place_parameters_of_all_buckets``, ``collect_states_by``
and ``build_latent_attention_without_transformer_engine`` are for every machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_installed = False
_buckets_placed = False
_collected = False

# Modules that create small tensors on the literal "cuda": loss scales, overflow flags, the gradient norm.
_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)


def import_megatron_uncompiled() -> None:
    """Import Megatron without ``torch.compile`` on its small functions.

    The models here use none of them that matters for speed, while TorchInductor, which ``torch.compile`` imports for
    the first of them, takes a third of the time of all imports, and in a run each would be compiled for new lengths.
    """
    compiled = torch.compile

    def compile_others(function: Any = None, **options: Any) -> Any:
        if getattr(function, "__module__", "").startswith("megatron."):
            return function
        return compiled(function, **options)

    torch.compile = compile_others
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiled


def install() -> None:
    """Apply the patches; does nothing if CUDA is present or the patches are applied already."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _patch_torch_cuda()
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = _TorchOnCpu("torch")
    _patch_type_names()
    _patch_recomputation()
    _patch_token_dispatcher()
    _installed = True


def build_latent_attention_without_transformer_engine() -> None:
    """Let Megatron's own latent attention, a reference, be built where Transformer Engine is missing.

    It asks whether a layer is an instance of a class of that package, which is no class then.
    """
    module = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    module.HAVE_TE = module.HAVE_TE and isinstance(module.TELinear, type)


def _patch_torch_cuda() -> None:
    """Make ``torch.cuda.current_device()``, on which weights, rotary tables and gradient buffers are made, the CPU.

    Saving a checkpoint waits for ``torch.cuda.synchronize()``, and 0.19 calls ``current_stream()``: without CUDA there
    is nothing to wait for. A last pipeline stage moves its copy of a tied embedding to the GPU before it is filled.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_stream = lambda device=None: _NoStream()
    torch.Tensor.cuda = lambda self, *_, **__: self


class _NoStream:
    """A stream on which nothing ever runs."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> _NoStream:
        """An event that has already happened."""
        return self

    def synchronize(self) -> None: ...


class _TorchOnCpu(ModuleType):
    """The torch module for one Megatron module: tensors requested on "cuda" are made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return self.__dict__.setdefault(name, _on_cpu(value) if name in ("tensor", "zeros", "empty", "ones") else value)


def _on_cpu(make_tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make_tensor)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return make_tensor(*args, **kwargs)

    return make


def _patch_type_names() -> None:
    """Make a CPU tensor report the type name of its CUDA counterpart while some optimizer functions run.

    The bfloat16 and the distributed optimizer and clipping test dtypes by ``tensor.type()`` and know only the names of
    CUDA tensors.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    float16_optimizer = optimizer.Float16OptimizerWithFloat16Params
    float16_optimizer.__init__ = _with_cuda_type_names(float16_optimizer.__init__)
    sharded_optimizer = distrib_optimizer.DistributedOptimizer
    sharded_optimizer.__init__ = _with_cuda_type_names(sharded_optimizer.__init__)
    optimizer.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(optimizer.clip_grad_by_total_norm_fp32)


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    inherited = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = inherited(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_name
    try:
        yield
    finally:
        torch.Tensor.type = inherited


def _patch_recomputation() -> None:
    """``tensor_parallel.checkpoint`` also saves and restores the CUDA random state: here it is empty."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _patch_token_dispatcher() -> None:
    """The token dispatcher copies row counts to the host on a CUDA stream: here they are on the host already.

    That copy also converts a GPU's tensors of sizes to arrays, which the collectives need; it leaves those of a CPU
    unchanged.
    """
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()
    token_dispatcher.maybe_move_tensor_to_cpu = _as_on_host


def _as_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def write_checkpoints_in_process() -> None:
    """Write checkpoints in threads of this process, as Megatron does from 0.17 on, without a server process.

    0.16.1 forks its writers from a process with running threads, which may deadlock, and writers whose trainer is
    killed wait forever and keep its memory. Every version passes results through a server process, which only
    asynchronous saving needs. This process outlives a killed trainer, and it dies from a SIGTERM that a scheduler sends
    to the whole job, just when the last checkpoint is to be written.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not isinstance(filesystem_async.mp, _MultiprocessingByThreads):
        filesystem_async.mp = _MultiprocessingByThreads("multiprocessing")


def read_checkpoints_without_running_them(read_metadata: Callable[[Any], Any]) -> None:
    """Read the metadata and the states in a checkpoint with unpicklers that run no code.

    PyTorch unpickles ``.metadata`` and every state that is not a tensor with access to everything that Python can
    import, Megatron lets the environment (``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``) switch off the safe unpickler for the
    common state, and neither can be given another reader.

    Args:
        read_metadata: reads the metadata from an open file.
    """
    from megatron.core.dist_checkpointing.strategies import common
    from torch.distributed.checkpoint import default_planner, filesystem

    if not isinstance(filesystem.pickle, _MetadataPickle):
        filesystem.pickle = _MetadataPickle(read_metadata)
        common.torch = default_planner.torch = filesystem.torch = _WeightsOnlyTorch("torch")


class _WeightsOnlyTorch(ModuleType):
    """The torch module for readers of checkpoints."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def load(self, file: Any, *_: Any, **__: Any) -> Any:
        """Load tensors and plain values from a path or an open file."""
        if isinstance(file, str | os.PathLike) and not os.path.isfile(file):
            # A pipe would block forever.
            raise FileNotFoundError(errno.ENOENT, "is no file", str(file))
        return torch.load(file, map_location="cpu", weights_only=True)


class _MetadataPickle(ModuleType):
    """The pickle module for PyTorch's reader of checkpoints, which loads their metadata."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        super().__init__("pickle")
        self.load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def handle_tensors_together() -> None:
    """Compute the norm of all gradients, scale them, and copy all master weights in a few kernels each.

    Without Transformer Engine and Apex, Megatron handles one tensor after the other and reads each norm on the host.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm_together, _scale_together
        optimizer._multi_tensor_copy_this_to_that = _copy_together


def _norm_together(chunk_size: int, flag: Any, lists: list[list[torch.Tensor]], per_tensor: bool) -> tuple:
    norms = [norm.float() for norm in torch._foreach_norm(lists[0])]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale_together(chunk_size: int, flag: Any, lists: list[list[torch.Tensor]], scale: float) -> None:
    torch._foreach_mul_(lists[0], scale)  # both lists are the gradients


def _copy_together(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: Any = None) -> None:
    if that:
        torch._foreach_copy_(that, this)


def run_adam_without_compiler() -> None:
    """Construct and step PyTorch's Adam without the import of TorchDynamo, which takes more than a second.

    PyTorch imports it to mark these functions for programs that compile their optimizer, and here none is compiled.
    """
    base, step = torch.optim.Optimizer, getattr(torch.optim.Adam.step, "__wrapped__", None)
    for marked in (base.add_param_group, base.zero_grad, base.state_dict, base.load_state_dict):
        marked.__wrapped__.__dynamo_disable = marked.__wrapped__  # where ``torch._disable_dynamo`` looks first
    if step is not None and step.__module__ == "torch.optim.adam":

        def step_outside_graphs(self: torch.optim.Adam, closure: Callable | None = None) -> Any:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, closure)

        torch.optim.Adam.step = step_outside_graphs


def place_parameters_of_all_buckets() -> None:
    """Gather a distributed optimizer's state with the padding between gradient buckets, on every machine.

    Megatron gathers the state of all buckets without their padding and then cuts parameters out of it at positions that
    count the padding. With several buckets, a checkpoint then silently holds moments and weights shifted by some
    elements. If the positions are right (one bucket, or a version that fixes this), nothing is changed.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    global _buckets_placed
    if not _buckets_placed:
        gather = DistributedOptimizer.get_parameter_state_dp_zero
        DistributedOptimizer.get_parameter_state_dp_zero = _with_padding(gather)
        _buckets_placed = True


def collect_states_by(collect: Callable[[Any], Any]) -> None:
    """Let ``collect(optimizer)`` collect a distributed optimizer's state if it is requested on all ranks.

    Megatron would gather all of it into the memory of every rank and has no option for this. Loading, and gathering on
    one rank, remain Megatron's.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    global _collected
    if _collected:
        return
    gather = DistributedOptimizer.get_parameter_state_dp_zero

    @functools.wraps(gather)
    def gather_or_collect(
        optimizer: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        if return_on_all_ranks and not empty_data:
            return collect(optimizer)
        return gather(optimizer, use_gloo_comm, empty_data, return_on_all_ranks)

    DistributedOptimizer.get_parameter_state_dp_zero = gather_or_collect
    _collected = True


def _with_padding(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_with_padding(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = gather(optimizer, *args, **kwargs)
        for index, buffer in enumerate(optimizer.buffers if state is not None else ()):
            last = max(end for _, end, _ in buffer.param_index_map.values())
            for tensors in state[index].values():
                for name, compact in tensors.items():
                    if torch.is_tensor(compact) and last > len(compact):
                        tensors[name] = _spread(compact, buffer)
        return state

    return gather_with_padding


def _spread(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    """The elements of every bucket at the bucket's position in the buffer."""
    spread, begin = compact.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        end = begin + bucket.numel_unpadded
        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[begin:end]
        begin = end
    return spread


class _ThreadContext:
    """The part of a multiprocessing context that the writer uses, with threads instead of processes."""

    Queue = JoinableQueue = queue.Queue
    Process = threading.Thread

    def Manager(self) -> _ThreadContext:  # noqa: N802 (the name is multiprocessing's)
        """Queues within this process need no server."""
        return self


class _MultiprocessingByThreads(ModuleType):
    """The multiprocessing module for the writer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.multiprocessing, name)

    def get_context(self, method: str | None = None) -> _ThreadContext:
        """Return threads for any start method."""
        return _ThreadContext()
