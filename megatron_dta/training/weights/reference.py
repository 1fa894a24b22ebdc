"""The frozen reference model: a separate model, or the base of a policy with LoRA adapters.

The weights of a separate model never change. They stay on the device or, with ``--offload-reference``, are there only
while they compute logprobs. A host copy is made once. Each pass copies it to the device and frees the device copy
afterwards; nothing is copied back. A policy with adapters needs no second model: the reference is a pass of the policy
without its adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.layers.lora import without_adapters
from megatron_dta.training.weights.offload import HostStorages


class Reference:
    """An engine on the frozen reference model.

    Args:
        offload: keep the weights on the host between passes.
        is_base: the engine's model is the policy; the reference is the policy without its adapters.
    """

    def __init__(self, engine: TreeEngine, offload: bool = False, is_base: bool = False) -> None:
        self.engine, self._is_base = engine, is_base
        self._storages: HostStorages | None = None
        if offload:
            parameters = (parameter for chunk in engine.tree_models for parameter in chunk.parameters())
            self._storages = HostStorages(parameters, constant=True)
            self._storages.to_host()

    @contextmanager
    def on_device(self) -> Iterator[TreeEngine]:
        """Yield the engine with its weights on the device and without adapters."""
        if self._is_base:
            with without_adapters(self.engine.tree_models):
                yield self.engine
            return
        if self._storages is None:
            yield self.engine
            return
        self._storages.to_device()
        try:
            yield self.engine
        finally:
            self._storages.to_host()
