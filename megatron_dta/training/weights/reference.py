"""The frozen reference model: a model of its own, or the base of a policy with LoRA adapters.

The weights of its own model never change. They are on the device all the time, or, with ``--offload-reference``, there
only while they compute logprobs: a copy on the host is made once; a pass copies it to the device and then drops what is
there. Nothing is ever copied back. A policy with adapters needs no second model: a pass without them is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_dta.engine import TreeEngine
from megatron_dta.model import without_adapters


class Reference:
    """Engine on a frozen model.

    Args:
        offload: keep the weights on the host between passes.
        is_base: the engine's model is the policy, and the reference is that without its adapters.
    """

    def __init__(self, engine: TreeEngine, offload: bool = False, is_base: bool = False) -> None:
        self.engine, self._is_base = engine, is_base
        self._host: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
        if offload:
            self._host = [(p, _host_copy(p)) for part in engine.tree_models for p in part.parameters()]
            self._drop()

    @contextmanager
    def on_device(self) -> Iterator[TreeEngine]:
        """The engine, ready to run."""
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
    # Pinned memory is what a GPU copies from without waiting.
    return copy.pin_memory() if parameter.device.type == "cuda" else copy
