"""A plugin for vLLM on CPUs, for tests only: its weight transfer engine, with gloo in place of NCCL.

vLLM loads it by the entry point that ``vllm_process`` writes, in each of its processes, and finds "gloo" in its
factory. The engine is vLLM's own for "nccl", but for the process group and what only a GPU has: streams, events and the
current device. With ``DTA_PLAIN_LINEAR`` in the environment linear layers keep their weights as they were loaded,
instead of packed for the CPU, so their checksums can be compared.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor
from torch import distributed as dist

_TIMEOUT = timedelta(seconds=120)


class GlooGroup:
    """A member of the trainer's group, with the methods of vLLM's communicator; the id says where the trainer is."""

    device = torch.device("cpu")

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: object) -> None:
        del device
        address, port, name = unique_id.decode().split()
        store: Any = dist.TCPStore(address, int(port), world_size, False, timeout=_TIMEOUT, use_libuv=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)

    def broadcast(self, values: Tensor, src: int, stream: object = None) -> None:
        del stream
        options = dist.BroadcastOptions()
        options.rootRank = src
        if values.numel():
            self._group.broadcast([values.view(-1).view(torch.uint8)], options).wait(_TIMEOUT)

    def destroy(self) -> None:
        self._group.abort()


@contextmanager
def _without_gpu() -> Iterator[None]:
    """What the engines ask of a GPU does nothing."""
    nothing = {
        "torch.accelerator.current_device_index": lambda: 0,
        "torch.accelerator.current_stream": MagicMock(),
        "torch.cuda.current_stream": MagicMock(),
        "torch.cuda.stream": lambda stream: nullcontext(),
        "torch.Event": MagicMock(),
        "torch.Tensor.record_stream": MagicMock(),
        "vllm.distributed.weight_transfer.packed_tensor._get_streams": lambda device, count: [MagicMock()] * count,
        "vllm.distributed.weight_transfer.nccl_common.uid_init_process_group": GlooGroup,
    }
    with ExitStack() as stack:
        for name, value in nothing.items():
            stack.enter_context(patch(name, value))
        yield


def _on_cpu(engine: type) -> type:
    class OnCpu(engine):
        def init_transfer_engine(self, init_info: Any) -> None:
            with _without_gpu():
                super().init_transfer_engine(init_info)

        def receive_weights(self, update_info: Any) -> None:
            with _without_gpu():
                super().receive_weights(update_info)

    return OnCpu


def register() -> None:
    """Called by vLLM in each of its processes, maybe several times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", _on_cpu(NCCLWeightTransferEngine))
    if os.environ.get("DTA_PLAIN_LINEAR"):
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
