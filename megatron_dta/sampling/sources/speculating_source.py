"""Rollouts from an engine that speculates: reports its metrics and saves its suffix trees in the checkpoint.

The samples do not depend on this state: a run resumed without the trees draws the same samples, in more passes until
the trees have grown again.

The trees of every replica contain the samples of all replicas (``SuffixDrafting.share``), so the trees of the first
replica, which a checkpoint stores, serve any number of replicas. The acceptance estimates in it are those of the first
replica.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.sources.batch_source import RolloutSource, WrappedSource

_STATE = "speculation"


class SpeculatingSource(WrappedSource):
    """``inner``, whose engine drafts with ``drafting``."""

    def __init__(self, inner: RolloutSource, drafting: SuffixDrafting) -> None:
        super().__init__(inner)
        self._drafting = drafting

    def next_batch(self, step: int) -> list[Rollout]:
        rollouts = self._inner.next_batch(step)
        self._drafting.share()
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``; the same on every rank."""
        arrays = self._drafting.speculator.state_dict()
        state = {
            name: value.tolist() if value.dtype.kind == "U" else torch.from_numpy(np.array(value))
            for name, value in arrays.items()
        }
        # The replicas' states differ in acceptance estimates and insertion order, so all ranks keep the first one's.
        return self._inner.state_dict() | {_STATE: current_mesh().from_first(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get(_STATE)
        self._inner.load_state_dict({name: value for name, value in state.items() if name != _STATE})
        if saved is not None:
            arrays = {
                name: value.numpy() if isinstance(value, torch.Tensor) else np.array(value, dtype=np.str_)
                for name, value in saved.items()
            }
            self._drafting.speculator.load_state_dict(arrays)

    def timing(self) -> dict[str, float]:
        """Adds the draft metrics, which depend on the measured cost of a pass."""
        return self._inner.timing() | self._drafting.speculator.current_report().metrics()
