"""Holds the plan's arrays on the model's device; they are uploaded once, before the step.

Within the step, every array is a view of these tensors and every length is known on the host, so nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from megatron_dta.core.model.kernel_types import RowChunk, upload
from megatron_dta.core.planning.step.passes import StageProgram
from megatron_dta.core.planning.step.plan import LossBatch, StepPlan


@dataclass(frozen=True)
class SegmentEdges:
    """Edges whose logprobs the head computes for one segment (R rows, E edges of the rank's tokens of the segment).

    Attributes:
        rows: int64 [R], rows within the rank's tokens of the segment.
        edge_row: int64 [E], row of each edge within ``rows``; ``target`` int64 [E], its token id.
        logit_chunks: ranges of rows whose logits are alive together.
    """

    rows: Tensor
    edge_row: Tensor
    target: Tensor
    logit_chunks: list[RowChunk]


@dataclass(frozen=True)
class DeviceLossBatch:
    """Sequences whose losses are computed in one call: pairs [B, T] in sequence order; the pad index P fills the end of
    a row. ``sequences`` int64 [B] is on the host.
    """

    pair_index: Tensor
    loss_mask: Tensor
    sequences: np.ndarray


class DevicePlan:
    """Tensors of a ``StepPlan`` on ``device``; ``StepPlan`` defines the orders of edges, rows and pairs.

    Slots belong to one model chunk: their attributes are lists with an entry for each of the rank's model chunks.

    Args:
        own_tokens: the tokens of each segment that this rank computes, within the segment.

    Attributes:
        token_slot, host_slots: the slot of each token of the stream, on the device and on the host.
        own_rows, own_edges, own_pairs: of each segment those of the rank's tokens.
    """

    def __init__(
        self,
        plan: StepPlan,
        device: torch.device,
        program: StageProgram,
        forward_only: bool,
        rows_per_chunk: int,
        own_tokens: Sequence[range],
    ) -> None:
        segments, tree = plan.segments, plan.segments.tree
        self.start = segments.segment_start.tolist()
        self.slot_start = [starts.tolist() for starts in program.slot_start]
        self.segment_rows = plan.segment_rows.tolist()
        self.segment_edges = plan.segment_edges.tolist()
        own_begin = segments.segment_start[:-1] + np.array([tokens.start for tokens in own_tokens], dtype=np.int64)
        own_end = own_begin + np.array([len(tokens) for tokens in own_tokens], dtype=np.int64)
        self.own_rows, self.own_edges, self.own_pairs = _ranges(plan, own_begin, own_end)
        self.segment_runs = plan.paths.segment_runs.tolist()
        self.path_lengths = plan.paths.lengths.tolist()
        self.num_pairs = plan.num_pairs

        lengths, stream = np.diff(segments.segment_start), np.arange(tree.num_tokens)
        self.host_slots = [
            np.repeat(starts - segments.segment_start[:-1], lengths) + stream for starts in program.slot_start
        ]
        segment_of_row = np.repeat(np.arange(segments.num_segments), np.diff(plan.segment_rows))
        segment_of_edge = np.repeat(np.arange(segments.num_segments), np.diff(plan.segment_edges))
        first_row = np.array([rows.start for rows in self.own_rows], dtype=np.int64)
        loss_batches = [[] if forward_only else of_segment for of_segment in plan.loss_batches]
        of_tokens = [tree.token_ids, tree.position, tree.subtree_end, stream]
        of_rows = [plan.row_stream - own_begin[segment_of_row], plan.pairs_per_row]
        of_edges = [plan.edge_row, plan.edge_row - first_row[segment_of_edge], plan.edge_target, plan.pairs_per_edge]
        # The additional entry is for the pad index: it reads edge 0 and writes past the last pair.
        of_pairs = [np.append(plan.pair_edge, 0), np.append(plan.pair_rank, plan.num_pairs)]
        of_losses = [batch.pair_index for of_segment in loss_batches for batch in of_segment]
        arrays = [*of_tokens, plan.paths.run_begin, plan.paths.run_length, *of_rows, *of_edges, *of_pairs]
        uploaded = iter(upload([*arrays, *self.host_slots, *of_losses], device))
        self.token_ids, self.positions, self.subtree_end, self.stream = islice(uploaded, 4)
        self.run_begin, self.run_length = islice(uploaded, 2)
        self.local_row, self.pairs_per_row = islice(uploaded, 2)
        self.edge_row, self.local_edge_row, self.edge_target, self.pairs_per_edge = islice(uploaded, 4)
        self.pair_edge, self.pair_rank = islice(uploaded, 2)
        self.token_slot = list(islice(uploaded, len(self.host_slots)))
        self.logit_chunks = [
            _logit_chunks(plan, rows, edges.start, rows_per_chunk)
            for rows, edges in zip(self.own_rows, self.own_edges, strict=True)
        ]
        self.loss_batches = [
            [self._loss_batch(batch, next(uploaded)) for batch in of_segment] for of_segment in loss_batches
        ]

    def _loss_batch(self, batch: LossBatch, pair_index: Tensor) -> DeviceLossBatch:
        pair_index = pair_index.view(batch.pair_index.shape)
        return DeviceLossBatch(pair_index, pair_index < self.num_pairs, batch.sequences)

    def edges_of(self, segment: int) -> SegmentEdges:
        rows, edges = self.own_rows[segment], self.own_edges[segment]
        return SegmentEdges(
            self.local_row[rows], self.local_edge_row[edges], self.edge_target[edges], self.logit_chunks[segment]
        )

    def path_of(self, segment: int) -> Tensor:
        """Stream indices int64 [A] of the segment's ancestors in earlier segments, in order."""
        tokens, runs = self.path_lengths[segment], slice(*self.segment_runs[segment : segment + 2])
        if not tokens:
            return self.stream[:0]
        begin, length = self.run_begin[runs], self.run_length[runs]
        # Token i of the path is token i - (tokens of earlier runs) of its run. The size is given, so nothing waits.
        shift = begin - (length.cumsum(0) - length)
        return self.stream[:tokens] + shift.repeat_interleave(length, output_size=tokens)


def _ranges(plan: StepPlan, begin: np.ndarray, end: np.ndarray) -> tuple[list[slice], list[slice], list[slice]]:
    """Rows, edges and pairs (in edge order) of the stream tokens ``begin`` to ``end`` of each segment."""
    pairs = np.concatenate([[0], np.cumsum(plan.pairs_per_edge)])
    rows = [np.searchsorted(plan.row_stream, bound) for bound in (begin, end)]
    edges = [np.searchsorted(plan.edge_row, bound) for bound in rows]
    ranges = (rows, edges, [pairs[bound] for bound in edges])
    return tuple([slice(a, b) for a, b in zip(*(bound.tolist() for bound in both), strict=True)] for both in ranges)


def _logit_chunks(plan: StepPlan, rows: slice, edge_begin: int, most_rows: int) -> list[RowChunk]:
    bounds = np.linspace(rows.start, rows.stop, 1 - (rows.start - rows.stop) // most_rows).astype(np.int64)
    edges = np.searchsorted(plan.edge_row, bounds) - edge_begin
    local = bounds - rows.start
    ends = (local[:-1], local[1:], edges[:-1], edges[1:])
    return [RowChunk(*chunk) for chunk in zip(*(bound.tolist() for bound in ends), strict=True)]
