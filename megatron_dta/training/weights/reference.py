"""The frozen reference model: a separate model, or the base of a policy with LoRA adapters.

The weights of a separate model never change. They stay on the device or, with ``--offload-reference``, are there only
while they compute logprobs. A host copy is made once. Each pass copies it to the device and frees the device copy
afterwards; nothing is copied back. A policy with adapters needs no second model: the reference is a pass of the policy
without its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_dta.engine import TreeEngine
from megatron_dta.model import without_adapters


class Reference:
    """An engine on the frozen reference model.

    Args:
        offload: keep the weights on the host between passes.
        is_base: the engine's model is the policy; the reference is the policy without its adapters.
    """

    def __init__(self, engine: TreeEngine, offload: bool = False, is_base: bool = False) -> None:
        self.engine, self._is_base = engine, is_base
        self._host: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
        if offload:
            self._host = [(p, _host_copy(p)) for chunk in engine.tree_models for p in chunk.parameters()]
            self._drop()

    @contextmanager
    def on_device(self) -> Iterator[TreeEngine]:
        """Yield the engine with its weights on the device and without adapters."""
        if self._is_base:
            with without_adapters(self.engine.tree_models):
                yield self.engine
            return
        if self._host is None:
            yield self.engine
            return
        for parameter, weights in self._host:
            parameter.data = weights.to(self.engine.device, non_blocking=True, copy=True)
        try:
            yield self.engine
        finally:
            self._drop()

    def _drop(self) -> None:
        for parameter, weights in self._host or []:
            parameter.data = weights.new_empty(0, device=self.engine.device)


def _host_copy(parameter: torch.nn.Parameter) -> torch.Tensor:
    copy = parameter.detach().to("cpu", copy=True)
    # Copies from pinned memory to a GPU are asynchronous.
    return copy.pin_memory() if parameter.device.type == "cuda" else copy
