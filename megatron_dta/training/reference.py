"""The frozen reference model: on the device all the time, or there only while it computes logprobs.

Its weights never change, so with ``--offload-reference`` a copy on the host is made once; a pass copies it to the
device and then drops what is there. Nothing is ever copied back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_dta.engine import TreeEngine


class Reference:
    """Engine on a frozen model.

    Args:
        offload: keep the weights on the host between passes.
    """

    def __init__(self, engine: TreeEngine, offload: bool = False) -> None:
        self.engine = engine
        self._host: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None
        if offload:
            self._host = [(p, _host_copy(p)) for part in engine.tree_models for p in part.parameters()]
            self._drop()

    @contextmanager
    def on_device(self) -> Iterator[TreeEngine]:
        """The engine, ready to run."""
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
