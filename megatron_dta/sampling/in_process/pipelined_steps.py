"""Runs bursts of decoding passes on all stages of a pipeline at once.

The tokens of a pass are needed at the first stage before the same rows can take their next step, so one batch keeps
only one stage busy. The rows are therefore divided into as many groups as there are stages. While a stage runs one
group, the next stage runs the group before it, and the last stage sends the tokens that it has drawn back to the first
one. All messages are between devices; the host waits once for a burst, at whose end the last stage sends all tokens
and logprobs to the other stages.

Rank r of P runs every P-th visit of a group, those with numbers r, r + P, r + 2P, ... With two model chunks on a
rank, a step of a group has 2P visits. Example, P = 2, one chunk, groups A and B, two steps::

    rank 0    A step 0    B step 0    A step 1    B step 1
    rank 1                A step 0    B step 0    A step 1    B step 1

Every visit but the last ends with a message to the next rank (from the last to the first). Between two ranks all
messages pass in the same direction of a channel and in the same order, and a rank receives only what it needs next. So
nothing can deadlock, even if every send waits for its receiver. A receive starts after the computation before it, in
order not to take multiprocessors from it; the stage that takes longest finds its messages waiting.

The computation of a visit is a CUDA graph (``cuda_graphs``), which all groups of one size share. Messages are between
graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Work

from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import HeadShape
from megatron_dta.core.model.kernel_types import upload
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.stage_channels import stage_channels
from megatron_dta.core.model.parallel.staged_model import Model, StagedModel
from megatron_dta.sampling.in_process.cuda_graphs import Burst, CapturedPass, DecodeSteps, RunningBurst
from megatron_dta.sampling.params import SamplingParams


@dataclass
class _Group:
    """Consecutive rows of a burst.

    Attributes:
        burst: the group's part of it.
        columns: its tokens among those of the whole burst.
        passes: one of each model chunk of the rank.
        words: inputs of each step on the device.
        token_ids: inputs of the first step on the device.
        leaving: the last message to the next rank, which must exist until it is sent.
    """

    burst: Burst
    columns: slice
    passes: list[CapturedPass]
    words: Tensor | None = None
    token_ids: Tensor | None = None
    leaving: tuple[Tensor, Work] | None = None


class PipelinedSteps(DecodeSteps):
    """``DecodeSteps`` of a model on several pipeline stages, which must all make the same calls."""

    runs_ahead = False

    def __init__(self, model: StagedModel, shape: HeadShape, page_size: int, max_rows: int) -> None:
        super().__init__(model, shape, page_size, max_rows)
        mesh = current_mesh()
        self._stage, self._num_stages = mesh.pipeline_rank, mesh.pipeline_size
        self._num_visits = self._num_stages * len(model.model_chunks)

    def launch(self, cache: PagedCache, burst: Burst, params: SamplingParams) -> RunningBurst:
        self._read(cache, burst)
        groups = self._upload(burst, params)
        drawn = torch.zeros(burst.noise.shape[0], 2, burst.noise.shape[1], dtype=torch.float64, device=cache.device)
        for number in range(self._stage, len(burst.noise) * self._num_visits, self._num_stages):
            for group in groups:
                if number < len(group.burst.noise) * self._num_visits:
                    self._visit(group, number, drawn)
        for group in groups:
            if group.leaving is not None:
                group.leaving[1].wait()
        self._share(drawn)
        return RunningBurst(drawn, drawn.shape[2])

    def _upload(self, burst: Burst, params: SamplingParams) -> list[_Group]:
        """The groups of ``burst``, with their inputs and page tables on the device."""
        groups, arrays, tables, end = [], [], [], 0
        for part in divided(burst, self._num_stages):
            columns = slice(end, end + len(part.token_ids))
            passes = [self._captured(part, params, chunk) for chunk in range(len(self._model.model_chunks))]
            words, own_tables = self._inputs(part, passes[0].static, sum(map(len, tables)))
            groups.append(_Group(part, columns, passes))
            arrays += [part.token_ids, words]
            tables.append(own_tables)
            end = columns.stop
        *inputs, tables_on_device = upload([*arrays, np.concatenate(tables)], self._tables.device)
        self._tables[: len(tables_on_device)].copy_(tables_on_device)
        for i, group in enumerate(groups):
            group.token_ids = inputs[2 * i]
            group.words = inputs[2 * i + 1].view(len(group.burst.noise), -1)
        return groups

    def _visit(self, group: _Group, number: int, drawn: Tensor) -> None:
        """Run visit ``number`` of a group from its input to its message, and keep what is drawn."""
        step, virtual_stage = divmod(number, self._num_visits)
        captured = group.passes[virtual_stage // self._num_stages]
        static, n = captured.static, len(group.burst.token_ids)
        if number > 0:
            self._receive(static.input_ids if captured.hidden is None else captured.hidden)
        else:
            static.input_ids[0, :n].copy_(group.token_ids)
        static.words.copy_(group.words[step])
        out = captured.run()
        is_last = virtual_stage == self._num_visits - 1
        if is_last:
            drawn[step, :, group.columns] = out[:, :n]
        if number + 1 < len(group.burst.noise) * self._num_visits:
            self._send(group, static.input_ids if is_last else out)

    def _receive(self, tensor: Tensor) -> None:
        """Receive the message of the previous rank; on a GPU the stream waits for it, not the host."""
        channels = stage_channels()
        channel = channels.up if self._stage > 0 else channels.down
        torch.distributed.irecv(tensor, channels.ranks[self._stage - 1], group=channel).wait()

    def _send(self, group: _Group, tensor: Tensor) -> None:
        """Send a copy of ``tensor`` to the next rank, because the next run of the pass overwrites it."""
        channels, receiver = stage_channels(), (self._stage + 1) % self._num_stages
        if group.leaving is not None:
            group.leaving[1].wait()  # received, since the group has been on all other ranks in the meantime
        channel = channels.up if receiver > 0 else channels.down
        message = tensor.clone(memory_format=torch.contiguous_format)
        group.leaving = message, torch.distributed.isend(message, channels.ranks[receiver], group=channel)

    def _share(self, drawn: Tensor) -> None:
        """Send what was drawn from the last stage to all others."""
        channels = stage_channels()
        torch.distributed.broadcast(drawn, channels.ranks[-1], group=self._model.group)


def decode_steps(model: Model, shape: HeadShape, page_size: int, max_rows: int) -> DecodeSteps:
    """The steps of ``model`` on one or several pipeline stages."""
    kind = PipelinedSteps if isinstance(model, StagedModel) else DecodeSteps
    return kind(model, shape, page_size, max_rows)


def divided(burst: Burst, most: int) -> list[Burst]:
    """``burst`` in at most ``most`` groups of consecutive rows, whose numbers of rows differ by at most one.

    A group ends with the last step of its rows.
    """
    num_rows = len(burst.starts)
    ends, groups = np.cumsum(burst.counts), []
    for rows in np.array_split(np.arange(num_rows), min(most, num_rows)):
        group = slice(int(rows[0]), int(rows[-1]) + 1)
        tokens = slice(int(ends[group.start] - burst.counts[group.start]), int(ends[group.stop - 1]))
        states = None if burst.states is None else (burst.states[0], burst.states[1][group])
        starts, counts, tables = burst.starts[group], burst.counts[group], burst.tables[group]
        steps, token_ids = burst.steps[group], burst.token_ids[tokens]
        groups.append(Burst(token_ids, starts, counts, tables, steps, burst.noise[: steps.max(), tokens], states))
    return groups
