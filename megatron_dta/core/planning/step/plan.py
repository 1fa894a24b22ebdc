"""Plans one step: the forest, its segments, and the trained edges, (sequence, token) pairs and loss batches of each.

The plan is made once from the sequences, and every pass of the step uses it (old logprobs, reference logprobs,
training). A logprob belongs to an *edge* parent -> child of the forest. A loss belongs to a *pair* of a sequence and
one of its trained tokens. Sequences that share a token have several pairs on one edge. At a branch point several edges
leave one *row*: the parent token, with one distribution over the vocabulary. Only edges that some sequence trains
exist in the plan.

Orders: edges are sorted by (row, child) in the stream, so the edges, rows and pairs of a segment are contiguous. Pairs
have two orders: by sequence (the order of the loss's fields) and by edge (the order in which gradients are summed).
``pair_rank`` maps the first order to the second.

Example: two sequences share the tokens a b and continue with c and with d; b, c and d are trained. There are 3 edges
(a b, b c, b d), 2 rows (a, b) and 4 pairs, because both sequences train b.

Legend: E edges, R rows, P pairs, Q sequences, N stream tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_dta.core.planning.segments.plan import RootPaths, SegmentPlan, root_paths
from megatron_dta.core.planning.step.evaluate import StepChoice
from megatron_dta.core.planning.step.passes import PassPlan, PipelineShape, plan_passes
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.tree import PrefixTree

if TYPE_CHECKING:
    from megatron_dta.core.planning.segments.runs import SegmentRuns


# Maximum number of elements of a loss batch: 1 MiB per field in float32. A longer sequence gets a batch of its own.
MAX_ELEMENTS = 1 << 18
# Below this area, padding costs less than another launch of the loss.
FREE_ELEMENTS = 1 << 12


@dataclass(frozen=True)
class LossBatch:
    """Sequences that complete in one segment and whose losses are computed in one call.

    A loss is written for the trained tokens of one sequence, with time as the last axis; a batch adds a leading axis.
    The rectangle costs padding, so it holds sequences of similar length and its area is bounded.

    Attributes:
        sequences: int64 [B].
        pair_index: int64 [B, T], the pair of each token, in sequence order; P, the number of pairs, marks padding.
    """

    sequences: np.ndarray
    pair_index: np.ndarray


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step; the module's docstring defines edges, rows and pairs.

    Attributes:
        segments: the forest and its segments.
        num_sequence_tokens: sum of the sequences' lengths up to their last trained tokens
            (``TrainingSample.needed_length``).
        training, forward_only: the pass with backwards and the pass without.
        row_stream: int64 [R], stream index of each row.
        edge_row: int64 [E], row of each edge.
        edge_target: int64 [E], token id of each edge's child.
        pairs_per_edge: int64 [E], number of pairs on each edge.
        pairs_per_row: int64 [R], number of pairs on the edges of each row.
        pair_edge: int64 [P], edge of each pair, in sequence order.
        pair_rank: int64 [P], position of each pair in edge order.
        sequence_pairs: int64 [Q + 1], offsets of each sequence's pairs.
        segment_rows, segment_edges, segment_pairs: int64 [segments + 1], offsets of each segment (pairs in edge order).
        loss_batches: for each segment, the sequences whose last row is in it, grouped for the loss.
        paths: each segment's ancestors in earlier segments.
        memory_tokens: maximum number of tokens that may be in flight; 0 if the plan's own peak is the limit.
        activation_tokens: maximum number of tokens in flight whose activations are kept; None for all.
        num_ranks: ranks that run the same ops as this one, itself included (``synchronized_plan``).
        context_size: ranks that divide the tokens of each segment.
    """

    segments: SegmentPlan
    num_sequence_tokens: int
    training: PassPlan
    forward_only: PassPlan
    row_stream: np.ndarray
    edge_row: np.ndarray
    edge_target: np.ndarray
    pairs_per_edge: np.ndarray
    pairs_per_row: np.ndarray
    pair_edge: np.ndarray
    pair_rank: np.ndarray
    sequence_pairs: np.ndarray
    segment_rows: np.ndarray
    segment_edges: np.ndarray
    segment_pairs: np.ndarray
    loss_batches: list[list[LossBatch]]
    paths: RootPaths
    memory_tokens: int
    activation_tokens: int | None
    num_ranks: int = 1
    context_size: int = 1

    def digest(self, plan: PassPlan) -> str:
        """Hash of the ops, segments and sequences; ranks with equal digests run the same pass."""
        content = hashlib.sha256(plan.schedule.digest().encode())
        tree = self.segments.tree
        for array in (
            self.segments.segment_start,
            tree.token_ids,
            tree.subtree_end,
            plan.kept if plan.kept is not None else np.zeros(0),
            self.sequence_pairs,
            self.pair_edge,
        ):
            content.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
        return content.hexdigest()

    @cached_property
    def runs(self) -> SegmentRuns:
        """The runs of the segments, for layers that carry a state along a path."""
        from megatron_dta.core.planning.segments.runs import SegmentRuns

        return SegmentRuns.of(self.segments)

    @property
    def num_pairs(self) -> int:
        """Number of pairs: the trained tokens of all sequences, shared tokens counted once per sequence."""
        return len(self.pair_edge)


def plan_segmented_step(
    samples: Sequence[TrainingSample], choice: StepChoice, pipeline: PipelineShape, activation_tokens: int | None = None
) -> StepPlan:
    """Plan a step whose segments and kept activations are already chosen."""
    segments, lengths = choice.segments, [sample.needed_length for sample in samples]
    tree = segments.tree

    # Pairs in sequence order, each identified by its child token in the stream.
    stream, _ = tree.stream_indices_of(np.arange(len(samples)))
    mask = np.concatenate([np.zeros(0, bool), *(s.loss_mask[:n] for s, n in zip(samples, lengths, strict=True))])
    pair_child = stream[mask].astype(np.int64)
    sequence_pairs = np.concatenate([[0], np.cumsum([sample.num_trained for sample in samples])]).astype(np.int64)

    child, edge_row, row_stream, pair_edge = _edges(tree, pair_child)
    pair_rank = np.empty(len(pair_edge), dtype=np.int64)
    pair_rank[np.argsort(pair_edge, kind="stable")] = np.arange(len(pair_edge))
    pairs_per_edge = np.bincount(pair_edge, minlength=len(child)).astype(np.int64)
    pairs_per_row = np.bincount(edge_row, weights=pairs_per_edge, minlength=len(row_stream)).astype(np.int64)

    # Offsets of each segment.
    segment_rows = np.searchsorted(row_stream, segments.segment_start)
    segment_edges = np.searchsorted(edge_row, segment_rows)
    segment_pairs = np.concatenate([[0], np.cumsum(pairs_per_edge)])[segment_edges].astype(np.int64)
    last_row = row_stream[edge_row[pair_edge[sequence_pairs[1:] - 1]]] if len(samples) else np.zeros(0, np.int64)
    completed_in = np.searchsorted(segments.segment_start, last_row, side="right") - 1

    passes = choice.passes or plan_passes(segments, np.diff(segment_edges), choice.kept, pipeline)
    return StepPlan(
        segments=segments,
        num_sequence_tokens=sum(lengths),
        training=passes[0],
        forward_only=passes[1],
        row_stream=row_stream,
        edge_row=edge_row.astype(np.int64),
        edge_target=tree.token_ids[child].astype(np.int64),
        pairs_per_edge=pairs_per_edge,
        pairs_per_row=pairs_per_row,
        pair_edge=pair_edge,
        pair_rank=pair_rank,
        sequence_pairs=sequence_pairs,
        segment_rows=segment_rows.astype(np.int64),
        segment_edges=segment_edges.astype(np.int64),
        segment_pairs=segment_pairs,
        loss_batches=_loss_batches(sequence_pairs, completed_in, segments.num_segments),
        paths=root_paths(segments),
        memory_tokens=choice.memory_tokens,
        activation_tokens=activation_tokens,
        context_size=pipeline.context_size,
    )


def _edges(tree: PrefixTree, pair_child: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The trained edges, sorted by (row, child).

    Args:
        pair_child: int64 [P], stream index of each pair's child token.

    Returns:
        (child [E] and row [E] of each edge, stream index of each row [R], edge of each pair [P]). A child has one
        incoming edge, so it identifies the edge.
    """
    child = np.flatnonzero(np.bincount(pair_child, minlength=tree.num_tokens))
    child = child[np.argsort(tree.parent[child], kind="stable")]
    is_row = np.zeros(tree.num_tokens, dtype=bool)
    is_row[tree.parent[child]] = True
    edge_row = (np.cumsum(is_row) - 1)[tree.parent[child]]
    edge_of_child = np.full(tree.num_tokens, -1, dtype=np.int64)
    edge_of_child[child] = np.arange(len(child))
    return child, edge_row, np.flatnonzero(is_row), edge_of_child[pair_child]


def _loss_batches(sequence_pairs: np.ndarray, completed_in: np.ndarray, num_segments: int) -> list[list[LossBatch]]:
    """Make the loss batches of every segment.

    Args:
        sequence_pairs: int64 [Q + 1], offsets of each sequence's pairs.
        completed_in: int64 [Q], segment that holds each sequence's last row.
    """
    lengths = np.diff(sequence_pairs)
    batches: list[list[LossBatch]] = [[] for _ in range(num_segments)]
    order = np.lexsort((-lengths, completed_in))
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order) and _fits(lengths, completed_in, order[begin], order[end], end - begin + 1):
            continue
        chosen = order[begin:end]
        steps = np.arange(lengths[chosen[0]])
        index = sequence_pairs[chosen][:, None] + steps
        index[steps >= lengths[chosen][:, None]] = sequence_pairs[-1]
        batches[completed_in[chosen[0]]].append(LossBatch(chosen.astype(np.int64), index))
        begin = end
    return batches


def _fits(lengths: np.ndarray, completed_in: np.ndarray, first: int, candidate: int, count: int) -> bool:
    """Whether ``candidate`` may join the rectangle whose first and longest sequence is ``first``."""
    if completed_in[first] != completed_in[candidate]:
        return False
    area = int(lengths[first]) * count
    return area <= FREE_ELEMENTS or (area <= MAX_ELEMENTS and 2 * lengths[candidate] >= lengths[first])
