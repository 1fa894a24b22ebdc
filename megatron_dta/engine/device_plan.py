"""Holds the plan's arrays on the model's device; they are uploaded once, before the step.

Within the step, every array is a view of these tensors and every length is known on the host, so nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.model import RowChunk
from megatron_dta.planning.step.passes import StageProgram
from megatron_dta.planning.step.plan import StepPlan


@dataclass(frozen=True)
class SegmentEdges:
    """Edges whose logprobs the head computes for one segment (R rows, E edges of the segment).

    Attributes:
        rows: int64 [R], rows within the segment's tokens.
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
    """

    def __init__(
        self, plan: StepPlan, device: torch.device, program: StageProgram, forward_only: bool, rows_per_chunk: int
    ) -> None:
        segments, tree = plan.segments, plan.segments.tree
        self.start = segments.segment_start.tolist()
        self.slot_start = [starts.tolist() for starts in program.slot_start]
        self.segment_rows = plan.segment_rows.tolist()
        self.segment_edges = plan.segment_edges.tolist()
        self.segment_pairs = plan.segment_pairs.tolist()
        self.segment_runs = plan.paths.segment_runs.tolist()
        self.path_lengths = plan.paths.lengths.tolist()
        self.num_pairs = plan.num_pairs

        def upload(array: np.ndarray) -> Tensor:
            tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        lengths, stream = np.diff(segments.segment_start), np.arange(tree.num_tokens)
        self.token_ids = upload(tree.token_ids)
        self.positions = upload(tree.position)
        self.subtree_end = upload(tree.subtree_end)
        self.stream = upload(stream)
        self.token_slot = [
            upload(np.repeat(starts - segments.segment_start[:-1], lengths) + stream) for starts in program.slot_start
        ]
        self.run_begin, self.run_length = upload(plan.paths.run_begin), upload(plan.paths.run_length)
        segment_of_row = np.repeat(np.arange(segments.num_segments), np.diff(plan.segment_rows))
        self.local_row = upload(plan.row_stream - segments.segment_start[segment_of_row])
        self.edge_row = upload(plan.edge_row)
        segment_of_edge = np.repeat(np.arange(segments.num_segments), np.diff(plan.segment_edges))
        self.local_edge_row = upload(plan.edge_row - plan.segment_rows[segment_of_edge])
        self.edge_target = upload(plan.edge_target)
        self.pairs_per_edge, self.pairs_per_row = upload(plan.pairs_per_edge), upload(plan.pairs_per_row)
        # The additional entry is for the pad index: it reads edge 0 and writes behind the last pair.
        self.pair_edge = upload(np.append(plan.pair_edge, 0))
        self.pair_rank = upload(np.append(plan.pair_rank, plan.num_pairs))
        self.logit_chunks = [_logit_chunks(plan, segment, rows_per_chunk) for segment in range(segments.num_segments)]
        self.loss_batches = [
            []
            if forward_only
            else [
                DeviceLossBatch(index := upload(batch.pair_index), index < plan.num_pairs, batch.sequences)
                for batch in segment_batches
            ]
            for segment_batches in plan.loss_batches
        ]

    def edges_of(self, segment: int) -> SegmentEdges:
        rows = slice(self.segment_rows[segment], self.segment_rows[segment + 1])
        edges = slice(self.segment_edges[segment], self.segment_edges[segment + 1])
        return SegmentEdges(
            self.local_row[rows], self.local_edge_row[edges], self.edge_target[edges], self.logit_chunks[segment]
        )

    def path_of(self, segment: int) -> Tensor:
        """Stream indices int64 [A] of the segment's ancestors in earlier segments, in order."""
        runs = slice(self.segment_runs[segment], self.segment_runs[segment + 1])
        begin, length = self.run_begin[runs], self.run_length[runs]
        # Token i of the path is token i - (tokens of earlier runs) of its run. The size is given, so nothing waits.
        shift = begin - (length.cumsum(0) - length)
        tokens = self.path_lengths[segment]
        return self.stream[:tokens] + shift.repeat_interleave(length, output_size=tokens)


def _logit_chunks(plan: StepPlan, segment: int, rows_per_chunk: int) -> list[RowChunk]:
    row_begin, row_end = plan.segment_rows[segment : segment + 2].tolist()
    edge_begin = int(plan.segment_edges[segment])
    bounds = [*range(row_begin, row_end, rows_per_chunk), row_end]
    edges = np.searchsorted(plan.edge_row, bounds)
    return [
        RowChunk(
            bounds[i] - row_begin, bounds[i + 1] - row_begin, int(edges[i]) - edge_begin, int(edges[i + 1]) - edge_begin
        )
        for i in range(len(bounds) - 1)
    ]
