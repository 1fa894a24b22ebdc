"""Returns on all ranks the rollouts that rank 0 samples without a break, on weights that change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.stream.begun_group import unpacked
from megatron_dta.extras.servers.stream.group_sampler import GroupSampler
from megatron_dta.extras.servers.stream.rollout_stream import RolloutStream, StreamLimits
from megatron_dta.sampling.host_weights import HostWeights
from megatron_dta.sampling.sources.rank0_source import Rank0Source, WeightsWriter, pack_rollout, unpack_rollout

_WAIT_S = 1.0


class StreamSource(Rank0Source):
    """``Rank0Source`` with a ``RolloutStream`` in place of batches that are sampled one after another.

    Args:
        sampler, engine: None on the other ranks.
        writer, current_step: see ``Rank0Source``.
    """

    def __init__(
        self,
        sampler: GroupSampler | None,
        engine: HttpEngine | None,
        writer: WeightsWriter,
        current_step: Callable[[], int],
        limits: StreamLimits,
    ) -> None:
        super().__init__(None, engine, writer, current_step)
        self._stream = None if sampler is None else RolloutStream(sampler, self._update, limits)

    def state_dict(self) -> dict[str, Any]:
        """See ``RolloutSource``; nothing is waited for, since unfinished groups go on with their tokens."""
        state: dict[str, Any] = {}
        if self._stream is not None:
            state = self._stream.state_dict()
            finished = state["finished"]
            state["finished"] = [
                {"group": group, "rollouts": [pack_rollout(rollout) for rollout in finished[group]]}
                for group in finished
            ]
            state["begun"] = [{"group": group, **begun.packed()} for group, begun in state["begun"].items()]
        return self._mesh.from_first({"stream": state})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("stream")
        if self._stream is not None and saved:
            groups = {
                entry["group"]: [unpack_rollout(rollout) for rollout in entry["rollouts"]]
                for entry in saved["finished"]
            }
            begun = {entry["group"]: unpacked(entry) for entry in saved["begun"]}
            self._stream.load_state_dict(saved | {"finished": groups, "begun": begun})

    def _taking(self, number: int, current: int) -> Callable[[], tuple[list[Rollout], dict[str, float]] | None]:
        return lambda: self._stream.take(number, current, _WAIT_S)

    def _run(self, job: Callable[[], Any]) -> Future[Any]:
        return self._stream.run(job)

    def _stop(self) -> None:
        self._stream.close()

    def _offer(self, version: int, weights: Path | HostWeights | None) -> None:
        self._stream.offer(version, weights)
