"""Rollouts of an engine that speculates: its metrics, and its trees in the checkpoint.

The samples need none of this: a run resumed without trees samples the same, in more passes until they have grown.

Every replica has the samples of all in its trees (``SuffixDrafting.share``), so what a checkpoint keeps of the first
one serves any number of them. Estimates of acceptance are the first one's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_dta.model import current_mesh
from megatron_dta.rollouts.collection_order import RolloutSource, WrappedSource
from megatron_dta.rollouts.record import Rollout
from megatron_dta.sampling.engines.in_process.drafting import SuffixDrafting

_STATE = "speculation"


class SpeculatingSource(WrappedSource):
    """``inner``, whose engine drafts by ``drafting``."""

    def __init__(self, inner: RolloutSource, drafting: SuffixDrafting) -> None:
        super().__init__(inner)
        self._drafting = drafting

    def next_batch(self, step: int) -> list[Rollout]:
        rollouts = self._inner.next_batch(step)
        self._drafting.share()
        return rollouts

    def state_dict(self, wait: bool = True) -> dict[str, Any]:
        """See ``RolloutSource``; the same on every rank."""
        arrays = self._drafting.speculator.state_dict()
        state = {
            name: value.tolist() if value.dtype.kind == "U" else torch.from_numpy(np.array(value))
            for name, value in arrays.items()
        }
        # Of what a replica has learned from its own samples, and in which order, each knows something else.
        return self._inner.state_dict(wait) | {_STATE: current_mesh().from_first(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(_STATE)
        self._inner.load_state_dict({name: value for name, value in state.items() if name != _STATE})
        if own is not None:
            arrays = {
                name: value.numpy() if isinstance(value, torch.Tensor) else np.array(value, dtype=np.str_)
                for name, value in own.items()
            }
            self._drafting.speculator.load_state_dict(arrays)

    def timing(self) -> dict[str, float]:
        """How much was drafted follows from what a pass was measured to cost."""
        return self._inner.timing() | self._drafting.speculator.current_report().metrics()
